"""The paged KV cache: its layout and its memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

from runtime.errors import KVFormatError
from runtime.graphs.host_copy import to_device
from runtime.kv.format import KVFormat, Plane
from runtime.pages.plan import PagePlan, compressed_plan

_ALIGNMENT = 16
"""Alignment of the planes in a page of a block, in bytes: that of the widest loads of kernels."""


@dataclass(frozen=True)
class CacheTensor:
    """One tensor of a cache, `[page, kv_heads, page_size, dim]`: a plane of a layer, or a block.

    A *block* contains several planes. A page of it has that page of each plane, one after the
    other. Its ``dim`` only follows from the number of bytes.

    Attributes:
        layer: index of the layer.
        planes: the planes that it contains.
    """

    layer: int
    planes: tuple[Plane, ...]

    @property
    def is_block(self) -> bool:
        return len(self.planes) > 1

    @property
    def name(self) -> str:
        """Name of the plane."""
        return "block" if self.is_block else self.planes[0].name

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8 if self.is_block else self.planes[0].dtype

    @property
    def dim(self) -> int:
        """Elements per KV head and token."""
        if self.is_block:
            return sum(plane.shape[-1] * plane.dtype.itemsize for plane in self.planes)
        return self.planes[0].shape[-1]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of one page."""
        kv_heads, page_size, _ = self.planes[0].shape
        return kv_heads, page_size, self.dim

    @property
    def encodable(self) -> bool:
        """See `Plane`."""
        return self.planes[0].encodable

    @property
    def stored(self) -> bool:
        """See `Plane`."""
        return self.planes[0].stored

    def views(self, tensor: Tensor) -> list[Tensor]:
        """Return the planes as views of the tensor."""
        if not self.is_block:
            return [tensor]
        parts = torch.split(tensor.flatten(1), list(map(_page_bytes, self.planes)), dim=1)
        return [
            part.view(plane.dtype).view(len(part), *plane.shape)
            for part, plane in zip(parts, self.planes, strict=True)
        ]


@dataclass(frozen=True)
class PlaneGroup:
    """All tensors of a cache with equal dtype and shape, in pages of one kind.

    A transfer segment can contain several tensors of one group.

    Attributes:
        dtype: dtype of the elements.
        kv_heads: KV heads of every tensor.
        dim: elements per KV head and token.
        encodable, stored: see `Plane`.
        members: for each layer, its tensors in this group, as (name, index in
            `PagedCache.tensors`).
        is_block: whether the tensors are blocks of several planes; see `CacheTensor`.
    """

    dtype: torch.dtype
    kv_heads: int
    dim: int
    encodable: bool
    stored: bool
    members: tuple[tuple[tuple[str, int], ...], ...]
    is_block: bool

    @cached_property
    def runs(self) -> tuple[range, ...]:
        """Maximal ranges of consecutive layers that have tensors in this group."""
        edges = [0, *(bool(tensors) for tensors in self.members), 0]
        changes = [at for at in range(len(edges) - 1) if edges[at] != edges[at + 1]]
        return tuple(range(*run) for run in zip(changes[::2], changes[1::2], strict=True))

    def count(self, first_layer: int, num_layers: int) -> int:
        """Return the number of tensors of this group in a range of layers."""
        return sum(map(len, self.members[first_layer : first_layer + num_layers]))


