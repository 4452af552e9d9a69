"""Codec bound to the planes of one KV cache, for encoding and decoding many of its segments.

On a GPU a call launches kernels and returns; its result can be read later, by any thread. On a CPU
the work is finished when the call returns.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from codec.backend import (
    DecodeSegment,
    Encoded,
    EncodeSegment,
    Finished,
    PagedCodec,
)
from codec.checks import check_checksum, check_prefix, check_range
from codec.codebook import Codebook
from codec.errors import FormatError, PayloadError
from codec.ops import decode_pages, encode_pages, read_header


def paged(planes: Sequence[Tensor], codebooks: Sequence[Codebook | None]) -> PagedCodec:
    """Return a codec for planes `[page, kv_head, slot, dim]`, on their device.

    All calls must come from one thread. On a GPU each call uses the current CUDA stream.

    Args:
        planes: as for `encode_pages`.
        codebooks: one for each plane; None stores the plane raw.

    Raises:
        ArgumentError, InvalidCodebook: the planes or codebooks are invalid. On a CPU,
            `encode_batch` and `decode_batch` of the returned codec raise these errors instead.
    """
    if planes and planes[0].device.type == "cuda":
        from codec.gpu import paged as gpu  # imports Triton

        return gpu.PagedCodec(planes, codebooks)
    return _SynchronousCodec(planes, codebooks)


@dataclass(frozen=True)
class _SynchronousCodec:
    planes: Sequence[Tensor]
    codebooks: Sequence[Codebook | None]

    def encode_batch(
        self, segments: Sequence[EncodeSegment], buffer: Tensor
    ) -> list[Finished[Encoded]]:
        for _, _, offset, capacity in segments:
            check_range(offset, capacity, len(buffer))
        return [self._encoded(segment, buffer) for segment in segments]

    def decode_batch(
        self, segments: Sequence[DecodeSegment], buffer: Tensor, *, prefix_bytes: int = 0
    ) -> list[Finished[None]]:
        for segment in segments:
            check_range(segment.offset, segment.length, len(buffer))
            check_prefix(prefix_bytes, segment.offset)
        return [self._decoded(segment, buffer, prefix_bytes) for segment in segments]

    def _encoded(self, segment: EncodeSegment, buffer: Tensor) -> Finished[Encoded]:
        """Encode one segment of a batch."""
        page_ids, num_tokens, start, capacity = segment
        out = buffer[start : start + capacity]
        started = time.perf_counter()
        encoded = encode_pages(self.planes, self.codebooks, page_ids, num_tokens, out)
        return Finished(encoded, time.perf_counter() - started)

    def _decoded(self, segment: DecodeSegment, buffer: Tensor, prefix_bytes: int) -> Finished[None]:
        """Decode one segment of a batch."""
        page_ids, num_tokens, start, length, checksum, raw = segment
        prefix = buffer[start - prefix_bytes : start].numpy().tobytes()
        payload = buffer[start : start + length]
        books = [None if raw else book for book in self.codebooks]
        started = time.perf_counter()
        try:
            header = read_header(payload)
            if any(
                book and not plane.mode for book, plane in zip(books, header.planes, strict=False)
            ):
                raise FormatError("a plane is stored raw, although it has a codebook")
            check_checksum(header.checksum, checksum)
            decode_pages(payload, self.planes, books, page_ids, num_tokens, header=header)
        except PayloadError as error:
            return Finished(error, prefix=prefix)
        return Finished(None, time.perf_counter() - started, prefix)

    def warm_up(self, max_tokens: int, max_segments: int = 1) -> None:
        """Do nothing; `codec.warm_up` compiles the CPU backend."""
