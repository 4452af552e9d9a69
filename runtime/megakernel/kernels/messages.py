# mypy: ignore-errors
"""Words, in which programs tell one another numbers: a number and its stage, stored as one.

What a product reads is bf16, in words of 32 bits with the stage's lower half; a word is never older
than some hundred stages. Sums are fp32, in words of 64 bits. A thread that needs words reads them
until each is of its stage, all of them at a time. Stores are plain ones: what is aligned and of
such a size is stored as one, and none was seen to be kept back behind a wait (triton 3.6 and 3.9).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from runtime.kernels.compat import barrier
from runtime.megakernel.kernels.layouts import (
    COLUMNS,
    INPUT,
    MOST_DIM,
    MOST_WORDS,
    PARTS,
    RIGHT,
    ROWS,
    TALLEST,
    THREADS,
    WARPS,
    N,
    finished,
)


@gluon.jit
def anew():
    """0, which the compiler does not know: what is counted from it is not kept in registers, which
    are few, from one pass to the next."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, 0; // $1", "=r,r", [gl.to_tensor(0)], gl.int32, False, 1
    )


@gluon.jit
def send(place, value, epoch, mask):
    """Tell all programs some fp32 numbers of a stage."""
    number = value.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
    gl.store(place, number | (epoch.to(gl.int64) << 32), mask=mask)


@gluon.jit
def send_input(place, value, epoch, mask):
    """Tell them what is a product's input, as bf16."""
    number = value.to(gl.bfloat16).to(gl.uint16, bitcast=True).to(gl.int32)
    gl.store(place, number | (epoch << 16), mask=mask)


@gluon.constexpr_function
def polling(count, at_once):
    """Reads ``count`` words of 32 bits, ``at_once`` by ``at_once``, until all are of a stage: in
    assembly of which $0 … are the words, then come places, stages shifted by 16, and which are
    wanted: all of those read at once, or none."""
    vectors = range(0, count, at_once)
    lines = [f"mov.b32 ${n}, 0;" for n in range(count)]
    lines += [f"setp.ne.b32 wanted{first}, ${3 * count + first}, 0;" for first in vectors]
    lines.append("AGAIN:")
    kind = {4: ".v4", 2: ".v2", 1: ""}[at_once]
    for first in vectors:
        words = ", ".join(f"${first + n}" for n in range(at_once))
        words = f"{{{words}}}" if at_once > 1 else words
        load = f"ld.relaxed.gpu.global{kind}.b32 {words}, [${count + first}];"
        lines.append(f"@wanted{first} {load}")
    lines.append("mov.b32 other, 0;")
    for first in vectors:
        for n in range(first, first + at_once):
            lines.append(f"@wanted{first} xor.b32 one, ${n}, ${2 * count};")
            lines.append(f"@wanted{first} or.b32 other, other, one;")
    lines += ["setp.ge.u32 late, other, 65536;", "@late bra AGAIN;"]
    wanted = ", ".join(f"wanted{first}" for first in vectors)
    return f"{{ .reg .pred late, {wanted}; .reg .b32 one, other;\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def polling_sums(count):
    """The same of words of 64 bits: their lower halves are the outputs."""
    lines = []
    for n in range(count):
        lines += [f"mov.b32 ${n}, 0;", f"setp.ne.b32 wanted{n}, ${3 * count + n}, 0;"]
    lines.append("AGAIN:")
    for n in range(count):
        lines.append(f"mov.b64 word{n}, {{${n}, ${2 * count}}};")
        lines.append(f"@wanted{n} ld.relaxed.gpu.global.b64 word{n}, [${count + n}];")
    lines.append("mov.b32 other, 0;")
    for n in range(count):
        lines.append(f"mov.b64 {{${n}, one}}, word{n};")
        lines += [f"xor.b32 one, one, ${2 * count};", "or.b32 other, other, one;"]
    lines += ["setp.ne.b32 late, other, 0;", "@late bra AGAIN;"]
    wanted = ", ".join(f"wanted{n}" for n in range(count))
    words = ", ".join(f"word{n}" for n in range(count))
    head = f"{{ .reg .pred late, {wanted}; .reg .b32 one, other; .reg .b64 {words};\n"
    return head + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def operand_kinds(count):
    return ",".join(["=&r"] * count + ["l"] * count + ["r"] * (2 * count))


