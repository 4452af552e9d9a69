# mypy: ignore-errors
# ruff: noqa: E741 - `l` as in the literature; what Triton's compiler supports
"""Merges attention results that are held in fragments over warps, and stores splits.

The four warps of a program exchange numbers through shared memory. Gluon has no pointers to shared
memory, so it is allocated and accessed in PTX. See `runtime.kv.kernels.fragments` for the layouts.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from runtime.kv.kernels.fragments import lane_numbers, scaled, sum_of_rows, warp_number

SHARED_BYTES = 24576
"""Shared memory of a program of four warps. All of their fragments of C take 16 KiB."""
_SHARED = gl.constexpr(
    f"{{\n.shared .align 1024 .b8 fragments_memory[{SHARED_BYTES}];\n"
    "mov.u32 $0, fragments_memory;\n}"
)


def _exchange() -> str:
    """Return PTX that gives each of four warps the four numbers per lane of all warps."""
    lines = ["bar.sync 0;"]
    lines += [f"st.shared.f32 [$20+{512 * i}], ${16 + i};" for i in range(4)]
    lines += ["bar.sync 0;"]
    lines += [f"ld.shared.f32 ${n}, [$21+{512 * (n // 4) + 128 * (n % 4)}];" for n in range(16)]
    return "\n".join(lines)


def _sum() -> str:
    """Return PTX that sums 32 numbers per lane over four warps, and gives each warp eight sums."""
    lines = ["{", ".reg .f32 x;", "bar.sync 0;"]
    lines += [f"st.shared.f32 [$40+{512 * i}], ${8 + i};" for i in range(32)]
    lines += ["bar.sync 0;"]
    for n in range(8):
        lines += [f"ld.shared.f32 ${n}, [$41+{512 * n}];"]
        for warp in range(1, 4):
            lines += [f"ld.shared.f32 x, [$41+{512 * n + 128 * warp}];", f"add.f32 ${n}, ${n}, x;"]
    return "\n".join([*lines, "}"])


_EXCHANGE, _SUM = gl.constexpr(_exchange()), gl.constexpr(_sum())
_EXCHANGE_REGISTERS = gl.constexpr("=&f," * 16 + "f,f,f,f,r,r")
_SUM_REGISTERS = gl.constexpr("=&f," * 8 + "f," * 32 + "r,r")
_EXCHANGED, _SUMMED = gl.constexpr((gl.float32,) * 16), gl.constexpr((gl.float32,) * 8)


@gluon.jit
def shared_memory(lane):
    """Return the int32 address of SHARED_BYTES of shared memory, the same in all lanes."""
    return gl.inline_asm_elementwise(_SHARED, "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def exchange_over_warps(m, l, shared, lane, warp):
    """Exchange the state of an online softmax between four warps.

    Args:
        m, l: see `fragments.no_tokens`.
        shared: address of shared memory, see `shared_memory`.

    Returns:
        16 fp32 tensors: ``m[0]`` of each warp, then ``m[1]``, ``l[0]`` and ``l[1]`` of each warp.
    """
    return gl.inline_asm_elementwise(
        _EXCHANGE, _EXCHANGE_REGISTERS,
        [m[0], m[1], l[0], l[1], shared + 4 * (32 * warp + lane), shared + 4 * lane],
        dtype=_EXCHANGED, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def summed_over_warps(acc, shared, lane, warp):
    """Sum eight fragments of C over four warps. Warp w gets the sums of fragments 2 w and 2 w + 1.

    Args:
        acc: eight fragments of C.
        shared: address of shared memory, see `shared_memory`.
    """
    values = ()
    for n in gl.static_range(8):
        values = values + acc[n]
    x = gl.inline_asm_elementwise(
        _SUM, _SUM_REGISTERS,
        values + (shared + 4 * (32 * warp + lane), shared + 4 * lane + 4096 * warp),
        dtype=_SUMMED, is_pure=False, pack=1,
    )  # fmt: skip
    return (x[0], x[1], x[2], x[3]), (x[4], x[5], x[6], x[7])


@gluon.jit
def merged(acc, m, l, shared, WARPS: gl.constexpr):
    """Merge the online softmax of four warps.

    Args:
        acc, m, l: state of each warp, see `fragments.no_tokens`.
        shared: address of shared memory, see `shared_memory`.

    Returns:
        Two fragments of the sum of ``acc`` in each warp, see `summed_over_warps`; and the merged
        ``m`` and ``l``.
    """
    lane, _, _ = lane_numbers(WARPS)
    warp = warp_number(WARPS)
    x = exchange_over_warps(m, l, shared, lane, warp)
    maxima = ()
    sums = ()
    factors = ()
    for i in gl.static_range(2):
        most = gl.maximum(
            gl.maximum(x[4 * i], x[4 * i + 1]), gl.maximum(x[4 * i + 2], x[4 * i + 3])
        )
        total = x[8 + 4 * i] * gl.exp2(x[4 * i] - most)
        for w in gl.static_range(1, WARPS):
            total = total + x[8 + 4 * i + w] * gl.exp2(x[4 * i + w] - most)
        maxima = maxima + (most,)
        sums = sums + (total,)
        factors = factors + (gl.exp2(m[i] - most),)
    return summed_over_warps(scaled(acc, factors), shared, lane, warp), maxima, sums


@gluon.jit
def write_split(
    acc, m, l, split, split_acc, split_m, split_l,
    GROUP: gl.constexpr, DIM: gl.constexpr, WIDTH: gl.constexpr, PARTS: gl.constexpr,
    shared=0, WARPS: gl.constexpr = 1,
):  # fmt: skip
    """Merge the results of all warps and write a split; see `windowed_decode_kernel`.

    Args:
        acc: PARTS x ``DIM / 16 / PARTS`` fragments of C. Fragment n of part i has dimensions
            ``i DIM / PARTS + g DIM / PARTS / 8 + 2 n`` (row g) and the next one (row g + 8).
        shared: see `shared_memory`; used only if there are several warps.
    """
    EACH: gl.constexpr = DIM // PARTS
    if WARPS > 1:
        acc, m, l = merged(acc, m, l, shared, WARPS)
    _, g, t = lane_numbers(WARPS)
    warp = warp_number(WARPS)
    for odd in gl.static_range(2):
        head = 2 * t + odd
        at = split.to(gl.int64) * GROUP + head
        used = head < GROUP
        first = used & (g == 0) & (warp == 0)
        gl.store(split_m + at, m[odd], mask=first)
        gl.store(split_l + at, sum_of_rows(l[odd]), mask=first)
        for k in gl.static_range(len(acc)):
            number = warp * len(acc) + k
            i, n = number // (EACH // 16), number % (EACH // 16)
            to = split_acc + at * WIDTH + i * EACH + g * (EACH // 8) + 2 * n
            gl.store(to, acc[k][odd], mask=used)
            gl.store(to + 1, acc[k][2 + odd], mask=used)
