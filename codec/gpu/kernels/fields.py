# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""Conversions in registers between the words of a column and its codes, exponents and remainders.

A column is held in one of three forms. `words` are its 32-bit words in memory order. `pairs`
are 16 registers with two 16-bit fields each, in the order of places (`FORMAT.md`). `quads` are 8
registers with four 8-bit values each. The element type is given at compile time: ELEMENT_BYTES,
MANTISSA_BITS, EXPONENT_MASK and REMAINDER_WIDTHS (bits in each remainder stream).
"""

import triton
import triton.language as tl

from codec.gpu.kernels.words import shift_right


@triton.jit
def pairs_of_words(words, ELEMENT_BYTES: tl.constexpr):
    """Convert the words of a column into 16 pairs."""
    if ELEMENT_BYTES == 2:
        pairs = words
    else:
        pairs = ()
        for w in tl.static_range(8):
            pairs = pairs + (words[w] & 0x00FF00FF, shift_right(words[w], 8) & 0x00FF00FF)
    return pairs


@triton.jit
def words_of_pairs(pairs, ELEMENT_BYTES: tl.constexpr):
    """Convert 16 pairs into the words of a column; inverse of `pairs_of_words`."""
    if ELEMENT_BYTES == 2:
        words = pairs
    else:
        words = ()
        for w in tl.static_range(8):
            words = words + (pairs[2 * w] | (pairs[2 * w + 1] << 8),)
    return words


@triton.jit
def pack(v, BITS: tl.constexpr):
    """Pack 16 pairs of BITS-bit values into BITS words."""
    words = ()
    for w in tl.static_range(BITS):
        word = v[w]
        for k in tl.static_range(1, 15 // BITS + (BITS != 3)):
            word |= v[w + BITS * k] << (BITS * k)
        if BITS == 3:
            word |= (v[15] & (0x10001 << w)) << (15 - w)
        words = words + (word,)
    return words


@triton.jit
def unpack(words, BITS: tl.constexpr):
    """Unpack BITS words into 16 pairs; inverse of `pack`."""
    field: tl.constexpr = ((1 << BITS) - 1) * 0x10001
    v = ()
    for h in tl.static_range(15 + (BITS != 3)):
        v = v + (shift_right(words[h % BITS], BITS * (h // BITS)) & field,)
    if BITS == 3:
        last = shift_right(words[0], 15) & 0x00010001
        last |= shift_right(words[1], 14) & 0x00020002
        v = v + (last | (shift_right(words[2], 13) & 0x00040004),)
    return v


@triton.jit
def escape_code_mask(words, BITS: tl.constexpr):
    """Return, for each column, the int32 mask of the places that have the escape code.

    Args:
        words: the BITS words of a column in the stream of codes.
    """
    mask = tl.zeros_like(words[0])
    for w in tl.static_range(BITS):
        all_ones = words[w] & shift_right(words[w], 1) & shift_right(words[w], 2)
        if BITS == 4:
            mask |= (all_ones & shift_right(words[w], 3) & 0x11111111) << w
        else:
            mask |= (all_ones & 0x12491249) << w
    if BITS == 3:
        mask |= words[0] & words[1] & words[2] & -2147450880
    return mask


@triton.jit
def remainder_words(pairs, REMAINDER_WIDTHS: tl.constexpr, MANTISSA_BITS: tl.constexpr):
    """Pack the remainders (sign above mantissa) of 16 pairs into the words of their streams."""
    if MANTISSA_BITS == 7:
        words = ()
        for w in tl.static_range(8):
            a = pairs[w]
            b = pairs[w + 8]
            word = (a & 0x007F007F) | (shift_right(a, 8) & 0x00800080)
            words = words + (word | ((b << 8) & 0x7F007F00) | (b & -2147450880),)
    elif MANTISSA_BITS == 10:
        low = ()
        high = ()
        for h in tl.static_range(16):
            low = low + (pairs[h] & 0x00FF00FF,)
            high = high + (
                (shift_right(pairs[h], 8) & 0x30003) | (shift_right(pairs[h], 13) & 0x40004),
            )
        words = pack(low, 8) + pack(high, 3)
    else:
        top: tl.constexpr = 0x10001 << MANTISSA_BITS
        rests = ()
        for h in tl.static_range(16):
            sign = shift_right(pairs[h], 7 - MANTISSA_BITS) & top
            rests = rests + ((pairs[h] & (top - 0x10001)) | sign,)
        words = pack(rests, REMAINDER_WIDTHS[0])
    return words


@triton.jit
def code_quads(words, BITS: tl.constexpr):
    """Unpack codes into 8 quads: byte b of quad w is the code of place 8 b + w."""
    quads = ()
    for w in tl.static_range(8):
        if BITS == 4:
            four = shift_right(words[w % 4], 4 * (w // 4)) & 0x0F0F0F0F
        elif w == 0:
            four = (words[0] & 0x00070007) | ((words[2] << 2) & 0x07000700)
        else:
            four = shift_right(words[w % 3], 3 * (w // 3)) & 0x00070007
            if w < 7:
                four |= shift_right(words[(w + 8) % 3], 3 * ((w + 8) // 3) - 8) & 0x07000700
            else:
                four |= shift_right(words[0], 7) & 0x01000100
                four |= shift_right(words[1], 6) & 0x02000200
                four |= shift_right(words[2], 5) & 0x04000400
        quads = quads + (four,)
    return quads


@triton.jit
def join_elements(quads, words, REMAINDER_WIDTHS: tl.constexpr, MANTISSA_BITS: tl.constexpr):
    """Join 8 quads of exponents and the words of the remainders into 16 pairs."""
    pairs = ()
    if MANTISSA_BITS == 7:
        for h in tl.static_range(16):
            word = words[h % 8]
            if h < 8:
                half = (quads[h] << 7) & 0x7F807F80
                half |= (word & 0x007F007F) | ((word << 8) & -2147450880)
            else:
                half = shift_right(quads[h - 8], 1) & 0x7F807F80
                half |= (shift_right(word, 8) & 0x007F007F) | (word & -2147450880)
            pairs = pairs + (half,)
    else:
        if MANTISSA_BITS == 10:
            low = unpack(words[0:8], 8)
            high = unpack(words[8:11], 3)
        else:
            rests = unpack(words, REMAINDER_WIDTHS[0])
        top: tl.constexpr = 0x10001 << MANTISSA_BITS
        for h in tl.static_range(16):
            half = (
                (quads[h] if h < 8 else shift_right(quads[h - 8], 8)) & 0x00FF00FF
            ) << MANTISSA_BITS
            if MANTISSA_BITS == 10:
                half |= low[h] | ((high[h] & 0x30003) << 8) | ((high[h] & 0x40004) << 13)
            else:
                half |= (rests[h] & (top - 0x10001)) | ((rests[h] & top) << (7 - MANTISSA_BITS))
            pairs = pairs + (half,)
    return pairs


@triton.jit
def code_distances(
    pairs,
    lowest,
    table,
    MANTISSA_BITS: tl.constexpr,
    EXPONENT_MASK: tl.constexpr,
    IS_WINDOW: tl.constexpr,
):
    """Return 16 pairs with the code of each element; for an escape, a value in [NUM_CODES, 511].

    With IS_WINDOW the value is computed from the distance to the lowest exponent. Otherwise it is
    read from the code table.
    """
    found = ()
    for h in tl.static_range(16):
        e = shift_right(pairs[h], MANTISSA_BITS) & (EXPONENT_MASK * 0x10001)
        if IS_WINDOW:
            t = (e + (256 - lowest) * 0x10001) ^ 0x01000100
        else:
            t = tl.load(table + (e & EXPONENT_MASK)).to(tl.int32)
            t |= tl.load(table + shift_right(e, 16)).to(tl.int32) << 16
        found = found + (t,)
    return found


@triton.jit
def no_code_flags(t, NUM_CODES: tl.constexpr):
    """Return, for each 16-bit field of the pair `t`, 1 if it is not a code, else 0."""
    return shift_right(t + (0x8000 - NUM_CODES) * 0x10001, 15) & 0x00010001


@triton.jit
def codes_of(found, NUM_CODES: tl.constexpr, HAS_ESCAPE_CODE: tl.constexpr):
    """Replace each field that is not a code, in the 16 pairs of `code_distances`.

    The new value is the escape code, or the field's low four bits if the mode has no escape code.
    """
    codes = ()
    for h in tl.static_range(16):
        if HAS_ESCAPE_CODE:
            code = (found[h] | (no_code_flags(found[h], NUM_CODES) * NUM_CODES)) & (
                NUM_CODES * 0x10001
            )
        else:
            code = found[h] & 0x000F000F
        codes = codes + (code,)
    return codes


@triton.jit
def bitwise_or(found):
    """Return the bitwise OR of 16 pairs."""
    bits = found[0]
    for h in tl.static_range(1, 16):
        bits |= found[h]
    return bits


@triton.jit
def escape_mask(found, NUM_CODES: tl.constexpr):
    """Return, for each column, the int32 mask of the places whose exponent has no code.

    Args:
        found: 16 pairs of `code_distances`.
    """
    mask = no_code_flags(found[0], NUM_CODES)
    for h in tl.static_range(1, 16):
        mask |= no_code_flags(found[h], NUM_CODES) << h
    return mask
