# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""Encode kernels: write the streams of a chunk, and its entries to scratch memory."""

import triton
import triton.language as tl

from codec.gpu.kernels.columns import (
    element_index,
    first_word,
    load_columns,
    load_row,
    locate_chunk,
    page_offset,
    store_stream,
)
from codec.gpu.kernels.fields import (
    bitwise_or,
    code_distances,
    codes_of,
    escape_code_mask,
    escape_mask,
    pack,
    pairs_of_words,
    remainder_words,
)
from codec.gpu.kernels.parameters import (
    CODE_TABLE,
    FIRST_CHUNK,
    FIRST_CODED_CHUNK,
    FIRST_SCRATCH,
    HIGH_STREAM,
    LOW_STREAM,
    LOWEST_EXPONENT,
    MAX_LISTED,
    MAX_NIBBLES,
    NOT_SPECIALIZED,
    NUMBER,
    PLANE_FIELDS,
    SECOND_TABLE,
    TABLES,
)
from codec.gpu.kernels.words import (
    ACCUMULATORS,
    ESCAPE_COUNTS,
    LANES,
    NUM_SUMS,
    any_lane,
    column_digest,
    column_hash,
    entry_key,
    exclusive_sum,
    lowest_bit,
    popcount,
    record_start,
    unsigned,
)


@triton.jit
def exponent_at(
    source, at, mask, lane, num_columns,
    ELEMENT_BYTES: tl.constexpr, MANTISSA_BITS: tl.constexpr, EXPONENT_MASK: tl.constexpr,
):  # fmt: skip
    """Load, for each lane, the exponent of the escape at the lowest set bit of its mask.

    Args:
        source: pointer to the plane's elements; the chunk begins at element `at`.
        mask: int32 `[32]`, places of the escapes of each lane's column.

    Returns:
        Whether the mask has a set bit, the place of the lowest one, and the exponent at that place.
    """
    here = mask != 0
    place = lowest_bit(mask)
    e = tl.load(
        source + at + element_index(place, lane, num_columns, ELEMENT_BYTES), mask=here, other=0
    ).to(tl.int32)
    return here, place, (e >> MANTISSA_BITS) & EXPONENT_MASK


