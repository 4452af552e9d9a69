"""Batches of segments of one cache, for the tests of `PagedCodec` on a CPU and on a GPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import codec
from codec.reference import backend as reference
from tests.codec.samples import Pages, bits, make_pages

Books = list[codec.Codebook | None]
Factory = Callable[[Sequence[torch.Tensor], Sequence[codec.Codebook | None]], codec.PagedCodec]
PREFIX = 112
TOKENS = (17, 16, 1, 40, 5)
"""Tokens of the segments: several pages or one, partly filled or full, in pages of 16 slots."""


@dataclass(frozen=True)
class Batch:
    """Segments encoded by the reference, each behind a prefix, in one buffer.

    Attributes:
        source: pages of all segments.
        segments: descriptions for `decode_batch`.
        payloads: the payload of each segment.
        buffer: uint8 on `device`; every byte of the prefix of segment i is i + 1.
    """

    source: Pages
    books: Books
    device: torch.device
    segments: list[codec.DecodeSegment]
    payloads: list[torch.Tensor]
    buffer: torch.Tensor

    @classmethod
    def of(
        cls,
        books: Books,
        kind: str | float,
        device: torch.device,
        tokens: Sequence[int] = TOKENS,
        raw: Sequence[int] = (),
        dtype: torch.dtype | None = None,
        dim: int = 64,
    ) -> "Batch":
        """Return a batch; the segments with the indices `raw` are stored raw."""
        needed = [-(-count // 16) for count in tokens]
        shape = {"num_planes": len(books), "kv_heads": 2, "dim": dim}
        dtype = dtype or next(book.dtype for book in books if book)
        source = make_pages(16 * sum(needed), kind=kind, dtype=dtype, **shape)  # type: ignore[arg-type]
        segments = []
        payloads = []
        offset = 0
        first = 0
        for number, count in enumerate(tokens):
            ids = tuple(source.ids[first : first + needed[number]])
            first += needed[number]
            own: Books = [None] * len(books) if number in raw else books
            out = torch.zeros(source.bound, dtype=torch.uint8)
            encoded = codec.encode_pages(source.planes, own, ids, count, out, backend=reference)
            offset += PREFIX
            segments.append(
                codec.DecodeSegment(
                    ids, count, offset, encoded.length, encoded.checksum, number in raw
                )
            )
            payloads.append(out[: encoded.length].clone())
            offset += encoded.length
        buffer = aligned(offset, device)
        for number, (segment, payload) in enumerate(zip(segments, payloads, strict=True)):
            buffer[segment.offset - PREFIX : segment.offset] = number + 1
            buffer[segment.offset : segment.offset + segment.length] = payload.to(device)
        return cls(source, books, device, segments, payloads, buffer)

    def planes(self) -> list[torch.Tensor]:
        return [plane.to(self.device) for plane in self.source.planes]

    def encoded_by(self, factory: Factory) -> None:
        """Check that `encode_batch` writes the payloads of the reference."""
        bound = self.source.bound
        out = aligned(len(self.segments) * bound, self.device)
        sources = [
            codec.EncodeSegment(segment.page_ids, segment.num_tokens, number * bound, bound)
            for number, segment in enumerate(self.segments)
        ]
        results = factory(self.planes(), self.books).encode_batch(sources, out)
        for source, pending, segment, payload in zip(
            sources, results, self.segments, self.payloads, strict=True
        ):
            encoded = pending.result()
            assert pending.done
            assert (encoded.length, encoded.checksum) == (segment.length, segment.checksum)
            written = out[source.offset : source.offset + encoded.length]
            assert torch.equal(written.cpu(), payload)

    def decoded_by(self, factory: Factory) -> dict[int, codec.PayloadError]:
        """Decode all segments into other pages; return the errors by segment.

        The content of the segments without an error must be that of the source.
        """
        target = self.source.empty_like()
        moved = dict(zip(self.source.ids, target.ids, strict=True))
        planes = [plane.to(self.device) for plane in target.planes]
        segments = [
            segment._replace(page_ids=[moved[int(page)] for page in segment.page_ids])
            for segment in self.segments
        ]
        results = factory(planes, self.books).decode_batch(
            segments, self.buffer, prefix_bytes=PREFIX
        )
        errors: dict[int, codec.PayloadError] = {}
        for number, (pending, segment) in enumerate(zip(results, self.segments, strict=True)):
            try:
                pending.result()
            except codec.PayloadError as error:
                errors[number] = error
                continue
            assert pending.done
            assert pending.seconds >= 0
            assert pending.prefix == bytes([number + 1]) * PREFIX
            for mine, theirs in zip(self.source.planes, planes, strict=True):
                for slot in range(segment.num_tokens):
                    page = int(segment.page_ids[slot // 16])
                    expected = bits(mine)[page, :, slot % 16]
                    assert torch.equal(bits(theirs)[moved[page], :, slot % 16].cpu(), expected)
        return errors


def aligned(size: int, device: torch.device) -> torch.Tensor:
    """Return a uint8 buffer of zeros whose address is a multiple of 16."""
    buffer = torch.zeros(size + 16, dtype=torch.uint8, device=device)
    start = -buffer.data_ptr() % 16
    return buffer[start : start + size]
