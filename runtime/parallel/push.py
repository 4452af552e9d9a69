# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Collectives of a single kernel: every rank stores its values into the memory of all ranks.

Values are 32-bit words, or pairs of bf16 numbers. A message is a word and a flag, stored together
as 64 bits. This is NCCL's LL protocol, which needs no barrier. The flag is the number of the
collective.

Consecutive collectives alternate between two halves of the memory. A rank overwrites the messages
of collective n in collective n + 2. By then, it has received all messages of collective n + 1,
which every rank sends only after it has read those of collective n.

All ranks launch the same collectives in the same order, each with at most `MAX_PROGRAMS` programs.
A program waits for the programs with the same index on the other ranks, so that all programs must
be resident.
"""

import triton
import triton.language as tl

from runtime.kernels.arith import INTERPRETED, power_of_2
from runtime.kernels.overlap import after_previous
from runtime.kernels.polling import asm_constraints, poll_words_asm

MAX_PROGRAMS = 128
_CHUNK = tl.constexpr(1024)

"""Elements of a row that a program squares together."""


@triton.jit
def _send(to, word, flag, mask):
    """Store int32 words and a flag as messages at the pointers ``to``."""
    tl.store(to, (word.to(tl.int64) & 0xFFFFFFFF) | (flag.to(tl.int64) << 32), mask=mask)


@triton.jit
def _receive(at, flag, mask, COUNT: tl.constexpr):
    """Poll the messages at the pointers ``at`` until all have the flag; return their words."""
    if INTERPRETED:
        message = tl.load(at, mask=mask, other=0, volatile=True)
        while tl.sum((mask & ((message >> 32).to(tl.int32) != flag)).to(tl.int32)) > 0:
            message = tl.load(at, mask=mask, other=0, volatile=True)
        word = message.to(tl.int32)
    else:
        word = tl.inline_asm_elementwise(
            poll_words_asm(COUNT, True), asm_constraints(COUNT),
            [at, flag, mask.to(tl.int32)], tl.int32, False, COUNT,
        )  # fmt: skip
    return word


@triton.jit
def _memory(addresses, rank, flag, HALF: tl.constexpr):
    """Return a pointer to the half of a rank's memory that the collective uses."""
    return tl.load(addresses + rank).to(tl.pointer_type(tl.int64)) + (flag & 1) * HALF


@triton.jit
def probe_kernel(addresses, rank, RANKS: tl.constexpr):
    """Store ``rank + 1`` at index ``rank`` of every rank's memory, int64 `[RANKS]`. Grid `(1,)`."""
    for peer in tl.static_range(RANKS):
        there = tl.load(addresses + peer).to(tl.pointer_type(tl.int64))
        tl.store(there + rank, rank + 1)


@triton.jit
def _finish(state, flag):
    """Count the programs that have finished; the last one increments the number in ``state``."""
    tl.debug_barrier()  # all threads have loaded the number
    if tl.atomic_add(state + 1, 1) == tl.num_programs(0) - 1:
        tl.store(state + 1, 0)
        # Skip 0, the flag of memory that was never written, and 1, which is odd as -1 is.
        tl.store(state, tl.where(flag == -1, 2, flag + 1))


