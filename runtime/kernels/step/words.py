# mypy: ignore-errors
"""Words, in which programs tell one another numbers, and inputs of products made of them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from runtime.kernels.step.layouts import (
    BLOCK,
    COLUMNS,
    FLAT,
    INPUT,
    MOST_DIM,
    PARTS,
    RIGHT,
    ROWS,
    TALLEST,
    THREADS,
    finished,
)
from runtime.kernels.step.names import barrier


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
    """Tell them what is a product's input: two bf16 numbers in one word."""
    high = value.to(gl.bfloat16)
    low = (value - high.to(gl.float32)).to(gl.bfloat16).to(gl.uint16, bitcast=True)
    number = (low.to(gl.int64) << 16) | high.to(gl.uint16, bitcast=True).to(gl.int64)
    gl.store(place, number | (epoch.to(gl.int64) << 32), mask=mask)


@gluon.jit
def read_words(place, mask):
    return gl.inline_asm_elementwise(
        """{
            .reg .pred wanted;
            setp.ne.b32 wanted, $2, 0;
            mov.b64 $0, 0;
            @wanted ld.relaxed.gpu.global.b64 $0, [$1];
        }""",
        "=&l,l,r", [place, mask.to(gl.int32)], gl.int64, False, 1,
    )  # fmt: skip


@gluon.jit
def settle(word, place, epoch, mask):
    """The lower halves of words that were read just now, and are read again until all of them are
    of a stage; 0 where there is none."""
    late = gl.to_tensor(1)
    while late > 0:
        waiting = (((word >> 32).to(gl.int32) != epoch) & mask).to(gl.int32)
        waiting = gl.max(waiting, axis=0)
        for _ in gl.static_range(len(waiting.shape)):
            waiting = gl.max(waiting, axis=len(waiting.shape) - 1)
        late = waiting
        if late > 0:
            word = read_words(place, mask)
    return gl.where(mask, word.to(gl.int32), 0)


@gluon.jit
def receive(place, epoch, mask):
    """Numbers of a stage, as soon as all of them are there; 0 where there is none."""
    return settle(read_words(place, mask), place, epoch, mask).to(gl.float32, bitcast=True)


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
def columns_of(
    words, word_stride, source, width, B: gl.constexpr, BL: gl.constexpr, MOST: gl.constexpr
):
    """Where the first MOST columns of an input are, and which of them there are."""
    column = line(MOST // COLUMNS, 0) * COLUMNS + line(PARTS, 1) * 64 + line(64, 3) + anew()
    place = words + line(BL, 2) * word_stride + source + column
    return place, (column < width) & (line(BL, 2) < B)


@gluon.jit
def ask(words, word_stride, source, width, B: gl.constexpr, BL: gl.constexpr, MOST: gl.constexpr):
    """The first MOST columns of an input, as its words are now."""
    place, mask = columns_of(words, word_stride, source, width, B, BL, MOST)
    return read_words(place, mask)


@gluon.jit
def halves(values, N: gl.constexpr, BL: gl.constexpr):
    """Words `[a, b, BL, c]` of an input as bf16 `[a, b, N, c]`: two of each sequence, again and
    again."""
    a: gl.constexpr = values.shape[0]
    parts: gl.constexpr = values.shape[1]
    c: gl.constexpr = values.shape[3]
    high = values.to(gl.uint16).to(gl.bfloat16, bitcast=True)
    low = (values >> 16).to(gl.uint16).to(gl.bfloat16, bitcast=True)
    both = gl.join(high, low).permute([0, 1, 2, 4, 3]).reshape([a, parts, 1, 2 * BL, c])
    layout: gl.constexpr = both.type.layout
    wide = both + gl.zeros([a, parts, N // (2 * BL), 2 * BL, c], gl.bfloat16, layout)
    return wide.reshape([a, parts, N, c])


@gluon.jit
def operands(
    asked, words, word_stride, source, width, epoch,
    B: gl.constexpr, N: gl.constexpr, BL: gl.constexpr,
):  # fmt: skip
    """The first BLOCK columns of an input, in four tiles as tensor cores take them."""
    place, mask = columns_of(words, word_stride, source, width, B, BL, BLOCK)
    found = halves(settle(asked, place, epoch, mask), N, BL)
    found = found.permute([1, 3, 2, 0]).reshape([PARTS, 64, N, 2, 2])
    early, late = gl.split(found.permute([0, 1, 2, 4, 3]))
    x0, x1 = gl.split(early)
    x2, x3 = gl.split(late)
    return (
        gl.convert_layout(x0, RIGHT), gl.convert_layout(x1, RIGHT), gl.convert_layout(x2, RIGHT),
        gl.convert_layout(x3, RIGHT),
    )  # fmt: skip


@gluon.jit
def keep(
    kept, asked, words, word_stride, source, width, epoch,
    B: gl.constexpr, N: gl.constexpr, BL: gl.constexpr,
):  # fmt: skip
    """All of an input, of at most TALLEST columns, into shared memory."""
    place, mask = columns_of(words, word_stride, source, width, B, BL, TALLEST)
    found = halves(settle(asked, place, epoch, mask), N, BL)
    found = found.reshape([TALLEST // MOST_DIM, 2, N, 64]).permute([0, 2, 1, 3])
    barrier()
    kept.store(found.reshape([TALLEST // MOST_DIM, N, MOST_DIM]))
    barrier()


@gluon.jit
def root_scale(
    squares, epoch, programs, eps, B: gl.constexpr, HIDDEN: gl.constexpr, BP: gl.constexpr
):
    """1 / rms of the residual stream of each sequence, of what every program added up."""
    b = gl.arange(0, BP, gl.SliceLayout(0, finished(ROWS, BP)))
    root = gl.full([BP], 1.0, gl.float32, gl.SliceLayout(0, finished(ROWS, BP)))
    p = gl.arange(0, THREADS, FLAT) + anew()
    rows = HIDDEN * (p + 1) // programs - HIDDEN * p // programs
    for s in gl.static_range(B):
        found = receive(squares + p * BP + s, epoch, (p < programs) & (rows > 0))
        root = gl.where(b == s, gl.rsqrt(gl.sum(found, 0) / HIDDEN + eps), root)
    return root
