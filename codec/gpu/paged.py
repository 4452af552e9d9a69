"""Asynchronous paged codec on a GPU. Its calls replay CUDA graphs and do not wait for kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from codec.backend import (
    DecodeSegment,
    Encoded,
    EncodeSegment,
    Finished,
    Pending,
    PendingDecode,
)
from codec.checks import (
    PageIds,
    check_bytes,
    check_checksum,
    check_header,
    check_length,
    check_output,
    check_pages,
    check_planes,
    check_prefix,
    check_range,
)
from codec.codebook import Codebook
from codec.errors import FormatError
from codec.format import parse_header, peek_header_bytes
from codec.gpu.backend import check_alignment, check_errors
from codec.gpu.descriptors import SegmentCall, SegmentTemplates, Words
from codec.gpu.graphs import Call, Direction, Graphs, current_stream_of, graphs_of, sizes_up_to
from codec.gpu.kernels import parameters
from codec.mix import MASK64

_PREFIX, _HEADER = int(parameters.RESULT_PREFIX), int(parameters.RESULT_HEADER)
_MAX_SEGMENTS = 64
"""Maximum number of segments of a launch."""
_MAX_LAUNCH_BYTES = 1 << 29
"""Maximum raw bytes of a launch of several segments, each counted with the size of the largest.
This bounds the scratch memory, which is 1/4 to 1/3 of it.
"""
_LARGEST_SLOTS = 3
"""Number of slots that `warm_up` prepares for the largest size of each number of segments. Large
prompts use this size most; every other size gets one slot.
"""


@dataclass(eq=False, slots=True)
class _PendingSegment:
    """Results of one segment of a call."""

    call: Call
    number: int
    segment: SegmentCall

    @property
    def done(self) -> bool:
        return self.call.done

    @property
    def seconds(self) -> float:
        return self.call.seconds(self.number)


class _PendingEncode(_PendingSegment):
    __slots__ = ()

    def result(self) -> Encoded:
        length, checksum, escapes, _ = self.call.numbers(self.number)
        return Encoded(length, self.segment.template.raw_bytes, escapes, checksum & MASK64)


@dataclass(eq=False, slots=True)
class _PendingDecode(_PendingSegment):
    templates: SegmentTemplates

    @property
    def prefix(self) -> bytes:
        words = self.call.results()[self.number, _PREFIX:_HEADER]
        return words.tobytes()[: self.segment.prefix_bytes]

    def result(self) -> None:
        _, checksum, announced, errors = self.call.numbers(self.number)
        segment = self.segment
        if errors:
            if errors & 1:
                self._check_header(self.call.results()[self.number, _HEADER:].tobytes())
            check_errors(errors)
        check_checksum(announced & MASK64, segment.checksum)
        check_checksum(checksum & MASK64, segment.checksum)

    def _check_header(self, header: bytes) -> None:
        """Raise the `PayloadError` of a header that differs from the expected one."""
        length, templates = self.segment.length, self.templates
        if peek_header_bytes(header, length) != len(header):
            raise FormatError(f"the segment does not hold {len(templates.headers)} planes")
        check_header(
            parse_header(header, length),
            length,
            templates.element,
            self.segment.template.geometry,
            templates.codebooks,
        )


class PagedCodec:
    """A `codec.backend.PagedCodec` for one GPU. Its segments have at least one token."""

    def __init__(self, planes: Sequence[Tensor], codebooks: Sequence[Codebook | None]) -> None:
        self._planes = tuple(planes)
        element, self._geometry = check_planes(planes, codebooks, 0)
        self._device = planes[0].device
        self._num_pages = len(planes[0])
        self._coded = SegmentTemplates(planes, codebooks, element, self._geometry)
        self._raw = self._coded
        if any(codebooks):
            self._raw = SegmentTemplates(planes, [None] * len(planes), element, self._geometry)
        self._graphs: dict[tuple[SegmentTemplates, int], Graphs] = {}

    def encode_batch(
        self, segments: Sequence[EncodeSegment], buffer: Tensor
    ) -> list[Pending[Encoded]]:
        """See `codec.backend.PagedCodec`."""
        check_bytes(buffer, self._device)
        address, size = buffer.data_ptr(), buffer.numel()
        calls = []
        for page_ids, num_tokens, offset, capacity in segments:
            template = self._coded.of(num_tokens)
            pages = self._pages(page_ids, num_tokens)
            check_output(capacity, template.layout)
            check_range(offset, capacity, size)
            check_alignment(address + offset)
            calls.append(SegmentCall(template, pages, address + offset))
        return [
            _PendingEncode(call, number, segment)
            for call in self._start(Direction.ENCODE, self._coded, calls)
            for number, segment in enumerate(call.segments)
        ]

    def decode_batch(
        self, segments: Sequence[DecodeSegment], buffer: Tensor, *, prefix_bytes: int = 0
    ) -> list[PendingDecode]:
        """See `codec.backend.PagedCodec`."""
        check_bytes(buffer, self._device)
        address, size = buffer.data_ptr(), buffer.numel()
        check_prefix(prefix_bytes, min([each.offset for each in segments], default=prefix_bytes))
        results: list[PendingDecode | None] = []
        calls: dict[SegmentTemplates, list[SegmentCall]] = {self._coded: [], self._raw: []}
        for page_ids, num_tokens, offset, length, checksum, raw in segments:
            templates = self._raw if raw else self._coded
            template = templates.of(num_tokens)
            pages = self._pages(page_ids, num_tokens)
            check_range(offset, length, size)
            check_alignment(address + offset)
            try:
                check_length(length, template.layout)
            except FormatError as error:
                results.append(Finished(error))
                continue
            results.append(None)
            calls[templates].append(
                SegmentCall(template, pages, address + offset, length, checksum, prefix_bytes)
            )
        started = {key: iter(self._start_decode(key, each)) for key, each in calls.items()}
        return [
            result or next(started[self._raw if segment.raw else self._coded])
            for result, segment in zip(results, segments, strict=True)
        ]

    def warm_up(self, max_tokens: int, max_segments: int = 1) -> None:
        """See `codec.backend.PagedCodec`."""
        pages = min(-(-max_tokens // self._geometry.page_slots), self._num_pages)
        kinds = [
            (self._coded, Direction.ENCODE),
            (self._coded, Direction.DECODE),
            (self._raw, Direction.DECODE),
        ]
        for segments in sizes_up_to(min(max_segments, _MAX_SEGMENTS)):
            sizes = [size for size in sizes_up_to(pages) if self._fits(segments, size)]
            for size in sizes:
                slots = _LARGEST_SLOTS if size == sizes[-1] else 1
                for templates, direction in kinds:
                    self._graphs_of(templates).prepare(direction, segments, size, slots)

    def _fits(self, segments: int, pages: int) -> bool:
        """Return whether a launch may have that many segments of that many pages."""
        template = self._coded.of(pages * self._geometry.page_slots)
        return segments <= _segments_of_a_launch(template.raw_bytes)

    def _pages(self, page_ids: PageIds, num_tokens: int) -> Words:
        """Validate the page ids of a segment and return them, int64 `[pages]`."""
        return check_pages(page_ids, self._num_pages, num_tokens, self._geometry.page_slots)

    def _start_decode(
        self, templates: SegmentTemplates, segments: Sequence[SegmentCall]
    ) -> list[PendingDecode]:
        started = self._start(Direction.DECODE, templates, segments)
        return [
            _PendingDecode(call, number, segment, templates)
            for call in started
            for number, segment in enumerate(call.segments)
        ]

    def _start(
        self, direction: Direction, templates: SegmentTemplates, segments: Sequence[SegmentCall]
    ) -> list[Call]:
        """Start the calls that the segments need, with as many segments as possible in each."""
        if not segments:
            return []
        graphs = self._graphs_of(templates)
        limit = _segments_of_a_launch(max([each.template.raw_bytes for each in segments]))
        if len(segments) <= limit:
            return [graphs.start(direction, segments)]
        firsts = range(0, len(segments), limit)
        return [graphs.start(direction, segments[first : first + limit]) for first in firsts]

    def _graphs_of(self, templates: SegmentTemplates) -> Graphs:
        """Return the graphs of the current CUDA stream."""
        stream = current_stream_of(self._device)
        key = templates, stream
        if key not in self._graphs:
            self._graphs[key] = graphs_of(self._device, stream, templates.shape)
        return self._graphs[key]


def _segments_of_a_launch(raw_bytes: int) -> int:
    """Return the maximum number of segments of a launch, if each has at most `raw_bytes`."""
    return max(1, min(_MAX_SEGMENTS, _MAX_LAUNCH_BYTES // raw_bytes))
