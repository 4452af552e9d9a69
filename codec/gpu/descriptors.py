"""Descriptors: int64 arrays that describe the segments of a call to the kernels.

`SegmentTemplates` computes the fields that depend on the planes and on the number of tokens, and
caches them. `Descriptors` writes those of all segments of a call, with their addresses and page
ids, to pinned memory. `kernels/parameters.py` defines the fields.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.codebook import Codebook
from codec.elements import ElementType, unit_view
from codec.errors import InvalidPages
from codec.format import WORD_BYTES, Geometry, Layout, Mode, PlaneHeader, pack_static
from codec.gpu.groups import PlaneGroup, PlaneShape
from codec.gpu.kernels import parameters

Words = NDArray[np.int64]

_PLANE_FIELDS = int(parameters.PLANE_FIELDS)
_SEGMENT_FIELDS = int(parameters.SEGMENT_FIELDS)
_OWN_PLANE_FIELDS = int(parameters.OWN_PLANE_FIELDS)
_OWN_SEGMENT_FIELDS = int(parameters.OWN_SEGMENT_FIELDS)
_TABLE_BYTES = int(parameters.TABLE_BYTES)
_MAX_TEMPLATES = 256
"""Maximum number of templates in the cache of a `SegmentTemplates`."""

_bases: dict[torch.device, Tensor] = {}


def base_of(device: torch.device) -> Tensor:
    """Return a device's int64 `[2]` tensor. Offsets in descriptors are relative to its address."""
    if device not in _bases:
        _bases[device] = torch.zeros(2, dtype=torch.int64, device=device)
    return _bases[device]


@dataclass(frozen=True, eq=False)
class SegmentTemplate:
    """Descriptor fields that all segments with the same number of tokens share.

    Attributes:
        raw_bytes: size of a segment's KV before encoding, in bytes.
        rows: the segment row, then the plane rows of each group, int64. Fields that differ between
            calls are zero.
    """

    geometry: Geometry
    layout: Layout
    raw_bytes: int
    rows: tuple[Words, ...]