@gluon.jit
def receive_input(place, epoch, mask, COUNT: gl.constexpr, AT_ONCE: gl.constexpr):
    """bf16, of COUNT words that a thread has, as soon as all of them are there; else 0."""
    words = gl.inline_asm_elementwise(
        polling(COUNT, AT_ONCE), operand_kinds(COUNT),
        [place, epoch << 16, mask.to(gl.int32)], gl.int32, False, COUNT,
    )  # fmt: skip
    return words.to(gl.uint16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def receive(place, epoch, mask, COUNT: gl.constexpr):
    """fp32, likewise."""
    words = gl.inline_asm_elementwise(
        polling_sums(COUNT), operand_kinds(COUNT),
        [place, epoch, mask.to(gl.int32)], gl.int32, False, COUNT,
    )  # fmt: skip
    return words.to(gl.float32, bitcast=True)


@gluon.jit
def line(n: gl.constexpr, dim: gl.constexpr):
    """0 … n - 1 along one dimension of an input's words."""
    first: gl.constexpr = 0 if dim > 0 else 1
    second: gl.constexpr = 1 if dim > 1 else 2
    third: gl.constexpr = 2 if dim > 2 else 3
    layout: gl.constexpr = gl.SliceLayout(
        first, gl.SliceLayout(second, gl.SliceLayout(third, INPUT))
    )
    one = gl.expand_dims(gl.arange(0, n, layout), first)
    return gl.expand_dims(gl.expand_dims(one, second), third)


@gluon.jit
def input_of(
    words, word_stride, source, width, epoch, B: gl.constexpr, BL: gl.constexpr, MOST: gl.constexpr
):
    """The first MOST columns of an input, bf16 `[tile, warp, N, 128]`, sequences again and again
    until there are N."""
    TILES: gl.constexpr = MOST // COLUMNS
    column = line(TILES, 0) * COLUMNS + line(WARPS, 1) * MOST_DIM + line(MOST_DIM, 3) + anew()
    place = words + line(BL, 2) * word_stride + source + column
    at_once: gl.constexpr = min(4 * TILES * BL, MOST_WORDS)
    found = receive_input(place, epoch, (column < width) & (line(BL, 2) < B), at_once, 4)
    found = found.reshape([TILES, WARPS, 1, BL, MOST_DIM])
    layout: gl.constexpr = found.type.layout
    wide = found + gl.zeros([TILES, WARPS, N // BL, BL, MOST_DIM], gl.bfloat16, layout)
    return wide.reshape([TILES, WARPS, N, MOST_DIM])


@gluon.jit
def operand(tile):
    """A tile of an input `[warp, N, 128]` as tensor cores take it."""
    parts = tile.reshape([WARPS, N, 2, 64]).permute([2, 0, 3, 1])
    return gl.convert_layout(parts.reshape([PARTS, 64, N]), RIGHT)


@gluon.jit
def operands(found):
    """An input of BLOCK columns in four tiles."""
    early, late = gl.split(found.reshape([2, 2, WARPS, N, MOST_DIM]).permute([1, 2, 3, 4, 0]))
    x0, x1 = gl.split(early.permute([1, 2, 3, 0]))
    x2, x3 = gl.split(late.permute([1, 2, 3, 0]))
    return operand(x0), operand(x1), operand(x2), operand(x3)


@gluon.jit
def keep(kept, found):
    """An input of TALLEST columns into shared memory."""
    barrier()
    kept.store(found.reshape([TALLEST // MOST_DIM, N, MOST_DIM]))
    barrier()


@gluon.jit
def root_scale(
    squares, epoch, programs, eps, B: gl.constexpr, BL: gl.constexpr, HIDDEN: gl.constexpr
):
    """1 / rms of the residual stream of each sequence, of what every program added up; `[N]`,
    sequences again and again."""
    layout: gl.constexpr = gl.BlockedLayout([1, BL], [32, 1], [WARPS, 1], [1, 0])
    p = gl.expand_dims(gl.arange(0, THREADS, gl.SliceLayout(1, layout)), 1) + anew()
    b = gl.expand_dims(gl.arange(0, BL, gl.SliceLayout(0, layout)), 0)
    rows = HIDDEN * (p + 1) // programs - HIDDEN * p // programs
    found = receive(squares + p * N + b, epoch, (p < programs) & (rows > 0) & (b < B), BL)
    root = gl.expand_dims(gl.rsqrt(gl.sum(found, axis=0) / HIDDEN + eps), 0)
    every = root + gl.zeros([N // BL, BL], gl.float32, layout)
    return gl.convert_layout(every.reshape([N]), gl.SliceLayout(0, finished(ROWS)))
