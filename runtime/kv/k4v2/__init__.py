"""KV format `k4v2`: K as in format `int4`, V as 2-bit codes."""

from runtime.kv.k4v2.reference import K4V2Format

__all__ = ["K4V2Format"]
