# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""Between a column's words and its fields: codes, exponents and rests, in registers.

`words` are a column's as they lie in memory, `halves` 16 registers of two elements in fields of 16
bits, in the order of places (`README.md`). What an element type is made of is given at compile
time: SIZE in bytes, SHIFT (bits of the mantissa), MASK (of the exponent), RESTS (widths of the
streams of the rest).
"""

import triton
import triton.language as tl

from codec.gpu.kernels.words import shifted


@triton.jit
def halves_of(words, SIZE: tl.constexpr):
    if SIZE == 2:
        halves = words
    else:
        halves = ()
        for w in tl.static_range(8):
            halves = halves + (words[w] & 0x00FF00FF, shifted(words[w], 8) & 0x00FF00FF)
    return halves


@triton.jit
def words_of(halves, SIZE: tl.constexpr):
    """The inverse of `halves_of`."""
    if SIZE == 2:
        words = halves
    else:
        words = ()
        for w in tl.static_range(8):
            words = words + (halves[2 * w] | (halves[2 * w + 1] << 8),)
    return words


@triton.jit
def pack(v, BITS: tl.constexpr):
    """16 halves of so many bits in each field → as many words."""
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
    """The inverse of `pack`."""
    field: tl.constexpr = ((1 << BITS) - 1) * 0x10001
    v = ()
    for h in tl.static_range(15 + (BITS != 3)):
        v = v + (shifted(words[h % BITS], BITS * (h // BITS)) & field,)
    if BITS == 3:
        last = shifted(words[0], 15) & 0x00010001
        last |= shifted(words[1], 14) & 0x00020002
        v = v + (last | (shifted(words[2], 13) & 0x00040004),)
    return v


@triton.jit
def marked_in(words, BITS: tl.constexpr):
    """Of packed codes: the mask of a column's places whose code is the escape code."""
    mask = tl.zeros_like(words[0])
    for w in tl.static_range(BITS):
        all_ones = words[w] & shifted(words[w], 1) & shifted(words[w], 2)
        if BITS == 4:
            mask |= (all_ones & shifted(words[w], 3) & 0x11111111) << w
        else:
            mask |= (all_ones & 0x12491249) << w
    if BITS == 3:
        mask |= words[0] & words[1] & words[2] & -2147450880
    return mask


@triton.jit
def rests_of(halves, RESTS: tl.constexpr, SHIFT: tl.constexpr):
    """Words of the streams of the rest."""
    if SHIFT == 7:
        words = ()
        for w in tl.static_range(8):
            a = halves[w]
            b = halves[w + 8]
            word = (a & 0x007F007F) | (shifted(a, 8) & 0x00800080)
            words = words + (word | ((b << 8) & 0x7F007F00) | (b & -2147450880),)
    elif SHIFT == 10:
        low = ()
        high = ()
        for h in tl.static_range(16):
            low = low + (halves[h] & 0x00FF00FF,)
            high = high + ((shifted(halves[h], 8) & 0x30003) | (shifted(halves[h], 13) & 0x40004),)
        words = pack(low, 8) + pack(high, 3)
    else:
        top: tl.constexpr = 0x10001 << SHIFT
        rests = ()
        for h in tl.static_range(16):
            sign = shifted(halves[h], 7 - SHIFT) & top
            rests = rests + ((halves[h] & (top - 0x10001)) | sign,)
        words = pack(rests, RESTS[0])
    return words


@triton.jit
def fours_of(words, BITS: tl.constexpr):
    """Packed codes → 8 registers of four: byte b of number w is the code of place 8 b + w."""
    fours = ()
    for w in tl.static_range(8):
        if BITS == 4:
            four = shifted(words[w % 4], 4 * (w // 4)) & 0x0F0F0F0F
        elif w == 0:
            four = (words[0] & 0x00070007) | ((words[2] << 2) & 0x07000700)
        else:
            four = shifted(words[w % 3], 3 * (w // 3)) & 0x00070007
            if w < 7:
                four |= shifted(words[(w + 8) % 3], 3 * ((w + 8) // 3) - 8) & 0x07000700
            else:
                four |= shifted(words[0], 7) & 0x01000100
                four |= shifted(words[1], 6) & 0x02000200
                four |= shifted(words[2], 5) & 0x04000400
        fours = fours + (four,)
    return fours


@triton.jit
def joined(fours, words, RESTS: tl.constexpr, SHIFT: tl.constexpr):
    """8 registers of four exponents, and the words of their rests → halves."""
    halves = ()
    if SHIFT == 7:
        for h in tl.static_range(16):
            word = words[h % 8]
            if h < 8:
                half = (fours[h] << 7) & 0x7F807F80
                half |= (word & 0x007F007F) | ((word << 8) & -2147450880)
            else:
                half = shifted(fours[h - 8], 1) & 0x7F807F80
                half |= (shifted(word, 8) & 0x007F007F) | (word & -2147450880)
            halves = halves + (half,)
    else:
        if SHIFT == 10:
            low = unpack(words[0:8], 8)
            high = unpack(words[8:11], 3)
        else:
            rests = unpack(words, RESTS[0])
        top: tl.constexpr = 0x10001 << SHIFT
        for h in tl.static_range(16):
            half = ((fours[h] if h < 8 else shifted(fours[h - 8], 8)) & 0x00FF00FF) << SHIFT
            if SHIFT == 10:
                half |= low[h] | ((high[h] & 0x30003) << 8) | ((high[h] & 0x40004) << 13)
            else:
                half |= (rests[h] & (top - 0x10001)) | ((rests[h] & top) << (7 - SHIFT))
            halves = halves + (half,)
    return halves


@triton.jit
def distances(halves, lowest, table, SHIFT: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr):
    """Of 16 halves: the code in each field, or what is above all codes; below 512."""
    found = ()
    for h in tl.static_range(16):
        e = shifted(halves[h], SHIFT) & (MASK * 0x10001)
        if WINDOW:
            t = (e + (256 - lowest) * 0x10001) ^ 0x01000100
        else:
            t = tl.load(table + (e & MASK)).to(tl.int32)
            t |= tl.load(table + shifted(e, 16)).to(tl.int32) << 16
        found = found + (t,)
    return found


@triton.jit
def flagged(t, CODES: tl.constexpr):
    """1 in a field that is no code."""
    return shifted(t + (0x8000 - CODES) * 0x10001, 15) & 0x00010001


@triton.jit
def codes_of(found, CODES: tl.constexpr, ESCAPES: tl.constexpr):
    codes = ()
    for h in tl.static_range(16):
        if ESCAPES:
            code = (found[h] | (flagged(found[h], CODES) * CODES)) & (CODES * 0x10001)
        else:
            code = found[h] & 0x000F000F
        codes = codes + (code,)
    return codes


@triton.jit
def union_of(found):
    """The bits that any of 16 halves has."""
    bits = found[0]
    for h in tl.static_range(1, 16):
        bits |= found[h]
    return bits


@triton.jit
def escapes_of(found, CODES: tl.constexpr):
    """The mask of a column's places without a code."""
    mask = flagged(found[0], CODES)
    for h in tl.static_range(1, 16):
        mask |= flagged(found[h], CODES) << h
    return mask
