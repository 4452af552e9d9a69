"""Benchmarks: ``python -m runtime.offline.bench TABLE [--help]``; `__main__.py` lists the tables.

Each measurement is printed beside its physical floor, which is computed from rates measured in the
same run. Peers are other implementations with the same weights. GPU benchmarks use random weights
in the shapes of real models.
"""