class SegmentTemplates:
    """Cached templates of the segments of some planes, one for each number of tokens.

    Args:
        planes: tensors `[page, kv_head, slot, dim]`, which must be kept alive.
        codebooks: one for each plane; None stores the plane raw.
        geometry: geometry of the planes; its number of tokens is ignored.

    Raises:
        InvalidPlanes: the planes have different strides.
    """

    def __init__(
        self,
        planes: Sequence[Tensor],
        codebooks: Sequence[Codebook | None],
        element: ElementType,
        geometry: Geometry,
    ) -> None:
        if element.units > 1:
            planes = [unit_view(plane) for plane in planes]
        self.element = element
        self.codebooks = tuple(codebooks)
        self.shape = PlaneShape.of(planes, codebooks, element)
        self.device = planes[0].device
        base = base_of(self.device).data_ptr()
        self._starts = [(plane.data_ptr() - base) // element.size for plane in planes]
        self.headers = tuple(
            PlaneHeader(Mode.RAW, 0) if book is None else PlaneHeader(book.mode, book.number)
            for book in codebooks
        )
        coded = [header.mode is not Mode.RAW for header in self.headers]
        self._coded_before = list(accumulate(coded, initial=0))
        tables = b"".join(_tables(book) for book in codebooks)
        self._tables = torch.frombuffer(bytearray(tables), dtype=torch.uint8).to(self.device)
        self._first_table = self._tables.data_ptr() - base
        self._lowest = [book.exponents[0] if book else 0 for book in codebooks]
        self._geometry = geometry
        self._templates: OrderedDict[int, SegmentTemplate] = OrderedDict()

    def of(self, num_tokens: int) -> SegmentTemplate:
        """Return the template of segments with `num_tokens` tokens.

        Raises:
            InvalidPages: there are no tokens.
        """
        found = self._templates.get(num_tokens)
        if found is None:
            if num_tokens < 1:
                raise InvalidPages(f"a segment needs at least one token, not {num_tokens}")
            if len(self._templates) >= _MAX_TEMPLATES:
                self._templates.popitem(last=False)
            found = self._templates[num_tokens] = self._new(num_tokens)
        return found

    def _new(self, num_tokens: int) -> SegmentTemplate:
        geometry = replace(self._geometry, num_tokens=num_tokens)
        layout = Layout.of(geometry, self.element, [header.mode for header in self.headers])
        header = np.frombuffer(pack_static(geometry, self.element, self.headers), dtype=np.int64)
        fields = [0] * _OWN_SEGMENT_FIELDS + [layout.entries // WORD_BYTES, layout.coded_chunks, 0]
        groups = (self._plane_rows(group, geometry, layout) for group in self.shape.groups)
        return SegmentTemplate(
            geometry,
            layout,
            len(self.headers) * geometry.elements * self.element.size,
            (np.concatenate([np.array(fields), header]), *groups),
        )

    def _plane_rows(self, group: PlaneGroup, geometry: Geometry, layout: Layout) -> Words:
        rows = []
        for number in group.numbers:
            streams = [at // WORD_BYTES for at in layout.blocks[number].streams]
            rows.append(
                [
                    *[0] * _OWN_PLANE_FIELDS,
                    *(layout.entries // WORD_BYTES, self._starts[number], self._lowest[number]),
                    number * geometry.num_chunks,
                    self._coded_before[number] * geometry.num_chunks,
                    *[*streams, 0, 0][:3],
                    self._first_table + number * _TABLE_BYTES,
                    *(geometry.full_pages, geometry.rest_slots * geometry.dim),
                ]
            )
        return np.array(rows, dtype=np.int64)


class SegmentCall(NamedTuple):
    """One segment of a call.

    Attributes:
        pages: int64 page ids, in token order.
        address: address of the segment.
        length: length of the payload in bytes; 0 for encode.
        checksum: expected checksum of the payload; 0 for encode.
        prefix_bytes: bytes before the payload to copy to the results.
    """

    template: SegmentTemplate
    pages: Words
    address: int
    length: int = 0
    checksum: int = 0
    prefix_bytes: int = 0


class Descriptors:
    """Memory for the descriptors of up to `segments` segments of up to `pages` pages.

    Attributes:
        host: int64, pinned, written by `write`.
        device: the copy that kernels read; the same tensor on a CPU.
        segment_rows, plane_rows, page_ids: kernel arguments, views of `device`. `plane_rows` is a
            tuple with one view for each plane group.
    """

    def __init__(self, shape: PlaneShape, segments: int, pages: int, device: torch.device) -> None:
        self.row_words = _SEGMENT_FIELDS + shape.header_words // 2
        groups = [len(group.numbers) for group in shape.groups]
        shapes = [
            (segments, self.row_words),
            *((segments, planes, _PLANE_FIELDS) for planes in groups),
            (segments * pages,),
        ]
        sizes = [int(np.prod(each)) for each in shapes]
        on_gpu = device.type == "cuda"
        self.host = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=on_gpu)
        self.device = torch.zeros_like(self.host, device=device) if on_gpu else self.host
        views = [
            part.reshape(each)
            for part, each in zip(
                np.split(self.host.numpy(), np.cumsum(sizes)[:-1]), shapes, strict=True
            )
        ]
        *self._rows, self._page_ids = views
        self._described = 0
        self._base = base_of(device).data_ptr()
        self.segment_rows, *plane_rows, self.page_ids = torch.split(self.device, sizes)
        self.plane_rows = tuple(plane_rows)

    def write(self, calls: Sequence[SegmentCall]) -> None:
        """Describe the segments of a call, at least one and at most `segments`."""
        base = self._base
        count = len(calls)
        first = calls[0].template
        for rows, row in zip(self._rows, first.rows, strict=True):
            rows[:count] = row
        fields: list[int] = []
        first_page = chunks = 0
        for number, (template, pages, address, length, _, prefix_bytes) in enumerate(calls):
            layout = template.layout
            entry_words = (length - layout.entries) // WORD_BYTES
            fields += ((address - base) // WORD_BYTES, number, first_page, chunks, entry_words)
            fields += (length, prefix_bytes // 8)
            first_page += len(pages)
            chunks += layout.coded_chunks
            if template is not first:
                for rows, row in zip(self._rows, template.rows, strict=True):
                    rows[number] = row
        np.concatenate([call.pages for call in calls], out=self._page_ids[:first_page])
        own = np.array(fields, dtype=np.int64).reshape(count, _OWN_SEGMENT_FIELDS)
        segment_rows, *groups = self._rows
        segment_rows[:count, :_OWN_SEGMENT_FIELDS] = own
        for rows in groups:
            rows[:count, :, :_OWN_PLANE_FIELDS] = own[:, None, :_OWN_PLANE_FIELDS]
        for rows in self._rows if count < self._described else ():
            rows[count:] = 0
        self._described = count


def _tables(book: Codebook | None) -> bytes:
    """Return the lookup tables of a codebook, `TABLE_BYTES` bytes; zeros for None."""
    if book is None:
        return bytes(_TABLE_BYTES)
    exponents = (bytes(each).ljust(16, b"\0") for each in (book.exponents, book.second))
    return b"".join((book.code_table, book.second_table, *exponents))
