# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""Last step of decoding: compare the checksum and the header with the expected ones."""

import triton
import triton.language as tl

from codec.gpu.kernels.parameters import (
    CODED_CHUNKS,
    ENTRY_WORDS,
    LENGTH,
    MAX_PREFIX,
    NOT_SPECIALIZED,
    PREFIX,
    RESULT_CHECKSUM,
    RESULT_FOURTH,
    RESULT_HEADER,
    RESULT_LENGTH,
    RESULT_NANOSECONDS,
    RESULT_PREFIX,
    RESULT_THIRD,
    SEGMENT,
    SEGMENT_FIELDS,
)
from codec.gpu.kernels.words import (
    ACCUMULATORS,
    ERROR_FLAGS,
    NUM_SUMS,
    START,
    nanoseconds_since,
    seal_of,
    unsigned,
)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def verify_kernel(
    base32, segment_rows, row_words, header_words, accumulators, results, result_words,
    TIMED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Reduce the checksum of a segment and compare its header with the expected one.

    The payload and the descriptors are read before the wait for the previous kernel. If the
    segment's `LENGTH` is 0, there is no payload and only the checksum is meaningful.

    The results are: length in the header, computed checksum, checksum in the header, error flags
    (1: invalid header, 2: invalid entry starts or entries); the words before the segment; and, if
    the header is invalid, the first bytes of the segment, as many as the expected header has.

    Grid: `[segments]`. See `kernels/__init__.py` for the parameters.
    """
    number = tl.program_id(0)
    row = segment_rows + number * row_words
    results += number * result_words
    expected_length = tl.load(row + LENGTH)
    chunks = tl.load(row + CODED_CHUNKS)
    header = (row + SEGMENT_FIELDS).to(tl.pointer_type(tl.int32))
    in32 = base32 + tl.load(row + SEGMENT)
    in64 = in32.to(tl.pointer_type(tl.int64))
    errors = tl.zeros((), tl.int64)
    if expected_length > 0:
        length = tl.load(in64 + 5)
        announced = tl.load(in64 + 6)
        seal = tl.load(in64 + 7)
        crc = tl.load(in32 + 5)
        first = tl.load(in32 + header_words)
        end = unsigned(tl.load(in32 + header_words + chunks))
        prefix = tl.load(row + PREFIX)
        word = tl.arange(0, MAX_PREFIX)
        before = tl.load(in64 - prefix + word, mask=word < prefix, other=0)
        differing = tl.zeros((256,), tl.int32)
        for block in range(0, header_words, 256):
            j = block + tl.arange(0, 256)
            known = (j < header_words) & ((j < 10) | (j > 15))
            theirs = tl.load(in32 + j, mask=known, other=0)
            differing |= (theirs != tl.load(header + j, mask=known, other=0)).to(tl.int32)
        wrong = (length != expected_length) | (seal != seal_of(length, announced, unsigned(crc)))
        if wrong | (tl.max(differing, axis=0) > 0):
            errors |= 1
            theirs = (results + RESULT_HEADER).to(tl.pointer_type(tl.int32))
            for block in range(0, header_words, 256):
                j = block + tl.arange(0, 256)
                here = j < header_words
                tl.store(theirs + j, tl.load(in32 + j, mask=here, other=0), mask=here)
        if chunks > 0:
            if (first != 0) | ((end + 3) // 4 * 4 != tl.load(row + ENTRY_WORDS)):
                errors |= 2
        tl.store(results + RESULT_LENGTH, length)
        tl.store(results + RESULT_THIRD, announced)
        tl.store(results + RESULT_PREFIX + word, before, mask=word < prefix)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    start = tl.load(accumulators + START)
    accumulators += number * ACCUMULATORS
    i = tl.arange(0, NUM_SUMS)
    sums = tl.load(accumulators + i)
    errors |= tl.load(accumulators + ERROR_FLAGS)
    tl.store(results + RESULT_CHECKSUM, tl.sum(sums, axis=0))
    tl.store(results + RESULT_FOURTH, errors)
    tl.store(results + RESULT_NANOSECONDS, nanoseconds_since(start, TIMED))
    tl.store(accumulators + i, tl.zeros((NUM_SUMS,), tl.int64))
    tl.store(accumulators + ERROR_FLAGS, tl.zeros((), tl.int64))
