# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""Last step of decoding: compare the checksum and the header with the expected ones."""

import triton
import triton.language as tl

from codec.gpu.kernels.parameters import NOT_SPECIALIZED
from codec.gpu.kernels.words import ERROR_FLAGS, NUM_SUMS, seal_of, unsigned


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def verify_kernel(
    in32, in64, starts_offset, chunks, total_entry_words, payload_bytes, header, header_words,
    accumulators, results,
):  # fmt: skip
    """Reduce the checksum and compare the header with the expected one, in a single program.

    All loads are issued before the first reduction, because their latency dominates. Without a
    payload (`payload_bytes` of 0) only the checksum is meaningful, and `in32` may be any memory.

    Args:
        in32, in64: the segment.
        starts_offset: offset of the table of entry starts, in words.
        chunks: number of chunks with codes.
        total_entry_words: words from the start of the entries to the end of the segment.
        payload_bytes: length of the segment in bytes; 0 without a payload.
        header, header_words: expected int32 header from `pack_static`, and its length.
        accumulators: int64 `[ACCUMULATORS]`; zeroed at the end.
        results: int64 `[4]` output: length, computed checksum, checksum in the header, error flags
            (1: invalid header, 2: invalid entry starts or entries).
    """
    i = tl.arange(0, NUM_SUMS)
    sums = tl.load(accumulators + i)
    errors = tl.load(accumulators + ERROR_FLAGS)
    length = tl.load(in64 + 5)
    announced = tl.load(in64 + 6)
    seal = tl.load(in64 + 7)
    crc = tl.load(in32 + 5)
    first = tl.load(in32 + starts_offset)
    end = unsigned(tl.load(in32 + starts_offset + chunks))
    differing = tl.zeros((256,), tl.int32)
    for word in range(0, header_words, 256):
        j = word + tl.arange(0, 256)
        known = (j < header_words) & ((j < 10) | (j > 15))
        theirs = tl.load(in32 + j, mask=known, other=0)
        differing |= (theirs != tl.load(header + j, mask=known, other=0)).to(tl.int32)
    checksum = tl.sum(sums, axis=0)
    if payload_bytes > 0:
        wrong = (length != payload_bytes) | (seal != seal_of(length, announced, unsigned(crc)))
        if wrong | (tl.max(differing, axis=0) > 0):
            errors |= 1
        if chunks > 0:
            if (first != 0) | ((end + 3) // 4 * 4 != total_entry_words):
                errors |= 2
    tl.store(results, length)
    tl.store(results + 1, checksum)
    tl.store(results + 2, announced)
    tl.store(results + 3, errors)
    tl.store(accumulators + i, tl.zeros((NUM_SUMS,), tl.int64))
    tl.store(accumulators + ERROR_FLAGS, tl.zeros((), tl.int64))