@triton.jit
def pad_to_16_bytes(p, words):
    """Write zeros after `words` int32 words at `p`, up to a multiple of four words."""
    i = tl.arange(0, 4)
    tl.store(p + words + i, tl.zeros((4,), tl.int32), mask=i < (4 - words % 4) % 4)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def encode_kernel(
    # pages, planes, segments and codebooks
    base, base8, base32, plane_rows, page_ids,
    # geometry
    page_stride, head_stride, run_chunks, run_elements, run_columns,
    # working memory
    chunk_sizes, scratch8, scratch32, accumulators,
    # compile-time configuration
    ELEMENT_BYTES: tl.constexpr, MANTISSA_BITS: tl.constexpr, EXPONENT_MASK: tl.constexpr,
    REMAINDER_WIDTHS: tl.constexpr, CODE_BITS: tl.constexpr, HAS_ESCAPE_CODE: tl.constexpr,
    IS_WINDOW: tl.constexpr, ALIGNED: tl.constexpr, PAGED: tl.constexpr,
    OVERFLOW_WORDS: tl.constexpr, SCRATCH_STRIDE: tl.constexpr, KEYS: tl.constexpr,
    TIMED: tl.constexpr,
):  # fmt: skip
    """Encode one chunk: write its streams, its unpacked entries, and its size in `chunk_sizes`.

    A chunk whose entries would take too much space is stored uncoded. The chunk's checksum terms
    and number of escapes are added to `accumulators`.

    Grid: `[chunks of a head, kv_heads, plane rows]`, one warp each. See `kernels/__init__.py` for
    the parameters.
    """
    if TIMED:
        record_start(accumulators)
    chunk_in_head, head = tl.program_id(0), tl.program_id(1)
    row = plane_rows + PLANE_FIELDS * tl.program_id(2)
    segment, codes_start, plane_start, first_page, full_pages, last_run, head_chunks = load_row(
        row, run_chunks
    )
    if chunk_in_head >= head_chunks:
        return
    lane = tl.arange(0, LANES)
    page, start, length, first_column = locate_chunk(
        chunk_in_head, head, full_pages, last_run, run_chunks, run_elements, run_columns, PAGED
    )
    lowest = tl.load(row + LOWEST_EXPONENT).to(tl.int32)
    num_columns = (length + 31) // 32
    at = plane_start + head.to(tl.int64) * head_stride + start
    at += page_offset(page_ids, first_page + page, page_stride, PAGED)
    words = load_columns(
        base, base32, at, num_columns, length, lowest << MANTISSA_BITS, ELEMENT_BYTES, ALIGNED
    )
    pairs = pairs_of_words(words, ELEMENT_BYTES)  # 16 x [32]
    chunk = head * head_chunks + chunk_in_head
    coded_chunk = tl.load(row + FIRST_SCRATCH) + tl.load(row + FIRST_CODED_CHUNK) + chunk
    accumulators += tl.load(row + NUMBER) * ACCUMULATORS
    tables = base8 + tl.load(row + TABLES)
    NUM_CODES: tl.constexpr = (1 << CODE_BITS) - HAS_ESCAPE_CODE
    distances = code_distances(
        pairs, lowest, tables + CODE_TABLE, MANTISSA_BITS, EXPONENT_MASK, IS_WINDOW
    )

    # Codes and remainders, packed: one register for each word of the streams.
    codes = codes_of(distances, NUM_CODES, HAS_ESCAPE_CODE)
    any_escape = (
        any_lane((bitwise_or(distances) & 0x01F001F0) != 0) if not HAS_ESCAPE_CODE else True
    )
    code_words = pack(codes, CODE_BITS)
    streams = code_words + remainder_words(pairs, REMAINDER_WIDTHS, MANTISSA_BITS)
    chunk_number = tl.load(row + FIRST_CHUNK) + chunk
    size = 0
    hash_sum = tl.zeros((LANES,), tl.int64)
    digest = column_digest(streams, KEYS, 0)

    if any_escape:
        # Lane l has `counts[l]` escapes, and `rank[l]` escapes precede them in the chunk.
        mask = (
            escape_code_mask(code_words, CODE_BITS)
            if HAS_ESCAPE_CODE
            else escape_mask(distances, NUM_CODES)
        )
        counts = popcount(mask)
        rank, num_escapes = exclusive_sum(counts)
        max_per_column = tl.max(counts, axis=0)
        max_entry_words = OVERFLOW_WORDS * num_columns
        scratch_start = coded_chunk * SCRATCH_STRIDE
        entry_words = num_escapes
        nibbles = 0
        uncoded = num_escapes >= max_entry_words
        if HAS_ESCAPE_CODE:
            nibbles = num_escapes
            entry_words = (num_escapes + 7) // 8
            uncoded = (num_escapes > MAX_NIBBLES) | (entry_words >= max_entry_words)
            if not uncoded:
                # Each round stores the second-level code of one escape of every lane.
                second = tables + SECOND_TABLE
                listed_mask = tl.zeros((LANES,), tl.int32)
                for _ in range(max_per_column):
                    here, _, e = exponent_at(
                        base, at, mask, lane, num_columns, ELEMENT_BYTES, MANTISSA_BITS,
                        EXPONENT_MASK,
                    )  # fmt: skip
                    code = tl.load(second + e, mask=here, other=0)
                    tl.store(scratch8 + 4 * scratch_start + rank, code, mask=here)
                    listed_mask |= tl.where(code == 15, mask & -mask, 0)
                    word = unsigned(code.to(tl.int32) << (4 * (rank & 7)))
                    hash_sum += word * entry_key(chunk_number, rank >> 3)
                    rank += 1
                    mask &= mask - 1
                max_per_column = 0
                # Escapes without a second-level code (15) are listed below, after the codes.
                if any_lane(listed_mask != 0):
                    mask = listed_mask
                    scratch_start += MAX_NIBBLES // 4
                    counts = popcount(mask)
                    rank, num_listed = exclusive_sum(counts)
                    max_per_column = tl.max(counts, axis=0)
                    entry_words += num_listed
                    uncoded = (num_listed > MAX_LISTED) | (entry_words >= max_entry_words)
        if uncoded:
            # The first words of each column are stored in its streams, the others as entries.
            entry_words = max_entry_words
            nibbles = 0
            S: tl.constexpr = len(streams)
            streams = words[0:S]
            digest = column_digest(words, KEYS, 0)
            hash_sum = tl.zeros((LANES,), tl.int64)
            # Other lanes may have stored second-level codes in this scratch memory.
            tl.debug_barrier()
            for w in tl.static_range(OVERFLOW_WORDS):
                p = scratch32 + coded_chunk * SCRATCH_STRIDE + w * num_columns + lane
                tl.store(p, words[S + w], mask=lane < num_columns)
        else:
            for _ in range(max_per_column):
                here, place, e = exponent_at(
                    base, at, mask, lane, num_columns, ELEMENT_BYTES, MANTISSA_BITS, EXPONENT_MASK
                )
                word = (lane << 5) | place | (e << 16)
                tl.store(scratch32 + scratch_start + rank, word, mask=here)
                key = entry_key(chunk_number, (nibbles + 7) // 8 + rank)
                hash_sum += tl.where(here, word.to(tl.int64) * key, 0)
                rank += 1
                mask &= mask - 1
        size = entry_words | (nibbles << 8)
        tl.atomic_add(
            accumulators + ESCAPE_COUNTS + chunk_number % NUM_SUMS,
            num_escapes.to(tl.int64),
            sem="relaxed",
        )
    tl.store(chunk_sizes + coded_chunk, size)

    # Streams. Three-word columns are stored word by word and need padding after the last chunk.
    last = chunk == head_chunks * tl.num_programs(1) - 1
    G: tl.constexpr = 1 if CODE_BITS == 3 else 4
    store_stream(
        base32 + first_word(codes_start, first_column, CODE_BITS, G),
        num_columns,
        streams[0:CODE_BITS],
        G,
    )
    if CODE_BITS == 3:
        if last:
            pad_to_16_bytes(base32 + codes_start, (first_column + num_columns) * 3)
    FIRST: tl.constexpr = CODE_BITS + REMAINDER_WIDTHS[0]
    R: tl.constexpr = 1 if REMAINDER_WIDTHS[0] == 3 else 4
    p = segment + tl.load(row + LOW_STREAM)
    store_stream(
        base32 + first_word(p, first_column, REMAINDER_WIDTHS[0], R),
        num_columns,
        streams[CODE_BITS:FIRST],
        R,
    )
    if REMAINDER_WIDTHS[0] == 3:
        if last:
            pad_to_16_bytes(base32 + p, (first_column + num_columns) * 3)
    if len(REMAINDER_WIDTHS) == 2:
        p = segment + tl.load(row + HIGH_STREAM)
        store_stream(
            base32 + first_word(p, first_column, 3, 1), num_columns, streams[FIRST : FIRST + 3], 1
        )
        if last:
            pad_to_16_bytes(base32 + p, (first_column + num_columns) * 3)
    hash_sum += tl.where(
        lane < num_columns, column_hash(digest, chunk_number, lane, size & 0xFF), 0
    )
    tl.atomic_add(accumulators + chunk_number % NUM_SUMS, tl.sum(hash_sum, axis=0), sem="relaxed")


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def raw_kernel(
    base, base32, plane_rows, page_ids, page_stride, head_stride, run_chunks, run_elements,
    run_columns, accumulators,
    ELEMENT_BYTES: tl.constexpr, ALIGNED: tl.constexpr, PAGED: tl.constexpr, STORE: tl.constexpr,
    KEYS: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """Copy one chunk of a raw plane to the segment, if STORE, and add its checksum terms."""
    if TIMED:
        record_start(accumulators)
    chunk_in_head, head = tl.program_id(0), tl.program_id(1)
    row = plane_rows + PLANE_FIELDS * tl.program_id(2)
    _, codes_start, plane_start, first_page, full_pages, last_run, head_chunks = load_row(
        row, run_chunks
    )
    if chunk_in_head >= head_chunks:
        return
    lane = tl.arange(0, LANES)
    page, start, length, first_column = locate_chunk(
        chunk_in_head, head, full_pages, last_run, run_chunks, run_elements, run_columns, PAGED
    )
    num_columns = (length + 31) // 32
    at = plane_start + head.to(tl.int64) * head_stride + start
    at += page_offset(page_ids, first_page + page, page_stride, PAGED)
    words = load_columns(base, base32, at, num_columns, length, 0, ELEMENT_BYTES, ALIGNED)
    if STORE:
        p = base32 + first_word(codes_start, first_column, 8 * ELEMENT_BYTES, 2 * ELEMENT_BYTES)
        store_stream(p, num_columns, words, 2 * ELEMENT_BYTES)
    accumulators += tl.load(row + NUMBER) * ACCUMULATORS
    chunk_number = tl.load(row + FIRST_CHUNK) + head * head_chunks + chunk_in_head
    hash_sum = column_hash(column_digest(words, KEYS, 0), chunk_number, lane, 0)
    hash_sum = tl.where(lane < num_columns, hash_sum, 0)
    tl.atomic_add(accumulators + chunk_number % NUM_SUMS, tl.sum(hash_sum, axis=0), sem="relaxed")
