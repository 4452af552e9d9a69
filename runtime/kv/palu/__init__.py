"""KV format `palu`: low-rank latents of K before RoPE, shared by groups of heads, bf16."""

from runtime.kv.palu.calibrate import PaluOptions, calibrate
from runtime.kv.palu.format import PaluFormat

__all__ = ["PaluFormat", "PaluOptions", "calibrate"]
