# ruff: noqa: E741 - `l` is the sum of an online softmax, as in the literature
"""Memory for partial results of decode attention; see `runtime.attention.kernels.balance`."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

_MERGED = 32
"""Splits of query heads that are merged per iteration, at most `_MERGED_HEADS` heads at a time."""
_MERGED_HEADS = 8
MIN_TILES = 2
"""Minimum number of tiles per decode program."""
PROGRAMS = 4
"""Decode programs per multiprocessor of a GPU, by default."""
_INTERPRETED_PROGRAMS = 8
"""Decode programs without a GPU, in Triton's interpreter."""


def decode_programs(device: torch.device, each: int) -> int:
    """Return the number of programs over which decode attention is divided.

    Args:
        each: programs per multiprocessor of a GPU.
    """
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return each * torch.cuda.get_device_properties(device).multi_processor_count


def merge_sizes(group: int) -> dict[str, int]:
    """Return MERGED and MERGED_HEADS of `balance.write_split`.

    Args:
        group: query heads per KV head.
    """
    heads = min(triton.next_power_of_2(group), _MERGED_HEADS)
    return {"MERGED": _MERGED // heads, "MERGED_HEADS": heads}


@dataclass(frozen=True)
class SplitBuffers:
    """Results of splits of heads; see `balance.write_split`. CUDA graphs hold their addresses.

    Attributes:
        acc: fp32 `[programs, 2, group, dim]`, unnormalized outputs.
        m, l: fp32 `[programs, 2, group]`, maximum and sum of the online softmax.
        counters: int32 `[sequences, kv_heads]`, zero between launches; the number of sequences is
            a power of two.
    """

    acc: Tensor
    m: Tensor
    l: Tensor
    counters: Tensor


class Splits:
    """The `SplitBuffers` of one attention shape, allocated when they are first used.

    Args:
        programs: decode programs per multiprocessor of a GPU.
    """

    def __init__(self, heads: int, kv_heads: int, dim: int, programs: int = PROGRAMS) -> None:
        self._programs = programs
        self._group = heads // kv_heads
        self._kv_heads = kv_heads
        self._dim = dim
        # Keys are numbers of sequences, powers of two.
        self._buffers: dict[int, SplitBuffers] = {}

    def of(self, sequences: int, device: torch.device) -> SplitBuffers:
        """Return buffers for at least this number of sequences."""
        size = triton.next_power_of_2(sequences)
        if size not in self._buffers:
            self._buffers[size] = self._allocate(size, device)
        return self._buffers[size]

    def _allocate(self, sequences: int, device: torch.device) -> SplitBuffers:
        programs = decode_programs(device, self._programs)
        shape = programs, 2, self._group
        acc = torch.empty(*shape, self._dim, dtype=torch.float32, device=device)
        m, l = torch.empty(2, *shape, dtype=torch.float32, device=device)
        counters = torch.zeros(sequences, self._kv_heads, dtype=torch.int32, device=device)
        return SplitBuffers(acc, m, l, counters)
