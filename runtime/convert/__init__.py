"""Offline: reads what other factorization codes write, and gives canonical checkpoints."""

from runtime.convert.convert import Source, convert
from runtime.convert.families import Family

__all__ = ["Family", "Source", "convert"]
