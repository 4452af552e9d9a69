# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""Decode kernels: decode a chunk in one pass, then patch its listed escapes."""

import triton
import triton.language as tl

from codec.gpu.kernels.columns import (
    element_index,
    first_word,
    load_row,
    load_stream,
    locate_chunk,
    page_offset,
    store_columns,
)
from codec.gpu.kernels.fields import (
    code_quads,
    escape_code_mask,
    join_elements,
    words_of_pairs,
)
from codec.gpu.kernels.parameters import (
    ENTRIES,
    ENTRY_WORDS,
    EXPONENTS,
    FIRST_CHUNK,
    FIRST_CODED_CHUNK,
    HIGH_STREAM,
    LOW_STREAM,
    LOWEST_EXPONENT,
    MAX_NIBBLES,
    NOT_SPECIALIZED,
    NUMBER,
    PLANE_FIELDS,
    SECOND_EXPONENTS,
    TABLES,
)
from codec.gpu.kernels.words import (
    ACCUMULATORS,
    ERROR_FLAGS,
    LANES,
    NUM_SUMS,
    any_lane,
    column_digest,
    column_hash,
    entry_key,
    exclusive_sum,
    popcount,
    record_start,
    shift_right,
    unsigned,
)


@triton.jit
def exponents_of(codes, lowest, book, IS_WINDOW: tl.constexpr):
    """Convert 8 quads of codes into 8 quads of exponents; see `fields` for quads.

    Args:
        lowest: lowest exponent of the codebook.
        book: pointer to uint8 `[16]`, the exponent of each code; read unless IS_WINDOW.
    """
    exponents = ()
    for w in tl.static_range(8):
        if IS_WINDOW:
            four = codes[w] + lowest * 0x01010101
        else:
            four = tl.load(book + (codes[w] & 0xFF)).to(tl.int32)
            for b in tl.static_range(1, 4):
                four |= tl.load(book + (shift_right(codes[w], 8 * b) & 0xFF)).to(tl.int32) << (
                    8 * b
                )
        exponents = exponents + (four,)
    return exponents


@triton.jit
def add_at(exponents, place, difference):
    """Add a difference to the exponent at one place of each lane's column.

    Registers cannot be indexed, so each of the 8 quads is tested for the place. The exponent
    computed for the escape code may exceed 255 and carry into the next byte. This sum undoes the
    carry, because `difference` is the correct exponent minus the computed one.

    Args:
        exponents: 8 quads.
        place: int32 mask in which only the bit of the place is set; 0 adds nothing.
    """
    sums = ()
    for w in tl.static_range(8):
        sums = sums + (exponents[w] + (shift_right(place, w) & 0x01010101) * difference,)
    return sums


@triton.jit
def element_without_exponent(
    target_elements, at, remainders8, place, lane, num_columns, here,
    ELEMENT_BYTES: tl.constexpr, MANTISSA_BITS: tl.constexpr, EXPONENT_MASK: tl.constexpr,
):  # fmt: skip
    """Return the element at a place of each lane's column, with its exponent bits zero.

    A bf16 element is read from its byte of the remainder stream. That byte is still in the cache.
    An element of another type is read back from `target_elements`, where it was just stored.

    Args:
        at: index of the chunk's first element in `target_elements`.
        remainders8: pointer to the chunk's words in the remainder stream, as uint8.
        place: place of the element in its column, 0 to 31.
        here: lanes that read an element.
    """
    if MANTISSA_BITS == 7:
        byte = (place & 4) * 4 * num_columns + lane * 16 + (place & 3) * 4 + (place >> 3)
        rest = tl.load(remainders8 + byte, mask=here, other=0).to(tl.int32)
        rest = (rest & 0x7F) | ((rest & 0x80) << 8)
    else:
        target = target_elements + at + element_index(place, lane, num_columns, ELEMENT_BYTES)
        rest = tl.load(target, mask=here, other=0).to(tl.int32) & ~(EXPONENT_MASK << MANTISSA_BITS)
    return rest


@triton.jit
def store_element(
    target_elements, at, place, lane, num_columns, element, here, ELEMENT_BYTES: tl.constexpr
):
    """Store one element at a place (0 to 31) of each lane's column, in the lanes `here`.

    Args:
        at: index of the chunk's first element in `target_elements`.
    """
    target = target_elements + at + element_index(place, lane, num_columns, ELEMENT_BYTES)
    tl.store(target, element.to(target_elements.dtype.element_ty), mask=here)


