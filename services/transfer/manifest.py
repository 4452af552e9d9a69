"""The manifest: which segments a chunk becomes, what frame each has, whether they cover it all."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace.v1 import prefill_pb2 as pb
from services.transfer.errors import ForeignSegment
from services.transfer.frame import HEADER_BYTES, FrameHeader


@dataclass(frozen=True)
class SegmentPlan:
    """The tokens and layers of one segment; ``pages`` hold its tokens on the sender."""

    first_token: int
    num_tokens: int
    first_layer: int
    num_layers: int
    pages: tuple[int, ...]


def plan_segments(
    *,
    first_token: int,
    num_tokens: int,
    pages: tuple[int, ...],
    page_size: int,
    num_layers: int,
    capacity: int,
    bound: Callable[[int, int], int],
) -> Iterator[SegmentPlan]:
    """Cuts a chunk into segments whose encoded bound fits ``capacity`` bytes.

    As many layers as fit go into one segment; a chunk of which not even one layer fits is cut by
    pages first.

    Args:
        first_token: a multiple of ``page_size``.
        bound: the largest encoded size of (layers, tokens), bytes.

    Raises:
        ValueError: one page of one layer does not fit.
    """
    tokens = num_tokens
    while tokens > page_size and bound(1, tokens) > capacity:
        tokens = -(-tokens // (2 * page_size)) * page_size
    if bound(1, tokens) > capacity:
        raise ValueError(f"a slot of {capacity} bytes does not hold one page of one layer")
    layers = num_layers
    while bound(layers, tokens) > capacity:
        layers = -(-layers // 2)
    for offset in range(0, num_tokens, tokens):
        count = min(tokens, num_tokens - offset)
        first_page = offset // page_size
        held = pages[first_page : first_page + -(-count // page_size)]
        for layer in range(0, num_layers, layers):
            yield SegmentPlan(
                first_token + offset, count, layer, min(layers, num_layers - layer), held
            )


def frame_of(segment: pb.Segment, *, epoch: str, request_id: str, attempt: int) -> FrameHeader:
    """The header in front of a segment's payload, as its manifest entry announces it.

    Args:
        epoch: of the sender, 32 hex digits.

    Raises:
        FrameError: the epoch is not that.
    """
    return FrameHeader.describing(
        epoch=epoch,
        request_id=request_id,
        attempt=attempt,
        index=segment.index,
        first_token=segment.first_token,
        num_tokens=segment.num_tokens,
        first_layer=segment.first_layer,
        num_layers=segment.num_layers,
        generation=segment.generation,
        length=segment.length - HEADER_BYTES,
        checksum=segment.checksum,
    )


class Coverage:
    """Which (page, layer) cells of a sequence have arrived: each exactly once, or it is refused."""

    def __init__(self, num_tokens: int, num_layers: int, page_size: int) -> None:
        self._tokens, self._layers, self._page_size = num_tokens, num_layers, page_size
        self._cells = bytearray(-(-num_tokens // page_size) * num_layers)
        self._missing = len(self._cells)

    @property
    def complete(self) -> bool:
        return self._missing == 0

    def add(self, first_token: int, num_tokens: int, first_layer: int, num_layers: int) -> range:
        """Claims a segment's cells; returns the indices of its pages within the sequence.

        Raises:
            ForeignSegment: outside the sequence, not on page boundaries, or there already.
        """
        end = first_token + num_tokens
        on_pages = first_token % self._page_size == 0 and (
            end == self._tokens or end % self._page_size == 0
        )
        if num_tokens < 1 or end > self._tokens or not on_pages:
            raise ForeignSegment(f"tokens {first_token}..{end} of a sequence of {self._tokens}")
        if num_layers < 1 or first_layer + num_layers > self._layers:
            raise ForeignSegment(f"layers {first_layer}+{num_layers} of {self._layers}")
        pages = range(first_token // self._page_size, -(-end // self._page_size))
        cells = [
            page * self._layers + layer
            for page in pages
            for layer in range(first_layer, first_layer + num_layers)
        ]
        if any(self._cells[cell] for cell in cells):
            raise ForeignSegment(f"tokens {first_token}..{end} arrived twice")
        for cell in cells:
            self._cells[cell] = 1
        self._missing -= len(cells)
        return pages
