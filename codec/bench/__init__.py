"""Benchmarks of the codec: `python -m codec.bench --help`."""
