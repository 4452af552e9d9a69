"""Triton kernels of a compressed format: encoding of pages, and attention over compressed pages."""

import math
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import triton
from torch import Tensor

from runtime.attention.base import Batch
from runtime.attention.splits import MIN_TILES, decode_programs
from runtime.config import ModelConfig
from runtime.kv.format import KV_PLANES
from runtime.kv.kernel_source import FragmentSource, KernelSource
from runtime.kv.kernels.encode import encode_kernel, encode_leaving_kernel
from runtime.kv.kernels.windowed import merge_windowed_kernel, windowed_decode_kernel
from runtime.kv.kernels.windowed_fragments import windowed_fragments_kernel
from runtime.pages.window import SINK_PAGES, WINDOW

_LOG2_E = math.log2(math.e)
_MERGED_SPLITS = 16
"""Number of splits of a query head that are merged per iteration."""


@dataclass(frozen=True)
class _Costs:
    """Costs of tiles; see `runtime.kv.kernels.division`.

    Attributes:
        prefix: int32 `[kv_heads + 1]`, exclusive prefix sums of the cost of a tile of each KV head;
            None if all tiles cost the same.
        least: minimum cost of the tiles of a program.
    """

    prefix: Tensor | None = None
    least: int = 1

    @classmethod
    def of(cls, inputs: "LayerInputs") -> "_Costs":
        unit = math.gcd(*inputs.costs)
        costs = [cost // unit for cost in inputs.costs]
        device = next(x.device for x in inputs.planes if isinstance(x, Tensor))
        prefix = torch.tensor([0, *accumulate(costs)], device=device)
        return cls(prefix.int(), MIN_TILES * max(costs))


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of the kernels that differ between layers.

    Attributes:
        planes: further kernel arguments, such as bases. They follow the compressed planes in the
            argument ``planes``.
        costs: bytes of a compressed token of each KV head; empty if all KV heads are alike.
    """

    planes: tuple[Tensor | int, ...] = ()
    costs: tuple[int, ...] = ()


class CompressedPageKernels:
    """Kernels of a layer that read compressed pages without decoding them first.

    CUDA graphs can contain the launches: the host reads no device value, and grids depend on shapes
    only. Unless stated otherwise, ``planes`` are K, V and the compressed planes.

    Attributes:
        inputs: inputs that differ between layers.
    """

    def __init__(self, config: ModelConfig, source: KernelSource) -> None:
        self._heads = config.num_heads
        self._kv_heads = config.num_kv_heads
        self._dim = config.head_dim
        self._source = source
        self._width = max(16, triton.next_power_of_2(self._dim))
        # See `_split_buffers`. The last ones are the largest.
        self._results: list[tuple[Tensor, Tensor, Tensor]] = []
        self.inputs = LayerInputs()
        self._costs = _Costs()

    def of_layer(self, inputs: LayerInputs) -> "CompressedPageKernels":
        """Return the kernels of a layer with inputs of its own.

        All layers share the memory of partial results.
        """
        made = copy(self)
        made.inputs = inputs
        if inputs.costs and self._source.by_cost:
            made._costs = _Costs.of(inputs)
        return made

    def encode(
        self,
        keys: Tensor,
        values: Tensor,
        planes: tuple[Tensor, ...],
        targets: Tensor,
        sources: Tensor | None = None,
        first_positions: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        """Encode whole pages.

        The result is bitwise identical to that of `encode_leaving` and, for quantized formats, to
        that of `CompressedLayer.encode` in torch.

        Args:
            keys, values: bf16 `[p, kv_heads, page_size, dim]`, K after RoPE.
            planes: the compressed planes alone.
            targets: int64 `[t]`, compressed pages to write, without repetition.
            sources: int64 `[t]`, the pages of ``keys`` and ``values`` to encode. By default, all.
            first_positions: int64 `[t]`, position of the first token of each page to encode.
                Formats that undo RoPE need it.
            offsets: int64 `[layers, 2 + len(planes)]`, to encode the same pages of several layers:
                distances of their tensors from those of this layer, see
                `kernels.encode.encode_kernel`. None encodes this layer only.
        """
        if not len(targets):
            return
        if keys.stride(-1) != 1 or values.stride(-1) != 1:
            keys, values = keys.contiguous(), values.contiguous()
        source = self._source.encode
        heads = math.gcd(source.heads, self._kv_heads)
        pages = max(1, source.tokens // keys.shape[2])
        blocks = triton.cdiv(len(targets), pages), self._kv_heads // heads
        encode_kernel[(*blocks, 1 if offsets is None else len(offsets))](
            keys, values, keys.stride()[:3], values.stride()[:3], len(targets), sources, targets,
            first_positions, planes + self.inputs.planes, offsets,
            **self._encoding(planes, keys.shape[2]), HEADS=heads, PAGES=pages,
            num_warps=max(1, source.warps * heads // source.heads), num_stages=source.stages,
            enable_fp_fusion=False,
        )  # fmt: skip

    def encode_leaving(
        self, planes: tuple[Tensor, ...], batch: Batch, offsets: Tensor | None = None
    ) -> None:
        """Encode the pages that leave the windows of a decode batch's sequences in this step.

        These pages do not contain the new tokens. ``offsets`` is that of `encode`.
        """
        k_pages, v_pages = planes[:KV_PLANES]
        table = batch.page_table
        _, compressed = batch.page_tables
        source = self._source.encode
        layers = 1 if offsets is None else len(offsets)
        encode_leaving_kernel[(len(batch.lengths), self._kv_heads, layers)](
            k_pages, v_pages, *k_pages.stride()[:2], table, table.stride(0),
            compressed, compressed.stride(0), batch.lengths,
            planes[KV_PLANES:] + self.inputs.planes, offsets,
            **self._encoding(planes[KV_PLANES:], k_pages.shape[2]), WINDOW=WINDOW,
            SINK_PAGES=SINK_PAGES, num_warps=max(1, source.warps // source.heads),
            num_stages=source.stages, enable_fp_fusion=False,
        )  # fmt: skip

    def attend(self, q: Tensor, planes: tuple[Tensor, ...], batch: Batch) -> Tensor:
        """Return the attention of a decode batch over full-precision and compressed pages.

        The result is `[n, heads * dim]`, in the dtype of ``q``.

        Args:
            q: `[n, heads, dim]`, after RoPE.
        """
        out = q.new_empty(len(q), self._heads * self._dim)
        if not len(q):
            return out
        k_pages, v_pages = planes[:KV_PLANES]
        source = self._source
        table = batch.page_table
        _, compressed = batch.page_tables
        sequences, group = len(q), self._heads // self._kv_heads
        fragments = source.fragments_for(q, k_pages, group)
        programs = self._programs(q, fragments)
        splits = self._splits(sequences, programs)
        programs = sequences * self._kv_heads * splits or programs
        results = self._split_buffers(2 * (programs + sequences * self._kv_heads), q.device)
        inputs = planes[KV_PLANES:] + self.inputs.planes
        v_width = planes[KV_PLANES + 1].shape[-1]
        constants = {
            "KV_HEADS": self._kv_heads, "GROUP": group, "DIM": self._dim, "WIDTH": self._width,
            "PAGE": k_pages.shape[2], "WINDOW": WINDOW, "SINK_PAGES": SINK_PAGES,
            "BLOCK": (fragments or source).tile, "SEQUENCES": triton.next_power_of_2(sequences),
            "MIN_TILES": MIN_TILES, "PROGRAMS": programs,
        }  # fmt: skip
        of_splits = {
            "K_WIDTH": planes[KV_PLANES].shape[-1], "V_WIDTH": v_width,
            "MIN_COST": self._costs.least, "SPLITS": splits,
        }  # fmt: skip
        arguments = (
            q, k_pages, v_pages, *k_pages.stride()[:2], table, table.stride(0), inputs,
            compressed, compressed.stride(0), batch.lengths, sequences, *results,
            _LOG2_E / math.sqrt(self._dim),
        )  # fmt: skip
        grid = (sequences * self._kv_heads + programs,)
        if fragments is not None:
            windowed_fragments_kernel[grid](
                *arguments, **constants, ATTEND=fragments.attend, PARTS=fragments.parts,
                WARPS=fragments.warps, STRIDES=page_strides(planes[KV_PLANES:]),
                num_warps=fragments.warps, maxnreg=fragments.registers,
            )  # fmt: skip
        else:
            windowed_decode_kernel[grid](
                *arguments, self._costs.prefix, **constants, **of_splits, ATTEND=source.attend,
                STRIDES=page_strides(planes[KV_PLANES:]), EXACT_BLOCK=source.full_precision_tile,
                ROWS=max(16, triton.next_power_of_2(group)),
                STORED_ROWS=max(source.rows, triton.next_power_of_2(group)),
                num_warps=source.warps, num_stages=source.stages, maxnreg=source.registers,
            )  # fmt: skip
        merge_windowed_kernel[(sequences * self._heads,)](
            inputs, batch.lengths, sequences, *results, out, self._costs.prefix, **constants,
            **of_splits, FINISH=source.finish, MERGED=_MERGED_SPLITS,
            SUMS=max(16, triton.next_power_of_2(v_width)) if source.latents else self._width,
            num_warps=2,
        )  # fmt: skip
        return out

    def _split_buffers(self, splits: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return buffers for at least ``splits`` partial results.

        All batch sizes use the same buffers. CUDA graphs hold their addresses, so they are kept
        when a batch needs larger ones. Sizes are powers of two: all of them together take less than
        twice the memory of the largest.

        Returns:
            fp32 ``split_acc``, ``split_m`` and ``split_l`` of `windowed_decode_kernel`.
        """
        if not self._results or len(self._results[-1][0]) < splits:
            shape = triton.next_power_of_2(splits), self._heads // self._kv_heads
            acc = torch.empty(*shape, self._width, dtype=torch.float32, device=device)
            maxima, sums = torch.empty(2, *shape, dtype=torch.float32, device=device)
            self._results.append((acc, maxima, sums))
        return self._results[-1]

    def _programs(self, q: Tensor, fragments: FragmentSource | None) -> int:
        """Return the number of programs for compressed tiles."""
        if fragments is None:
            return decode_programs(q.device, self._source.programs)
        full_precision = triton.next_power_of_2(len(q)) * self._kv_heads
        return fragments.compressed_programs(q.device, full_precision)

    def _splits(self, sequences: int, programs: int) -> int:
        """Return SPLITS of `windowed_decode_kernel` for a batch.

        Args:
            sequences: number of sequences.
            programs: number of programs for compressed tiles.
        """
        if self._source.splits is None:
            return 0
        return self._source.splits or max(1, programs // (sequences * self._kv_heads))

    def _encoding(self, planes: tuple[Tensor, ...], page_size: int) -> dict[str, Any]:
        """Return the constants of both encoding kernels, by name."""
        return {
            "ENCODE": self._source.encode.encode,
            "KV_HEADS": self._kv_heads,
            "DIM": self._dim,
            "PAGE": page_size,
            "K_WIDTH": planes[0].shape[-1],
            "V_WIDTH": planes[1].shape[-1],
            "STRIDES": page_strides(planes),
        }


def page_strides(planes: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Return the page stride of each plane, in elements.

    Raises:
        ValueError: a page of a plane is not contiguous.
    """
    for plane in planes:
        _, _, slots, dim = plane.shape
        if plane.stride()[1:] != (slots * dim, dim, 1):
            raise ValueError("each page of a plane must be contiguous")
    return tuple(plane.stride(0) for plane in planes)
