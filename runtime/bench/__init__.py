"""Benchmarks: ``python -m runtime.bench engine|step|decode|prefill|plan|host [--help]``.

A table shows each measurement beside its physical floor, computed from rates measured in the same
run, and beside peers with the same weights. GPU benchmarks use random weights at real shapes.
"""
