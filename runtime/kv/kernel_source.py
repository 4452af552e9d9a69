"""The Triton functions and sizes that a compressed format contributes to shared kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.runtime import JITFunction

from runtime.attention.splits import PROGRAMS, decode_programs

_FRAGMENT_CAPABILITY = (8, 9)
"""Lowest compute capability with instructions that convert fp8."""
_HOPPER = 9
_FRAGMENT_PAGE, _FRAGMENT_GROUP = 16, 8
"""Tokens of a page, and maximum query heads per KV head, of `windowed_fragments_kernel`."""


@dataclass(frozen=True)
class FragmentSource:
    """Attention of one format with operands in registers; see `kernels.windowed_fragments`.

    Attributes:
        attend: Gluon function that attends over compressed tiles of one KV head; its signature is
            documented in `kernels.windowed_fragments`.
        parts: number of parts of the ``acc`` that it returns; see `kernels.splits.write_split`.
        tile: tokens of a compressed tile.
        warps: warps of a program.
        programs: programs that run at once on a multiprocessor.
        registers: maximum number of registers of a thread.
        dims: supported head dimensions.
        hopper_only: whether the kernel has instructions of Hopper GPUs that no other GPU has.
    """

    attend: JITFunction
    parts: int
    tile: int
    warps: int = 1
    programs: int = 12
    registers: int = 168
    dims: tuple[int, ...] = (64, 128)
    hopper_only: bool = False

    def compressed_programs(self, device: torch.device, full_precision: int) -> int:
        """Return the number of programs for compressed tiles.

        Programs for full-precision tokens start first. If a program has one warp, all programs of
        both kinds fit on the GPU at once, because programs that start later would end last. But at
        least half of the GPU is used for compressed tiles. If a program has several warps, programs
        for compressed tiles may start later: programs for full-precision tokens are few and short.

        Args:
            full_precision: number of programs for full-precision tokens.
        """
        programs = decode_programs(device, self.programs)
        if self.warps > 1:
            return programs
        return max(programs - full_precision, programs // 2)

    def supports(self, q: Tensor, k_pages: Tensor, group: int) -> bool:
        """Return whether the kernel supports a batch.

        Args:
            q: `[n, heads, dim]`.
            k_pages: full-precision pages, `[page, kv_heads, slot, dim]`.
            group: number of query heads per KV head.
        """
        if not q.is_cuda:
            return False
        capability = torch.cuda.get_device_capability(q.device)
        return (
            capability >= _FRAGMENT_CAPABILITY
            and (capability[0] == _HOPPER or not self.hopper_only)
            and q.dtype == torch.bfloat16
            and k_pages.shape[2] == _FRAGMENT_PAGE
            and k_pages.shape[3] in self.dims
            and group <= _FRAGMENT_GROUP
        )


@dataclass(frozen=True)
class EncodeSource:
    """Encoding of one format; see `kernels.encode`.

    Attributes:
        encode: Triton function that encodes the vectors of a program; its signature is documented
            in `kernels.encode`.
        tokens: tokens of a program, a power of two; a program has at least one page.
        heads: maximum number of KV heads of a program, a power of two.
        warps: warps of a program with ``heads`` KV heads.
        stages: stages of the software pipeline.
    """

    encode: JITFunction
    tokens: int = 16
    heads: int = 1
    warps: int = 1
    stages: int = 1


@dataclass(frozen=True)
class KernelSource:
    """Triton functions and sizes of one format.

    Attributes:
        encode: encoding of pages.
        attend, finish: Triton functions that attend over compressed tiles and that turn a sum of
            stored V into outputs; `runtime.kv.kernels.windowed` documents their signatures.
        tile: tokens of a compressed tile, a power of two.
        full_precision_tile: full-precision tokens per iteration.
        warps, stages: warps per program and stages of the software pipeline of attention.
        programs: programs of attention per multiprocessor.
        registers: maximum number of registers of a thread of attention; None for no limit.
        by_cost: whether all programs have tiles of the same total cost, in layers with
            `LayerInputs.costs`. Otherwise all programs have the same number of tiles.
        splits: number of programs for each KV head of a sequence, without balancing (ablation); 0
            for as many as fit on the GPU. None for balanced programs.
        rows: minimum number of query rows of a matmul with compressed tokens (STORED_ROWS).
        latents: whether the ``acc`` that ``attend`` returns is as wide as the second compressed
            plane. Otherwise it is as wide as a head.
        fragments: faster attention kernel for the shapes and GPUs that it supports, or None.
    """

    encode: EncodeSource
    attend: JITFunction
    finish: JITFunction
    tile: int
    full_precision_tile: int = 32
    warps: int = 2
    stages: int = 3
    programs: int = PROGRAMS
    registers: int | None = None
    by_cost: bool = True
    splits: int | None = None
    rows: int = 16
    latents: bool = False
    fragments: FragmentSource | None = None

    def fragments_for(self, q: Tensor, k_pages: Tensor, group: int) -> FragmentSource | None:
        """Return ``fragments`` if it can attend with ``group`` queries to each KV head."""
        found = self.fragments
        return found if found is not None and found.supports(q, k_pages, group) else None
