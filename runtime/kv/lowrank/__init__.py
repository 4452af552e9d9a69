"""KV format `lowrank`: latents of K before RoPE and of V, of the model's own factor pairs, bf16."""

from runtime.kv.lowrank.format import LowRankFormat

__all__ = ["LowRankFormat"]
