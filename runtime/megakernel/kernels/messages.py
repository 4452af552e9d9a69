# mypy: ignore-errors
"""Flagged messages between programs: a value and a flag, packed into one word and stored at once.

This is the LL protocol of NCCL. The flag of a message is the step's base flag plus the index of
the stage that wrote it. Inputs of matmuls are bf16, in 32-bit words with the lower 16 bits of the
flag; 16 bits suffice, because a message is at most a few hundred stages old. Sums are fp32, in
64-bit words with the whole flag. A thread polls several messages together, until the flags of all
of them match.

Messages are written by plain stores. An aligned store of 4 or 8 bytes is not torn. With triton 3.6
and 3.9, no store was observed to be delayed behind a polling loop.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from runtime.kernels.compat import barrier
from runtime.kernels.polling import asm_constraints, poll_words_asm
from runtime.megakernel.kernels.layouts import (
    COLUMNS,
    INPUT,
    MAX_DIM,
    MAX_MESSAGES,
    PARTS,
    RHS,
    ROWS,
    SHARED_COLUMNS,
    THREADS,
    WARPS,
    N,
    output_layout,
)


@gluon.jit
def opaque_zero():
    """Return 0 in a form that the compiler cannot fold.

    Indices computed from it are not hoisted out of the loop over passes, where they would occupy
    scarce registers.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, 0; // $1", "=r,r", [gl.to_tensor(0)], gl.int32, False, 1
    )


@gluon.jit
def send_fp32(pointer, value, flag, mask):
    """Store fp32 values and ``flag`` as 64-bit messages."""
    bits = value.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
    gl.store(pointer, bits | (flag.to(gl.int64) << 32), mask=mask)


@gluon.jit
def send_bf16(pointer, value, flag, mask):
    """Store values as bf16, with the lower 16 bits of ``flag``, as 32-bit messages."""
    bits = value.to(gl.bfloat16).to(gl.uint16, bitcast=True).to(gl.int32)
    gl.store(pointer, bits | (flag << 16), mask=mask)


@gluon.constexpr_function
def poll_bf16_asm(count, vector, system):
    """Return PTX that polls ``count`` 32-bit messages per thread until all flags match.

    Each load reads ``vector`` consecutive messages with the mask of the first one. ``system``:
    whether other GPUs may write the messages.

    Operands: the outputs $0 … are the messages. The inputs are, for each message, one address, then
    one flag shifted left by 16 bits, then one mask.
    """
    scope = "sys" if system else "gpu"
    firsts = range(0, count, vector)
    lines = [f"mov.b32 ${n}, 0;" for n in range(count)]
    lines += [f"setp.ne.b32 wanted{first}, ${3 * count + first}, 0;" for first in firsts]
    lines.append("AGAIN:")
    suffix = {4: ".v4", 2: ".v2", 1: ""}[vector]
    for first in firsts:
        words = ", ".join(f"${first + n}" for n in range(vector))
        words = f"{{{words}}}" if vector > 1 else words
        load = f"ld.relaxed.{scope}.global{suffix}.b32 {words}, [${count + first}];"
        lines.append(f"@wanted{first} {load}")
    lines.append("mov.b32 other, 0;")
    for first in firsts:
        for n in range(first, first + vector):
            lines.append(f"@wanted{first} xor.b32 one, ${n}, ${2 * count};")
            lines.append(f"@wanted{first} or.b32 other, other, one;")
    lines += ["setp.ge.u32 late, other, 65536;", "@late bra AGAIN;"]
    wanted = ", ".join(f"wanted{first}" for first in firsts)
    return f"{{ .reg .pred late, {wanted}; .reg .b32 one, other;\n" + "\n".join(lines) + "\n}"