@dataclass(frozen=True)
class CacheLayout:
    """All planes of a paged KV cache.

    Attributes:
        page_size: token slots of a page.
        kv_heads: KV heads of every plane.
        layers: planes of each layer, in the order of `KVFormat.planes`.

    Raises:
        KVFormatError: names repeat within a layer, or a shape is not ``(kv_heads, page_size,
            dim)``.
    """

    page_size: int
    kv_heads: int
    layers: tuple[tuple[Plane, ...], ...]

    def __post_init__(self) -> None:
        for number, planes in enumerate(self.layers):
            if not planes or len({plane.name for plane in planes}) != len(planes):
                raise KVFormatError(f"layer {number} needs planes with distinct names: {planes}")
            for plane in planes:
                expected = (self.kv_heads, self.page_size)
                if plane.shape[:-1] != expected or plane.shape[-1] < 1:
                    raise KVFormatError(
                        f"layer {number}, plane {plane.name!r}: shape {plane.shape} is not "
                        f"(kv_heads, page_size, dim) with {expected}"
                    )

    @classmethod
    def of(cls, kv_format: KVFormat, *, num_layers: int, page_size: int) -> Self:
        """Return the layout of a format's planes.

        Raises:
            KVFormatError: the planes are malformed, see `CacheLayout`.
        """
        layers = tuple(kv_format.planes(layer, page_size) for layer in range(num_layers))
        kv_heads = layers[0][0].shape[0] if layers and layers[0] else 0
        return cls(page_size, kv_heads, layers)

    @cached_property
    def planes(self) -> tuple[tuple[int, Plane], ...]:
        """All planes as (layer index, plane), in the order of `PagedCache.planes`."""
        return tuple((layer, plane) for layer, planes in enumerate(self.layers) for plane in planes)

    @cached_property
    def tensors(self) -> tuple[CacheTensor, ...]:
        """All tensors, in the order of `PagedCache.tensors`.

        Stored planes that are not encodable differ in dtype and width, but are always sent
        together. Those of a layer are a block, so that one segment can contain them, unless their
        pages are not aligned. Every other plane is a tensor of its own.
        """
        found = []
        for layer, planes in enumerate(self.layers):
            block = tuple(plane for plane in planes if plane.stored and not plane.encodable)
            if len(block) < 2 or any(_page_bytes(plane) % _ALIGNMENT for plane in block):
                block = ()
            found += [CacheTensor(layer, (plane,)) for plane in planes if plane not in block]
            if block:
                found.append(CacheTensor(layer, block))
        return tuple(found)

    @cached_property
    def groups(self) -> tuple[PlaneGroup, ...]:
        """The groups of tensors, in the order of their first tensors."""
        found: dict[tuple[torch.dtype, int, bool, bool, bool], list[list[tuple[str, int]]]] = {}
        for index, tensor in enumerate(self.tensors):
            key = tensor.dtype, tensor.dim, tensor.encodable, tensor.stored, tensor.is_block
            members = found.setdefault(key, [[] for _ in self.layers])
            members[tensor.layer].append((tensor.name, index))
        return tuple(
            PlaneGroup(
                *(dtype, self.kv_heads, dim, encodable, stored, tuple(map(tuple, members))),
                is_block=is_block,
            )
            for (dtype, dim, encodable, stored, is_block), members in found.items()
        )

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes that one token occupies in a page of a sequence, summed over all planes.

        For a compressed format, this is an exact page; see `stored_bytes_per_token`.
        """
        return self._bytes_per_token(stored=False)

    @cached_property
    def stored_bytes_per_token(self) -> int:
        """Bytes that one token occupies in a stored page; 0 without a compressed format."""
        return self._bytes_per_token(stored=True)

    @cached_property
    def has_stored(self) -> bool:
        """Whether the format has stored pages."""
        return any(plane.stored for _, plane in self.planes)

    @cached_property
    def plan(self) -> PagePlan:
        """Counts of the pages that sequences need."""
        return compressed_plan(self.page_size) if self.has_stored else PagePlan(self.page_size)

    def _bytes_per_token(self, *, stored: bool) -> int:
        return sum(
            self.kv_heads * plane.shape[-1] * plane.dtype.itemsize
            for _, plane in self.planes
            if plane.stored is stored
        )


class PagedCache:
    """Memory for the KV of all sequences of one worker.

    Args:
        num_pages: number of pages, exact ones with a compressed format.
        num_stored: number of stored pages of a compressed format.

    Attributes:
        layout: layout of the planes.
        page_size: token slots of a page.
        tensors: one tensor ``[page, kv_head, slot, dim]`` for each of ``layout.tensors``.
        planes: one view ``[page, kv_head, slot, dim]`` of them for each of ``layout.planes``. Each
            page is contiguous.
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        num_pages: int,
        num_stored: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layout = layout
        self.page_size = layout.page_size
        counts = {False: num_pages, True: num_stored}
        self.tensors: list[Tensor] = [
            torch.zeros(counts[each.stored], *each.shape, dtype=each.dtype, device=device)
            for each in layout.tensors
        ]
        views: dict[tuple[int, str], Tensor] = {}
        for each, tensor in zip(layout.tensors, self.tensors, strict=True):
            names = [(each.layer, plane.name) for plane in each.planes]
            views |= zip(names, each.views(tensor), strict=True)
        self.planes = [views[layer, plane.name] for layer, plane in layout.planes]
        planes = iter(self.planes)
        self._layers = [tuple(next(planes) for _ in each) for each in layout.layers]

    @classmethod
    def of_stored(
        cls, planes: Sequence[Plane], num_stored: int, device: torch.device | str = "cpu"
    ) -> Self:
        """Return a cache of one layer that has only the stored planes of a compressed format."""
        layer = tuple(replace(plane, stored=True) for plane in planes)
        kv_heads, page_size, _ = layer[0].shape
        layout = CacheLayout(page_size, kv_heads, (layer,))
        return cls(layout, num_pages=0, num_stored=num_stored, device=device)

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """Return the planes of one layer."""
        return self._layers[index]

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy page ``sources[i]`` to page ``targets[i]``, in stream order.

        Stored pages are never copied: they are not written again.
        """
        read, written = to_device(np.array([sources, targets], np.int64), self.planes[0].device)
        for (_, plane), tensor in zip(self.layout.planes, self.planes, strict=True):
            if not plane.stored:
                tensor[written] = tensor[read]


def _page_bytes(plane: Plane) -> int:
    """Return the bytes of a page of a plane."""
    return math.prod(plane.shape) * plane.dtype.itemsize
