"""Benchmarks: ``python -m runtime.offline.bench engine|step|decode|prefill|plan|host [--help]``.

Each measurement is printed beside its physical floor, which is computed from rates measured in the
same run. Peers are other implementations with the same weights. GPU benchmarks use random weights
in the shapes of real models.
"""