@gluon.jit
def receive_bf16(
    pointer, flag, mask, COUNT: gl.constexpr, VECTOR: gl.constexpr, SYSTEM: gl.constexpr = False
):
    """Poll bf16 messages until their flags match; return their values, 0 where ``mask`` is 0.

    Args:
        pointer: pointers to the messages, int32.
        flag: whole flag of the stage; its lower 16 bits are compared.
        COUNT: messages per thread and polling loop.
        VECTOR: messages per load.
        SYSTEM: whether other GPUs may write them.
    """
    words = gl.inline_asm_elementwise(
        poll_bf16_asm(COUNT, VECTOR, SYSTEM), asm_constraints(COUNT),
        [pointer, flag << 16, mask.to(gl.int32)], gl.int32, False, COUNT,
    )  # fmt: skip
    return words.to(gl.uint16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def receive_fp32(pointer, flag, mask, COUNT: gl.constexpr, SYSTEM: gl.constexpr = False):
    """Poll fp32 messages until their flags match; return their values, 0 where ``mask`` is 0.

    Args:
        pointer: pointers to the messages, int64.
        COUNT: messages per thread and polling loop.
        SYSTEM: whether other GPUs may write them.
    """
    words = gl.inline_asm_elementwise(
        poll_words_asm(COUNT, SYSTEM), asm_constraints(COUNT),
        [pointer, flag, mask.to(gl.int32)], gl.int32, False, COUNT,
    )  # fmt: skip
    return words.to(gl.float32, bitcast=True)


@gluon.jit
def send_gathered(ranks, offset, value, flag, mask, SHAPE: gl.constexpr):
    """Send values as bf16 to all ranks.

    Args:
        offset: offsets of the messages in `arguments.Messages.activations`.
    """
    for rank in gl.static_range(SHAPE.RANKS):
        there = gl.load(ranks.activation_addresses + rank).to(gl.pointer_type(gl.int32))
        send_bf16(there + offset, value, flag, mask)


@gluon.jit
def send_partial(ranks, group, source, sequence, row, value, flag, mask, SHAPE: gl.constexpr):
    """Send fp32 values to all ranks, as addends of a sum.

    Args:
        group: first index of `arguments.Ranks.partials`.
        source: second index: the number of this rank, or 0 if only one rank sends.
    """
    place = ((group * SHAPE.RANKS + source) * SHAPE.B + sequence) * SHAPE.SUMS + row
    for rank in gl.static_range(SHAPE.RANKS):
        there = gl.load(ranks.partial_addresses + rank).to(gl.pointer_type(gl.int64))
        send_fp32(there + place, value, flag, mask)


@gluon.jit
def send_residual(messages, ranks, sequence, target, row, value, flag, mask, SHAPE: gl.constexpr):
    """Send rows of the residual stream to the programs that read it next.

    Args:
        target: see `schedule.Pass`.
        row: number of the row among those that this rank computes.
    """
    place = sequence * messages.stride + row
    if SHAPE.HEIGHT > 0:
        if target >= 0:
            send_gathered(ranks, place + target, value, flag, mask, SHAPE)
        else:
            send_bf16(messages.activations + (place - 1 - target), value, flag, mask)
    else:
        send_bf16(messages.activations + place, value, flag, mask)


@gluon.jit
def send_to_owner(ranks, group, sequence, row, value, flag, mask, SHAPE: gl.constexpr):
    """Send fp32 values as addends of a sum, each to the rank that computes the row.

    Args:
        group: first index of `arguments.Ranks.partials`.
    """
    place = ((group * SHAPE.RANKS + ranks.rank) * SHAPE.B + sequence) * SHAPE.SUMS
    owner = gl.load(ranks.partial_addresses + row // SHAPE.HEIGHT, mask=mask, other=0)
    there = owner.to(gl.pointer_type(gl.int64))
    send_fp32(there + (place + row % SHAPE.HEIGHT), value, flag, mask)


@gluon.jit
def send_squares(
    messages, ranks, pid, sequence, value, flag, mask, EMBEDS: gl.constexpr, SHAPE: gl.constexpr
):
    """Send a program's part of the sum of squares, fp32, to all programs that need it.

    Args:
        EMBEDS: whether this is stage 0.
    """
    if SHAPE.HEIGHT > 0:
        half: gl.constexpr = SHAPE.RANKS if EMBEDS else 0
        place = ((half + ranks.rank) * THREADS + pid) * N + sequence
        for rank in gl.static_range(SHAPE.RANKS):
            there = gl.load(ranks.square_addresses + rank).to(gl.pointer_type(gl.int64))
            send_fp32(there + place, value, flag, mask)
    else:
        send_fp32(messages.squares + pid * N + sequence, value, flag, mask)


@gluon.jit
def sum_partials(ranks, group, sequence, row, flag, mask, COUNT: gl.constexpr, SHAPE: gl.constexpr):
    """Receive the addends of all ranks; return their sums, fp32 with the shape of ``row``."""
    place = (group * SHAPE.RANKS * SHAPE.B + sequence) * SHAPE.SUMS + row
    total = receive_fp32(ranks.partials + place, flag, mask, COUNT, True)
    for rank in gl.static_range(1, SHAPE.RANKS):
        more = ranks.partials + (place + rank * SHAPE.B * SHAPE.SUMS)
        total += receive_fp32(more, flag, mask, COUNT, True)
    return total


@gluon.jit
def input_index(n: gl.constexpr, dim: gl.constexpr):
    """Return a 4-D tensor of layout INPUT: 0 … n - 1 along ``dim``; other sizes are 1."""
    first: gl.constexpr = 0 if dim > 0 else 1
    second: gl.constexpr = 1 if dim > 1 else 2
    third: gl.constexpr = 2 if dim > 2 else 3
    layout: gl.constexpr = gl.SliceLayout(
        first, gl.SliceLayout(second, gl.SliceLayout(third, INPUT))
    )
    one = gl.expand_dims(gl.arange(0, n, layout), first)
    return gl.expand_dims(gl.expand_dims(one, second), third)


@gluon.jit
def receive_input(messages, source, width, flag, SHAPE: gl.constexpr, MAX_COLUMNS: gl.constexpr):
    """Receive up to MAX_COLUMNS columns of a matmul's input.

    Args:
        source: offset of the input in a sequence's activations.
        width: number of columns.

    Returns:
        bf16 `[tile, warp, N, 128]`; sequences are repeated to fill N.
    """
    TILES: gl.constexpr = MAX_COLUMNS // COLUMNS
    BL: gl.constexpr = SHAPE.BL
    column = input_index(TILES, 0) * COLUMNS + input_index(WARPS, 1) * MAX_DIM
    column = column + input_index(MAX_DIM, 3) + opaque_zero()
    sequence = input_index(BL, 2)
    pointer = messages.activations + sequence * messages.stride + source + column
    count: gl.constexpr = min(4 * TILES * BL, MAX_MESSAGES)
    mask = (column < width) & (sequence < SHAPE.B)
    found = receive_bf16(pointer, flag, mask, count, 4, SHAPE.RANKS > 1)
    found = found.reshape([TILES, WARPS, 1, BL, MAX_DIM])
    layout: gl.constexpr = found.type.layout
    wide = found + gl.zeros([TILES, WARPS, N // BL, BL, MAX_DIM], gl.bfloat16, layout)
    return wide.reshape([TILES, WARPS, N, MAX_DIM])


@gluon.jit
def mma_operand(tile):
    """Convert one tile of an input, `[warp, N, 128]`, to a right MMA operand `[PARTS, 64, N]`."""
    parts = tile.reshape([WARPS, N, 2, 64]).permute([2, 0, 3, 1])
    return gl.convert_layout(parts.reshape([PARTS, 64, N]), RHS)


@gluon.jit
def mma_operands(found):
    """Split an input of REGISTER_COLUMNS columns into four right MMA operands."""
    early, late = gl.split(found.reshape([2, 2, WARPS, N, MAX_DIM]).permute([1, 2, 3, 4, 0]))
    x0, x1 = gl.split(early.permute([1, 2, 3, 0]))
    x2, x3 = gl.split(late.permute([1, 2, 3, 0]))
    return mma_operand(x0), mma_operand(x1), mma_operand(x2), mma_operand(x3)


@gluon.jit
def keep_input(kept, found):
    """Store an input of SHARED_COLUMNS columns in shared memory ``kept``, for all warps.

    Args:
        found: result of `receive_input`.
    """
    barrier()
    kept.store(found.reshape([SHARED_COLUMNS // MAX_DIM, N, MAX_DIM]))
    barrier()


@gluon.jit
def inverse_rms(messages, base, after, programs, eps, SHAPE: gl.constexpr):
    """Return 1 / rms of the residual stream `[N]`, from the sums of squares of all programs.

    Sequences are repeated to fill N.

    Args:
        base: flag of stage 0.
        after: stage that sent the residual stream.
    """
    flag = base + after
    BL: gl.constexpr = SHAPE.BL
    HIDDEN: gl.constexpr = SHAPE.HIDDEN
    layout: gl.constexpr = gl.BlockedLayout([1, BL], [32, 1], [WARPS, 1], [1, 0])
    p = gl.expand_dims(gl.arange(0, THREADS, gl.SliceLayout(1, layout)), 1) + opaque_zero()
    b = gl.expand_dims(gl.arange(0, BL, gl.SliceLayout(0, layout)), 0)
    if SHAPE.HEIGHT > 0:
        found = gl.zeros([THREADS, BL], gl.float32, layout)
        for rank in gl.static_range(SHAPE.RANKS):
            own = max(0, min(SHAPE.HEIGHT, HIDDEN - rank * SHAPE.HEIGHT))
            rows = own * (p + 1) // programs - own * p // programs
            mask = (p < programs) & (rows > 0) & (b < SHAPE.B)
            half = gl.where(after == 0, SHAPE.RANKS, 0)
            place = messages.squares + ((half + rank) * THREADS + p) * N + b
            found += receive_fp32(place, flag, mask, BL, True)
    else:
        rows = HIDDEN * (p + 1) // programs - HIDDEN * p // programs
        mask = (p < programs) & (rows > 0) & (b < SHAPE.B)
        found = receive_fp32(messages.squares + p * N + b, flag, mask, BL)  # [THREADS, BL]
    root = gl.expand_dims(gl.rsqrt(gl.sum(found, axis=0) / HIDDEN + eps), 0)
    every = root + gl.zeros([N // BL, BL], gl.float32, layout)
    return gl.convert_layout(every.reshape([N]), gl.SliceLayout(0, output_layout(ROWS)))
