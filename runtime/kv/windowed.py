"""KV formats with compressed pages, and full-precision pages for prompts, sinks and recent tokens.

`WindowedFormat` combines format `dense` with a `CompressedFormat`. Prompts are computed over
full-precision pages alone. `PageEncoder` then encodes those that are not recent. A decode step
appends to a full-precision page, encodes the page that leaves the window, if any, and attends to
both kinds of pages.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.attention.base import Batch, MixedBatch
from runtime.attention.reference import ReferenceAttention
from runtime.kv.cache import CacheLayout, PagedCache
from runtime.kv.compressed import (
    COMPRESSED,
    FULL_PRECISION,
    CompressedFormat,
    CompressedLayer,
    compressed_table,
)
from runtime.kv.dense import DenseFormat, DenseLayer
from runtime.kv.format import KV_PLANES, KVFormat, Plane
from runtime.pages.plan import PageCount, pages_for
from runtime.pages.window import SINK_PAGES, first_recent

if TYPE_CHECKING:  # optional: Triton
    from runtime.kv.gpu import CompressedPageKernels
    from runtime.kv.layers_encoder import LayersEncoder


def compressed_cache(
    planes: Sequence[Plane], pages: int, device: torch.device | str = "cpu"
) -> PagedCache:
    """Return a cache of one layer that has only the planes of a compressed format."""
    layer = tuple(replace(plane, group=COMPRESSED) for plane in planes)
    kv_heads, page_size, _ = layer[0].shape
    return PagedCache(CacheLayout(page_size, kv_heads, (layer,)), PageCount(pages), device)


class WindowedLayer:
    """One layer of a `WindowedFormat`; a `LayerKV` with planes for K, V and compressed pages."""

    def __init__(self, dense: DenseLayer, compressed: CompressedLayer) -> None:
        self._dense = dense
        self._compressed = compressed
        self._reference = ReferenceAttention()

    def append(
        self, qkv: Tensor, rope: tuple[Tensor, Tensor], planes: tuple[Tensor, ...], batch: Batch
    ) -> Tensor:
        """See `LayerKV`. Sequences being decoded also encode the page that leaves the window."""
        q = self._dense.append(qkv, rope, planes[:KV_PLANES], batch)
        self.encode_leaving(planes, batch.decode if isinstance(batch, MixedBatch) else batch)
        return q

    def encode_leaving(self, planes: tuple[Tensor, ...], batch: Batch) -> None:
        """Encode the pages that leave the windows of sequences being decoded."""
        table = compressed_table(batch)
        if table is None:
            return
        if kernels := self.kernels(planes[0].device):
            kernels.encode_leaving(planes, batch)
            return
        page_size = planes[0].shape[2]
        sources, targets, first = [], [], []
        for index, length in enumerate(batch.lengths.tolist()):
            page = first_recent(length, page_size) - 1
            was_recent = page >= first_recent(length - 1, page_size)
            if was_recent:
                sources.append(batch.page_table[index, page])
                targets.append(table[index, page])
                first.append(page * page_size)
        if sources:
            device = planes[0].device
            self.encode(
                planes,
                torch.stack(sources).long(),
                torch.stack(targets).long(),
                torch.tensor(first, device=device),
            )

    def attend(self, q: Tensor, planes: tuple[Tensor, ...], batch: Batch) -> Tensor:
        table = compressed_table(batch)
        if table is None:
            found = self._compressed.attend_prompt(q, planes[:KV_PLANES], batch)
            return self._dense.attend(q, planes[:KV_PLANES], batch) if found is None else found
        if kernels := self.kernels(q.device):
            return kernels.attend(q, planes, batch)
        outputs = []
        for index, length in enumerate(batch.lengths.tolist()):
            full_precision, compressed = batch.page_table[index].long(), table[index].long()
            k, v = self._gathered(planes, full_precision, compressed, length)
            pages = torch.arange(len(k), device=q.device, dtype=torch.int32)[None]
            alone = replace(
                batch,
                tokens=batch.tokens[index : index + 1],
                positions=batch.positions[index : index + 1],
                page_table=pages,
                starts=torch.tensor([0, 1], dtype=torch.int32, device=q.device),
                lengths=batch.lengths[index : index + 1],
                sequences=batch.sequences[:1],
                logit_rows=batch.logit_rows[:1],
                page_tables=(),
            )
            outputs.append(self._reference.attend(q[index : index + 1], k, v, alone))
        return torch.cat(outputs)

    def encode(
        self,
        planes: tuple[Tensor, ...],
        sources: Tensor,
        targets: Tensor,
        first_positions: Tensor,
    ) -> None:
        """Encode full-precision pages; see `PageEncoder.encode`."""
        k_pages, v_pages = planes[:KV_PLANES]
        compressed = planes[KV_PLANES:]
        if kernels := self.kernels(k_pages.device):
            kernels.encode(k_pages, v_pages, compressed, targets, sources, first_positions)
            return
        self._compressed.encode(
            k_pages[sources], v_pages[sources], first_positions, compressed, targets
        )

    def kernels(self, device: torch.device) -> "CompressedPageKernels | None":
        return self._compressed.kernels(device)

    def _gathered(
        self,
        planes: tuple[Tensor, ...],
        full_precision: Tensor,
        compressed: Tensor,
        length: int,
    ) -> tuple[Tensor, Tensor]:
        """Return K and V of all pages of a sequence, `[p, kv_heads, page_size, dim]` each.

        Args:
            full_precision, compressed: page tables of the sequence in both page groups.
            length: tokens of the sequence.
        """
        page_size = planes[0].shape[2]
        count = pages_for(length, page_size)
        recent = first_recent(length, page_size)
        k, v = (plane[full_precision[:count]].float() for plane in planes[:KV_PLANES])
        pages = torch.arange(SINK_PAGES, recent, device=compressed.device)
        if len(pages):
            k[pages], v[pages] = self._compressed.decode(
                planes[KV_PLANES:], compressed[pages], pages * page_size
            )
        return k, v


class WindowedFormat(KVFormat):
    """A `KVFormat` that adds the pages of a compressed format to those of `dense`."""

    def __init__(self, dense: DenseFormat, compressed: CompressedFormat) -> None:
        self._dense = dense
        self._compressed = compressed
        self.name = compressed.name
        self.version = compressed.version
        self.artifact_hash = compressed.artifact_hash
        self.keeps_rope = compressed.keeps_rope
        self.graph_safe = dense.graph_safe and compressed.fused

    @property
    def kernels(self) -> str:
        return f"{self._dense.kernels}+{self.name}-{self.version}"

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:
        full_precision = (
            replace(plane, group=FULL_PRECISION) for plane in self._dense.planes(layer, page_size)
        )
        # Formats may name their planes "k" and "v", but names must be unique within a layer.
        compressed = (
            replace(plane, name=f"{plane.name}_stored", group=COMPRESSED)
            for plane in self._compressed.planes(layer, page_size)
        )
        return (*full_precision, *compressed)

    def layer(self, index: int) -> WindowedLayer:
        return WindowedLayer(self._dense.layer(index), self._compressed.layer(index))

    def encoder(self, layers: Sequence[tuple[Tensor, ...]]) -> "PageEncoder | LayersEncoder":
        """Return the encoder of the pages of a cache, with fused kernels if all layers have them.

        Args:
            layers: planes of each layer.
        """
        own = [(self.layer(index), planes) for index, planes in enumerate(layers)]
        found = [(layer.kernels(planes[0].device), planes) for layer, planes in own]
        fused = [(kernels, planes) for kernels, planes in found if kernels is not None]
        if len(fused) < len(own):
            return PageEncoder(own)
        from runtime.kv.layers_encoder import LayersEncoder

        return LayersEncoder(fused)

    def decode_attention(
        self, layers: Sequence[tuple[Tensor, ...]], batch: Batch
    ) -> list[Callable[[Tensor], Tensor]]:
        """Return the attention of each layer for a decode batch, for the decode megakernel.

        The functions expect that K and V of the new tokens are in their pages, and that
        `PageEncoder.encode_leaving` was called. They take q after RoPE, `[n, heads, dim]`, and
        return `[n, heads * dim]`.

        Args:
            layers: planes of each layer.
        """

        return [
            partial(self.layer(index).attend, planes=planes, batch=batch)
            for index, planes in enumerate(layers)
        ]


class PageEncoder:
    """Encoding of full-precision pages into compressed pages, one layer of a cache after another.

    Args:
        layers: the layers of a format and their planes.
    """

    def __init__(self, layers: Sequence[tuple[WindowedLayer, tuple[Tensor, ...]]]) -> None:
        self._layers = layers

    def encode(self, sources: Tensor, targets: Tensor, first_positions: Tensor) -> None:
        """Encode pages.

        Args:
            sources: int64 `[p]`, full-precision pages.
            targets: int64 `[p]`, compressed pages, without repetition.
            first_positions: int64 `[p]`, position of the first token of each page.
        """
        for layer, planes in self._layers:
            layer.encode(planes, sources, targets, first_positions)

    def encode_leaving(self, batch: Batch) -> None:
        """Encode the pages that leave the windows of a decode batch's sequences in this step.

        These pages do not contain the new tokens, so they can be encoded before K and V of the new
        tokens are known.
        """
        for layer, planes in self._layers:
            layer.encode_leaving(planes, batch)
