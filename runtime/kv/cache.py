"""The paged KV cache: its layout and its memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

from runtime.errors import KVFormatError
from runtime.graphs.events import Events
from runtime.graphs.host_copy import to_device
from runtime.kv.format import KVFormat, Plane
from runtime.pages.groups import PageGroup, Part
from runtime.pages.plan import PageCount, PagePlan
from runtime.pages.sizes import PageBytes

_ALIGNMENT = 16
"""Alignment of the KV heads in a page of a block, in bytes: the width of the widest loads."""


@dataclass(frozen=True)
class CacheTensor:
    """One tensor of a cache, `[page, kv_heads, page_size, dim]`: a plane of a layer, or a block.

    A *block* contains several planes, as uint8. Each of its pages holds that page of every plane,
    one after the other. Its ``dim`` is the number of bytes per KV head and token of all planes.

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
        """Name of the plane, or "block"."""
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
    def group(self) -> PageGroup:
        """See `Plane`."""
        return self.planes[0].group

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
    """All tensors of a cache with equal dtype and shape, in pages of one page group.

    A transfer segment can contain several tensors of one group. The planes of blocks are in groups,
    too. They are sent instead of the blocks if a segment has only some of the KV heads of a rank,
    because a block stores the KV heads of one plane after those of another.

    Attributes:
        dtype: dtype of the elements.
        dim: elements per KV head and token.
        encodable: see `Plane`.
        page_group: index of the page group in `CacheLayout.plan`.
        members: for each layer, its tensors in this group, as (name, index in
            `PagedCache.sendable`).
        is_block: whether the tensors are blocks of several planes; see `CacheTensor`.
        in_block: whether the tensors are planes of blocks.
    """

    dtype: torch.dtype
    dim: int
    encodable: bool
    page_group: int
    members: tuple[tuple[tuple[str, int], ...], ...]
    is_block: bool
    in_block: bool = False

    def is_sent(self, *, split: bool) -> bool:
        """Return whether segments of a sequence may have tensors of this group.

        Args:
            split: whether they have only some of the KV heads of a rank.
        """
        return not (self.is_block if split else self.in_block)

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
        KVFormatError: names repeat within a layer, a shape is not ``(kv_heads, page_size, dim)``,
            or page groups with one name differ.
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
        if len({group.name for group in self.page_groups}) < len(self.page_groups):
            raise KVFormatError(f"page groups with the same name differ: {self.page_groups}")

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

        The planes of a layer into which pages are encoded differ in dtype and width, but are always
        sent together. They form a block, so that one segment can contain them. Encodable planes
        are not part of it. There is no block if the KV heads of one of its planes would not be
        aligned. All planes outside blocks are tensors of their own.
        """
        found = []
        for layer, planes in enumerate(self.layers):
            encoded = (plane for plane in planes if plane.group.part is Part.MIDDLE)
            block = tuple(plane for plane in encoded if not plane.encodable)
            if len(block) < 2 or any(_head_bytes(plane) % _ALIGNMENT for plane in block):
                block = ()
            found += [CacheTensor(layer, (plane,)) for plane in planes if plane not in block]
            if block:
                found.append(CacheTensor(layer, block))
        return tuple(found)

    @cached_property
    def sendable(self) -> tuple[CacheTensor, ...]:
        """All tensors, followed by the planes of blocks; in the order of `PagedCache.sendable`."""
        blocks = (tensor for tensor in self.tensors if tensor.is_block)
        parts = (CacheTensor(block.layer, (plane,)) for block in blocks for plane in block.planes)
        return (*self.tensors, *parts)

    @cached_property
    def groups(self) -> tuple[PlaneGroup, ...]:
        """All plane groups, in the order of their first tensors in `sendable`.

        They do not depend on the number of KV heads, so that all ranks number them alike.
        """
        found: dict[tuple[torch.dtype, int, bool, int, bool, bool], list[list[tuple[str, int]]]]
        found = {}
        for index, tensor in enumerate(self.sendable):
            group = self.page_groups.index(tensor.group)
            in_block = index >= len(self.tensors)
            key = tensor.dtype, tensor.dim, tensor.encodable, group, tensor.is_block, in_block
            members = found.setdefault(key, [[] for _ in self.layers])
            members[tensor.layer].append((tensor.name, index))
        return tuple(
            PlaneGroup(dtype, dim, encodable, group, tuple(map(tuple, members)), is_block, in_block)
            for (dtype, dim, encodable, group, is_block, in_block), members in found.items()
        )

    @cached_property
    def plan(self) -> PagePlan:
        """Page groups of the planes, and counts of the pages that sequences need."""
        return PagePlan(self.page_size, self.page_groups)

    @cached_property
    def page_bytes(self) -> PageBytes:
        """Sizes of the pages of each group."""
        sizes = dict.fromkeys(self.page_groups, 0)
        for _, plane in self.planes:
            sizes[plane.group] += _page_bytes(plane)
        return PageBytes(self.plan, tuple(sizes.values()))

    @cached_property
    def layer_groups(self) -> tuple[int, ...]:
        """For each layer, the page group of its first plane, as its index in `plan`."""
        return tuple(self.page_groups.index(planes[0].group) for planes in self.layers)

    @cached_property
    def page_groups(self) -> tuple[PageGroup, ...]:
        """Page groups of the planes, in the order of `plan`: groups of encoded pages are last."""
        groups = dict.fromkeys(plane.group for _, plane in self.planes)
        return tuple(sorted(groups, key=lambda group: group.part is Part.MIDDLE))


class PagedCache:
    """Memory for the KV of all sequences of one worker.

    Args:
        pages: number of pages of each page group of the layout.

    Attributes:
        layout: layout of the planes.
        pages: number of pages of each page group.
        tensors: one tensor ``[page, kv_head, slot, dim]`` for each of ``layout.tensors``.
        sendable: ``tensors``, and views of them, one for each of ``layout.sendable``.
        planes: views of ``tensors``, one ``[page, kv_head, slot, dim]`` for each of
            ``layout.planes``. Each page is contiguous.
        events: numbered CUDA events, after which pages hold the KV of a step or may be written to.
    """

    def __init__(
        self,
        layout: CacheLayout,
        pages: PageCount,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layout = layout
        self.pages = pages
        self.events = Events(torch.device(device))
        groups = layout.page_groups
        if len(pages) != len(groups):
            raise ValueError(f"{len(pages)} numbers of pages for {len(groups)} page groups")
        counts = dict(zip(groups, pages, strict=True))
        self.tensors: list[Tensor] = [
            torch.zeros(counts[each.group], *each.shape, dtype=each.dtype, device=device)
            for each in layout.tensors
        ]
        views: dict[tuple[int, str], Tensor] = {}
        for each, tensor in zip(layout.tensors, self.tensors, strict=True):
            names = [(each.layer, plane.name) for plane in each.planes]
            views |= zip(names, each.views(tensor), strict=True)
        parts = layout.sendable[len(self.tensors) :]
        self.sendable = [*self.tensors, *(views[part.layer, part.name] for part in parts)]
        self._layers = [
            tuple(views[layer, plane.name] for plane in planes)
            for layer, planes in enumerate(layout.layers)
        ]
        self.planes = [plane for planes in self._layers for plane in planes]

    @property
    def null_pages(self) -> tuple[int, ...]:
        """For each page group, the id of its null page, the last page; 0 if it has none."""
        nulls = self.layout.plan.null_pages
        return tuple((pages - 1) * null for pages, null in zip(self.pages, nulls, strict=True))

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """Return the planes of one layer."""
        return self._layers[index]

    def copy_pages(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy page ``sources[i]`` of a page group to page ``targets[i]``, in stream order."""
        read, written = to_device(np.array([sources, targets], np.int64), self.planes[0].device)
        copied = self.layout.page_groups[group]
        for (_, plane), tensor in zip(self.layout.planes, self.planes, strict=True):
            if plane.group == copied:
                tensor[written] = tensor[read]


def _page_bytes(plane: Plane) -> int:
    """Return the size of a page of a plane in bytes."""
    return plane.shape[0] * _head_bytes(plane)


def _head_bytes(plane: Plane) -> int:
    """Return the size of one KV head in a page of a plane in bytes."""
    return math.prod(plane.shape[1:]) * plane.dtype.itemsize
