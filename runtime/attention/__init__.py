"""Attention over paged KV: selection of the backend for a model and device."""

import torch

from runtime.attention.base import DenseAttention
from runtime.attention.cpu import CompiledAttention
from runtime.attention.reference import ReferenceAttention
from runtime.config import ModelConfig

_MAX_HEAD_DIM_ON_GPU = {torch.bfloat16: 256, torch.float32: 128}
"""Maximum head dimension for each dtype of queries. With larger heads, a prefill block does not fit
into Hopper's shared memory.
"""


def dense_attention(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, window: int | None = None
) -> DenseAttention:
    """Return the attention backend for a model's shape and dtype on a device.

    Args:
        window: number of last tokens that a token attends to, itself included; None: all.

    Raises:
        ValueError: the layers have a window, and the device is a GPU.
    """
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    if window is not None and device.type == "cuda":
        raise ValueError("attention with a sliding window is not implemented on GPUs")
    if device.type == "cuda" and config.head_dim <= _MAX_HEAD_DIM_ON_GPU.get(dtype, 0):
        from runtime.attention.gpu import TritonAttention  # optional: Triton

        return TritonAttention(*heads)
    compiled = device.type == "cpu" and dtype == torch.float32 and config.head_dim % 4 == 0
    return CompiledAttention(*heads, window) if compiled else ReferenceAttention(window)
