"""KV format `int4`: K and V as 4-bit codes of Hadamard-transformed heads."""

from runtime.kv.int4.reference import Int4Format

__all__ = ["Int4Format"]
