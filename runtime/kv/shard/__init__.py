"""KV format `shard`: K before RoPE as int4 PCA coefficients of a layer, V rotated to 2 bits."""

from runtime.kv.shard.calibrate import ShardOptions, calibrate
from runtime.kv.shard.format import ShardFormat

__all__ = ["ShardFormat", "ShardOptions", "calibrate"]