@triton.jit
def _numbers(words):
    """Return the bf16 numbers in the lower and in the upper 16 bits of each word, as fp32."""
    low = (words << 16).to(tl.float32, bitcast=True)
    return low, (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(x):
    """Round fp32 numbers to bf16, to nearest even. Return the bits in the lower half of int32."""
    bits = x.to(tl.int32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, nearest, 0x7FC0) & 0xFFFF


@triton.jit
def _sum_of_ranks(memory, i, mask, flag, SLOT: tl.constexpr, RANKS: tl.constexpr,
                  COUNT: tl.constexpr):  # fmt: skip
    """Receive pairs of bf16 numbers of all ranks, and return their sums, fp32."""
    low, high = _numbers(_receive(memory + i, flag, mask, COUNT))
    for rank in tl.static_range(1, RANKS):
        more = _numbers(_receive(memory + rank * SLOT + i, flag, mask, COUNT))
        low += more[0]
        high += more[1]
    return low, high


@triton.jit
def _words(low, high):
    """Round fp32 numbers to bf16; return those of ``low`` and ``high`` in pairs."""
    return _rounded(low) | (_rounded(high) << 16)


@triton.jit
def _send_squares(x, rows, columns, addresses, rank, flag, RANKS: tl.constexpr,
                  HALF: tl.constexpr, SLOT: tl.constexpr):  # fmt: skip
    """Send the sum of squares of each row of ``x`` `[rows, columns]`, fp32, to all ranks.

    The programs divide the rows. The messages are the last ones of this rank's slot.
    """
    begin, step = tl.program_id(0), tl.num_programs(0)
    if INTERPRETED:  # programs run one after another, so that the first one sends all rows
        begin, step = begin * rows, 1
    for row in range(begin, rows, step):
        square = tl.zeros([_CHUNK], tl.float32)
        for first in range(0, columns, _CHUNK):
            i = first + tl.arange(0, _CHUNK)
            at = x + tl.cast(row, tl.int64) * columns + i
            values = tl.load(at, mask=i < columns, other=0.0).to(tl.float32)
            square += values * values
        bits = tl.sum(square, axis=0).to(tl.int32, bitcast=True)
        for distance in tl.static_range(RANKS):
            to = _memory(addresses, (rank + distance) % RANKS, flag, HALF)
            _send(to + (rank + 1) * SLOT - rows + row, bits, flag, row < rows)


@triton.jit
def _inverse_rms(memory, rows, row, mask, flag, elements, eps, SLOT: tl.constexpr,
                 RANKS: tl.constexpr, COUNT: tl.constexpr):  # fmt: skip
    """Receive sums of squares of all ranks; return 1 / rms of the rows with numbers ``row``."""
    at = memory + SLOT - rows + row
    square = _receive(at, flag, mask, COUNT).to(tl.float32, bitcast=True)
    for rank in tl.static_range(1, RANKS):
        square += _receive(at + rank * SLOT, flag, mask, COUNT).to(tl.float32, bitcast=True)
    return tl.rsqrt(square / elements + eps)


@triton.jit
def _inverse_rms_of_two(memory, rows, row, first, flag, elements, eps, SLOT: tl.constexpr,
                        RANKS: tl.constexpr):  # fmt: skip
    """Return what `_inverse_rms` does, for rows ``first`` and ``first + 1``.

    All messages are polled together, instead of those of one rank after those of another.
    """
    rank = tl.arange(0, power_of_2(RANKS))[:, None]
    which = tl.arange(0, 2)[None, :]
    wanted = (rank < RANKS) & (first + which < rows)
    found = _receive(memory + rank * SLOT + SLOT - rows + first + which, flag, wanted, 1)
    squares = tl.where(wanted, found.to(tl.float32, bitcast=True), 0.0)
    one = tl.sum(tl.sum(tl.where(which == 0, squares, 0.0), axis=1), axis=0)
    two = tl.sum(tl.sum(tl.where(which == 1, squares, 0.0), axis=1), axis=0)
    return tl.rsqrt(tl.where(row == first, one, two) / elements + eps)


@triton.jit
def _normed(low, high, memory, rows, row_words, begin, mask, flag, elements, eps,
            SLOT: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
            COUNT: tl.constexpr):  # fmt: skip
    """Divide the sums of BLOCK words, from ``begin`` on, by the rms of their rows."""
    row = (begin + tl.arange(0, BLOCK)) // row_words
    if row_words >= BLOCK:
        first = begin // row_words
        scale = _inverse_rms_of_two(memory, rows, row, first, flag, elements, eps, SLOT, RANKS)
    else:
        scale = _inverse_rms(memory, rows, row, mask, flag, elements, eps, SLOT, RANKS, COUNT)
    return low * scale, high * scale


@triton.jit
def _store(out, words, mask, ADDS: tl.constexpr):
    """Store words; with ADDS, add their bf16 numbers to those at the pointers ``out``."""
    if ADDS:
        low, high = _numbers(tl.load(out, mask=mask, other=0))
        more = _numbers(words)
        words = _words(low + more[0], high + more[1])
    tl.store(out, words, mask=mask)


@triton.jit(do_not_specialize=["rank"])
def gather_kernel(
    part, out, addresses, state, rank, words, row_words,
    RANKS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Gather the rows of all ranks side by side.

    Args:
        part: int32 `[n, row_words]`, contiguous, with ``words`` elements.
        out: int32 `[n, RANKS * row_words]`.
        addresses: int64 `[RANKS]`, addresses of the memory of all ranks: int64 `[2, HALF]` each.
        state: int32 `[2]`, number of the collective (never 0), and number of finished programs.
        COUNT: messages per thread, BLOCK / threads.
    """
    SLOT: tl.constexpr = HALF // RANKS
    after_previous()
    flag = tl.load(state)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < words
    own = tl.load(part + i, mask=mask, other=0)
    for distance in tl.static_range(RANKS):
        to = _memory(addresses, (rank + distance) % RANKS, flag, HALF)
        _send(to + rank * SLOT + i, own, flag, mask)
    here = _memory(addresses, rank, flag, HALF)
    place = out + i // row_words * (RANKS * row_words) + i % row_words
    for peer in tl.static_range(RANKS):
        found = _receive(here + peer * SLOT + i, flag, mask, COUNT)
        tl.store(place + peer * row_words, found, mask=mask)
    _finish(state, flag)


@triton.jit(do_not_specialize=["rank", "rows", "columns", "row_words", "elements"])
def sum_kernel(
    addend, out, addresses, state, rank, words, x, rows, columns, row_words, elements, eps,
    RANKS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
    ADDS: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Add bf16 numbers of all ranks in fp32. Every rank sends all its numbers to every rank.

    Args:
        addend, out: int32 `[words]`, pairs of bf16 numbers.
        x: bf16 `[rows, columns]`, contiguous. The following arguments are unused without NORMS.
        row_words: words of each of the rows of ``addend``.
        elements: number of elements of a row of ``x`` on all ranks.
        eps: added to the mean square.
        ADDS: whether to add the sums to the bf16 numbers in ``out``.
        NORMS: whether to divide the sums of each row by the rms of the row of all ranks' ``x``.

    The other arguments are those of `gather_kernel`.
    """
    SLOT: tl.constexpr = HALF // RANKS
    after_previous()
    flag = tl.load(state)
    begin = tl.program_id(0) * BLOCK
    i = begin + tl.arange(0, BLOCK)
    mask = i < words
    if NORMS:
        _send_squares(x, rows, columns, addresses, rank, flag, RANKS, HALF, SLOT)
    own = tl.load(addend + i, mask=mask, other=0)
    for distance in tl.static_range(RANKS):
        to = _memory(addresses, (rank + distance) % RANKS, flag, HALF)
        _send(to + rank * SLOT + i, own, flag, mask)
    here = _memory(addresses, rank, flag, HALF)
    low, high = _sum_of_ranks(here, i, mask, flag, SLOT, RANKS, COUNT)
    if NORMS:
        low, high = _normed(
            low, high, here, rows, row_words, begin, mask, flag, elements, eps, SLOT, RANKS,
            BLOCK, COUNT,
        )  # fmt: skip
    _store(out + i, _words(low, high), mask, ADDS)
    _finish(state, flag)


@triton.jit(do_not_specialize=["rank", "rows", "columns", "row_words", "elements"])
def two_step_sum_kernel(
    addend, out, addresses, state, rank, words, x, rows, columns, row_words, elements, eps,
    RANKS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
    ADDS: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Add bf16 numbers of all ranks in fp32: a reduce-scatter, followed by an all-gather.

    A rank sends ``2 / RANKS`` times the messages of `sum_kernel`, but waits twice. The arguments
    are those of `sum_kernel`; ``words`` must be a multiple of RANKS.
    """
    SLOT: tl.constexpr = HALF // (2 * RANKS)
    SUMS: tl.constexpr = HALF // 2
    after_previous()
    flag = tl.load(state)
    size = words // RANKS
    begin = tl.program_id(0) * BLOCK
    i = begin + tl.arange(0, BLOCK)
    mask = i < size
    if NORMS:
        _send_squares(x, rows, columns, addresses, rank, flag, RANKS, HALF, SLOT)
    for distance in tl.static_range(RANKS):
        peer = (rank + distance) % RANKS
        own = tl.load(addend + peer * size + i, mask=mask, other=0)
        to = _memory(addresses, peer, flag, HALF)
        _send(to + rank * SLOT + i, own, flag, mask)
    here = _memory(addresses, rank, flag, HALF)
    low, high = _sum_of_ranks(here, i, mask, flag, SLOT, RANKS, COUNT)
    if NORMS:
        low, high = _normed(
            low, high, here, rows, row_words, rank * size + begin, mask, flag, elements, eps,
            SLOT, RANKS, BLOCK, COUNT,
        )  # fmt: skip
    total = _words(low, high)
    for distance in tl.static_range(RANKS):
        to = _memory(addresses, (rank + distance) % RANKS, flag, HALF)
        _send(to + SUMS + rank * SLOT + i, total, flag, mask)
    for peer in tl.static_range(RANKS):
        found = _receive(here + SUMS + peer * SLOT + i, flag, mask, COUNT)
        _store(out + peer * size + i, found, mask, ADDS)
    _finish(state, flag)
