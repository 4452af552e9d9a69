"""KV formats `fp8` and `fp8-e5m2`: 8-bit floating-point K and V."""

from runtime.kv.fp8.reference import FP8Format

__all__ = ["FP8Format"]
