"""Encoding and decoding of segments, with the planes and codebooks that each segment needs."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

import codec
from codec.elements import element_of
from runtime.kv.cache import CacheLayout, PlaneGroup
from services.transfer.drift import Escapes
from services.transfer.extent import Extent
from services.transfer.frame import HEADER_BYTES
from services.transfer.policy import WireMode

Books = Mapping[tuple[int, str], codec.Codebook]
"""Codebooks by (layer, plane name)."""


class SegmentCodecs:
    """Encodes and decodes segments of one cache. Codecs are created once and kept.

    A plane without a codebook is sent raw in every mode.

    Args:
        layout: layout of the cache.
        codebooks: codebooks by (layer, plane name); ignored for planes that are not encodable.
        first_kv_head: index of the cache's first KV head, counted over all ranks.

    Raises:
        UnsupportedDtype: the codec does not support the dtype of an encodable plane.
    """

    def __init__(self, layout: CacheLayout, codebooks: Books, *, first_kv_head: int = 0) -> None:
        self.layout = layout
        self._first_kv_head = first_kv_head
        self._books = [
            [
                tuple(codebooks.get((layer, name)) if group.encodable else None for name, _ in each)
                for layer, each in enumerate(group.members)
            ]
            for group in layout.groups
        ]
        self._coded = [any(map(any, books)) for books in self._books]
        self._shapes = [_wire_shape(group, layout.page_size) for group in layout.groups]
        self._elements = [element_of(dtype) for _, dtype in self._shapes]
        self._kept: dict[tuple[int | WireMode, ...], codec.PagedCodec] = {}

    @property
    def kv_heads(self) -> range:
        """KV heads of the cache, counted over all ranks."""
        return range(self._first_kv_head, self._first_kv_head + self.layout.kv_heads)

    @property
    def has_codebooks(self) -> bool:
        """Whether any plane can be sent in `WireMode.SPLITZIP`."""
        return any(self._coded)

    def is_coded(self, group: int) -> bool:
        """Return whether a plane of this plane group has a codebook."""
        return self._coded[group]

    def of(
        self, tensors: Sequence[Tensor], extent: Extent, mode: WireMode = WireMode.SPLITZIP
    ) -> codec.PagedCodec:
        """Return the codec of a segment's layers, KV heads and plane group.

        Args:
            tensors: `PagedCache.sendable`; every call must pass the same ones.
            mode: mode for encoding; decoding uses the codebooks that the payload names.
        """
        key = (
            *(extent.plane_group, extent.first_layer, extent.num_layers),
            *(extent.first_kv_head, extent.num_kv_heads, mode),
        )
        found = self._kept.get(key)
        if found is not None:
            return found
        group = self.layout.groups[extent.plane_group]
        whole = group_tensors(tensors, group, extent.first_layer, extent.num_layers)
        first = extent.first_kv_head - self._first_kv_head
        planes = [plane[:, first : first + extent.num_kv_heads] for plane in whole]
        books = self._books_of(extent)
        if mode is WireMode.RAW:
            books = [None] * len(books)
        self._kept[key] = codec.paged(planes, books)
        return self._kept[key]

    def max_frame_bytes(
        self, group: int, layers: int, tokens: int, kv_heads: int | None = None
    ) -> int:
        """Return the largest frame of a segment in bytes.

        Args:
            kv_heads: number of its KV heads; default: all of the cache.
        """
        dim, _ = self._shapes[group]
        tensors = layers * max(map(len, self.layout.groups[group].members))
        if kv_heads is None:
            kv_heads = self.layout.kv_heads
        return HEADER_BYTES + codec.max_segment_bytes(
            tensors, kv_heads, dim, tokens, self.layout.page_size, self._elements[group]
        )

    @property
    def min_slot_bytes(self) -> int:
        """Minimum slot size in bytes: one page of one layer of any plane group fits."""
        return self.max_page_frame_bytes(self.layout.kv_heads)

    def max_page_frame_bytes(self, kv_heads: int) -> int:
        """Return the largest frame of one page of one layer, of any plane group, in bytes."""
        groups, tokens = range(len(self.layout.groups)), self.layout.page_size
        return max(self.max_frame_bytes(group, 1, tokens, kv_heads) for group in groups)

    def raw_bytes(self, extent: Extent) -> int:
        """Return the bytes of a segment's KV in the pages."""
        group = self.layout.groups[extent.plane_group]
        tensors = group.count(extent.first_layer, extent.num_layers)
        return tensors * extent.num_kv_heads * extent.num_tokens * group.dim * group.dtype.itemsize

    def escapes(self, extent: Extent, found: int) -> Escapes:
        """Return the measured and the expected escapes of a segment.

        Args:
            found: number of escapes that the encoder counted.
        """
        books = [book for book in self._books_of(extent) if book is not None]
        dim = self.layout.groups[extent.plane_group].dim
        elements = len(books) * extent.num_kv_heads * extent.num_tokens * dim
        return Escapes(elements, found, sum(b.escape_rate for b in books) / max(1, len(books)))

    def _books_of(self, extent: Extent) -> list[codec.Codebook | None]:
        layers = slice(extent.first_layer, extent.first_layer + extent.num_layers)
        return [book for books in self._books[extent.plane_group][layers] for book in books]


def group_tensors(
    tensors: Sequence[Tensor], group: PlaneGroup, first_layer: int, num_layers: int
) -> list[Tensor]:
    """Return views of a group's tensors in a range of layers, in a dtype that the codec accepts.

    The codec has no integer element types, but its raw mode copies bits. Tensors that are not
    encodable are therefore viewed as a float type of the codec, `[page, kv_head, slot, wire dim]`.

    Args:
        tensors: `PagedCache.sendable`.
    """
    members = group.members[first_layer : first_layer + num_layers]
    found = [tensors[index] for each in members for _, index in each]
    return [each.view(_wire_shape(group, each.shape[2])[1]) for each in found]


def _wire_shape(group: PlaneGroup, page_size: int) -> tuple[int, torch.dtype]:
    """Return the last dimension and the dtype of the views that `group_tensors` returns.

    The codec pads the elements of a head in a page to a multiple of 32. Elements of one byte avoid
    padding of narrow planes: 16 scales of two bytes would be padded to 32.
    """
    if group.encodable:
        return group.dim, group.dtype
    row = group.dim * group.dtype.itemsize
    narrow = row % 2 or page_size * row % 64
    return (row, torch.float8_e4m3fn) if narrow else (row // 2, torch.bfloat16)