@triton.jit
def load_nibbles(entries, rank, packed, here):
    """Load eight second-level codes for each lane, the code at index `rank` in the lowest bits.

    Args:
        entries: pointer to the chunk's entry words, int32.
        packed: number of entry words with second-level codes.
        here: lanes that load codes.
    """
    word = rank >> 3
    low = tl.load(entries + word, mask=here, other=0)
    high = tl.load(entries + word + 1, mask=here & (word + 1 < packed), other=0)
    both = unsigned(low) | (unsigned(high) << 32)
    return (both.to(tl.uint64, bitcast=True) >> (4 * (rank & 7)).to(tl.uint64)).to(tl.int32)


@triton.jit
def unpadded_places(lane, num_columns, length, ELEMENT_BYTES: tl.constexpr):
    """Return, for each column, the mask of the places that are not padding."""
    inside = tl.zeros_like(lane)
    for place in range(32):
        here = (
            element_index(tl.full((LANES,), place, tl.int32), lane, num_columns, ELEMENT_BYTES)
            < length
        )
        inside |= here.to(tl.int32) << place
    return inside


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def decode_kernel(
    # pages, planes, segments and codebooks
    base, base8, base32, plane_rows, page_ids,
    # geometry
    page_stride, head_stride, run_chunks, run_elements, run_columns, header_words,
    # working memory
    accumulators,
    # compile-time configuration
    ELEMENT_BYTES: tl.constexpr, MANTISSA_BITS: tl.constexpr, EXPONENT_MASK: tl.constexpr,
    REMAINDER_WIDTHS: tl.constexpr, CODE_BITS: tl.constexpr, HAS_ESCAPE_CODE: tl.constexpr,
    IS_WINDOW: tl.constexpr, ALIGNED: tl.constexpr, PAGED: tl.constexpr,
    OVERFLOW_WORDS: tl.constexpr, KEYS: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """Decode one chunk into its page and add its checksum terms to `accumulators`.

    For any payload, the kernel reads nothing outside the payload and writes nothing outside the
    chunk.

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
    chunk = head * head_chunks + chunk_in_head
    starts = base32 + segment + header_words + tl.load(row + FIRST_CODED_CHUNK) + chunk
    num_columns = (length + 31) // 32
    begin = unsigned(tl.load(starts))
    entry_words = (unsigned(tl.load(starts + 1)) - begin).to(tl.int32)
    G: tl.constexpr = 1 if CODE_BITS == 3 else 4
    streams = load_stream(
        base32 + first_word(codes_start, first_column, CODE_BITS, G), num_columns, CODE_BITS, G
    )
    R: tl.constexpr = 1 if REMAINDER_WIDTHS[0] == 3 else 4
    p = segment + tl.load(row + LOW_STREAM)
    p = base32 + first_word(p, first_column, REMAINDER_WIDTHS[0], R)
    streams = streams + load_stream(p, num_columns, REMAINDER_WIDTHS[0], R)
    if len(REMAINDER_WIDTHS) == 2:
        p = segment + tl.load(row + HIGH_STREAM)
        p = base32 + first_word(p, first_column, 3, 1)
        streams = streams + load_stream(p, num_columns, 3, 1)
    lowest = tl.load(row + LOWEST_EXPONENT).to(tl.int32)
    at = plane_start + head.to(tl.int64) * head_stride + start
    at += page_offset(page_ids, first_page + page, page_stride, PAGED)
    tables = base8 + tl.load(row + TABLES)
    exponents = exponents_of(code_quads(streams, CODE_BITS), lowest, tables + EXPONENTS, IS_WINDOW)

    # Check the entry count before entries are read: nothing outside the payload may be accessed.
    max_entry_words = OVERFLOW_WORDS * num_columns
    wrong = (
        (entry_words < 0)
        | (entry_words > max_entry_words)
        | (begin + entry_words > tl.load(row + ENTRY_WORDS))
    )
    listed = tl.where(wrong | (entry_words == max_entry_words), 0, entry_words)
    entries = base32 + segment + tl.load(row + ENTRIES) + begin
    chunk_number = tl.load(row + FIRST_CHUNK) + chunk
    hash_sum = tl.zeros((LANES,), tl.int64)

    if HAS_ESCAPE_CODE:
        if listed > 0:
            # `rank[l]` is the index of the first second-level code of lane l.
            mask = escape_code_mask(streams, CODE_BITS)
            counts = popcount(mask)
            rank, num_escapes = exclusive_sum(counts)
            packed = (num_escapes + 7) // 8
            listed = entry_words - packed
            if length < 1024:
                wrong = any_lane(
                    (mask & ~unpadded_places(lane, num_columns, length, ELEMENT_BYTES)) != 0
                )
            if (listed < 0) | (num_escapes > MAX_NIBBLES) | wrong:
                wrong = True
                listed = 0
            else:
                escape = lowest + ((1 << CODE_BITS) - 1)
                if not IS_WINDOW:
                    escape = tl.load(tables + EXPONENTS + ((1 << CODE_BITS) - 1)).to(tl.int32)
                offsets = tl.load(tables + SECOND_EXPONENTS + (lane & 15)).to(tl.int32) - escape
                word = tl.load(entries + lane, mask=lane < packed, other=0)
                hash_sum += unsigned(word) * entry_key(chunk_number, lane)
                max_per_column = tl.max(counts, axis=0)
                # Replace the escape code's exponent by the second-level one, in registers.
                for done in range(0, max_per_column, 8):
                    nibbles = load_nibbles(entries, rank, packed, mask != 0)
                    for _ in range(done, tl.minimum(done + 8, max_per_column)):
                        place = mask & -mask
                        exponents = add_at(exponents, place, tl.gather(offsets, nibbles & 15, 0))
                        nibbles = nibbles >> 4
                        mask ^= place
                    rank += 8

    words = words_of_pairs(
        join_elements(
            exponents, streams[CODE_BITS : len(streams)], REMAINDER_WIDTHS, MANTISSA_BITS
        ),
        ELEMENT_BYTES,
    )
    digest = column_digest(streams, KEYS, 0)
    if (entry_words == max_entry_words) & (wrong == 0):
        overflow = load_stream(entries, num_columns, OVERFLOW_WORDS, 1)
        digest += column_digest(overflow, KEYS, len(streams))
        words = streams + overflow
    hash_sum += tl.where(
        lane < num_columns, column_hash(digest, chunk_number, lane, entry_words), 0
    )
    store_columns(base, base32, at, words, num_columns, length, ELEMENT_BYTES, ALIGNED)

    if listed > 0:
        # Listed escapes are patched in memory, after all lanes have stored their columns.
        tl.debug_barrier()
        remainders8 = tl.load(row + LOW_STREAM) + first_column * REMAINDER_WIDTHS[0]
        remainders8 = base8 + 4 * (segment + remainders8)
        entries += entry_words - listed
        for first in range(0, listed, LANES):
            here = first + lane < listed
            word = tl.load(entries + first + lane, mask=here, other=0)
            hash_sum += unsigned(word) * entry_key(
                chunk_number, entry_words - listed + first + lane
            )
            column = (word >> 5) & 31
            place = word & 31
            inside = (column < num_columns) & (
                element_index(place, column, num_columns, ELEMENT_BYTES) < length
            )
            inside = inside & ((word & ~(0x3FF | (EXPONENT_MASK << 16))) == 0)
            if any_lane(here & (inside == 0)):
                wrong = True
            here = here & inside
            x = element_without_exponent(
                base, at, remainders8, place, column, num_columns, here,
                ELEMENT_BYTES, MANTISSA_BITS, EXPONENT_MASK,
            )  # fmt: skip
            x |= (word >> 16) << MANTISSA_BITS
            store_element(base, at, place, column, num_columns, x, here, ELEMENT_BYTES)
    accumulators += tl.load(row + NUMBER) * ACCUMULATORS
    if wrong:
        tl.atomic_or(accumulators + ERROR_FLAGS, 2, sem="relaxed")
    tl.atomic_add(accumulators + chunk_number % NUM_SUMS, tl.sum(hash_sum, axis=0), sem="relaxed")


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def raw_decode_kernel(
    base, base32, plane_rows, page_ids, page_stride, head_stride, run_chunks, run_elements,
    run_columns, accumulators,
    ELEMENT_BYTES: tl.constexpr, ALIGNED: tl.constexpr, PAGED: tl.constexpr, KEYS: tl.constexpr,
    TIMED: tl.constexpr,
):  # fmt: skip
    """Copy one chunk of a raw plane into its page and add its checksum terms."""
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
    p = base32 + first_word(codes_start, first_column, 8 * ELEMENT_BYTES, 2 * ELEMENT_BYTES)
    words = load_stream(p, num_columns, 8 * ELEMENT_BYTES, 2 * ELEMENT_BYTES)
    store_columns(base, base32, at, words, num_columns, length, ELEMENT_BYTES, ALIGNED)
    accumulators += tl.load(row + NUMBER) * ACCUMULATORS
    chunk_number = tl.load(row + FIRST_CHUNK) + head * head_chunks + chunk_in_head
    hash_sum = column_hash(column_digest(words, KEYS, 0), chunk_number, lane, 0)
    hash_sum = tl.where(lane < num_columns, hash_sum, 0)
    tl.atomic_add(accumulators + chunk_number % NUM_SUMS, tl.sum(hash_sum, axis=0), sem="relaxed")
