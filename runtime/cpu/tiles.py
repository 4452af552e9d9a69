# mypy: allow-untyped-decorators
"""Register-tiled GEMM micro-kernels, generated as LLVM vector code for numba functions.

Each output element is accumulated separately, in ascending order of the inner dimension k, with
fused multiply-adds. The vector width and the tile shape, which are chosen for the host processor,
therefore do not change any bit of a result.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from runtime.cpu.jit import Bytes, Floats, Halves, as_float, compiled

LANES = 64
"""Columns of an accumulator tile."""
NARROW = 16
"""Columns of the tiles of `accumulate_narrow`."""
GROUP = 32
"""Number of consecutive rows of 8-bit codes that share a scale and an offset in each column."""
Right = Floats | Halves | tuple[Bytes, Floats, Floats]
"""Right-hand operand of `accumulate`: fp32, bf16 bit patterns, or (codes, scales, offsets)."""

_FEATURES = cpu_target.target_context.codegen().magic_tuple()[2]
_WIDTH, _VECTORS = (16, 4) if "+avx512f" in _FEATURES else (8, 2)
"""Number of floats in a vector, and maximum number of vectors in a row of a tile."""
_TALL = 4
"""Maximum number of rows of a tile with `_VECTORS` vectors per row. Tiles of 5 to 8 rows have
half as many vectors per row. Both kinds of tiles fill the vector registers."""

_FLOATS = ir.VectorType(ir.FloatType(), _WIDTH)
_WORDS = ir.VectorType(ir.IntType(32), _WIDTH)
_PATTERNS = ir.VectorType(ir.IntType(16), _WIDTH)
_BYTES = ir.VectorType(ir.IntType(8), _WIDTH)
_PREFETCH_ROWS = 128
"""Distance of software prefetch, in rows of weights. The hardware prefetcher alone is too slow:
multiplying eight input rows by SmolLM2's weights, stored as codes, takes 13 ms with software
prefetch and 18 ms without.
"""
_u = np.uint32


class _Writer:
    """Emitter of vector instructions into the function that numba is compiling.

    Args:
        signature, arguments: signature and argument values of the intrinsic. Arrays may have any
            strides. Each element of a tuple counts as a separate argument.
    """

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self._builder = builder
        self._arrays: list[Any] = []
        for kind, value in zip(signature.args, arguments, strict=True):
            tuples = isinstance(kind, types.BaseTuple)
            parts = cgutils.unpack_tuple(builder, value) if tuples else [value]
            for part, item in zip(kind if tuples else [kind], parts, strict=True):
                array = isinstance(part, types.Array)
                view = context.make_array(part)(context, builder, item) if array else None
                self._arrays.append(view)
        name, kind = f"llvm.fma.v{_WIDTH}f32", ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        self._fma = cgutils.get_or_insert_function(builder.module, kind, name)

    def extent(self, array: int, axis: int) -> Any:
        return self._builder.extract_value(self._arrays[array].shape, axis)

    def address(self, array: int, *indices: Any) -> Any:
        """Return the address of one element of argument number ``array``."""
        view = self._arrays[array]
        at = self._builder.ptrtoint(view.data, ir.IntType(64))
        for axis, index in enumerate(indices):
            stride = self._builder.extract_value(view.strides, axis)
            at = self._builder.add(at, self._builder.mul(_constant(index), stride))
        return self._builder.inttoptr(at, view.data.type)

    def group_of(self, row: Any) -> Any:
        return self._builder.udiv(row, _constant(GROUP))

    def load(self, address: Any, kind: ir.VectorType = _FLOATS) -> Any:
        return self._builder.load(self._builder.bitcast(address, kind.as_pointer()), align=1)

    def store(self, vector: Any, address: Any) -> None:
        self._builder.store(vector, self._builder.bitcast(address, _FLOATS.as_pointer()), align=1)

    def broadcast(self, address: Any) -> Any:
        """Load one float into all lanes of a vector."""
        empty = ir.Constant(_FLOATS, ir.Undefined)
        first = self._builder.insert_element(
            empty, self._builder.load(address), ir.Constant(ir.IntType(32), 0)
        )
        return self._builder.shuffle_vector(first, empty, ir.Constant(_WORDS, [0] * _WIDTH))

    def to_floats(self, codes: Any) -> Any:
        return self._builder.uitofp(self._builder.zext(codes, _WORDS), _FLOATS)

    def widen(self, patterns: Any) -> Any:
        """Convert bf16 patterns to floats."""
        high = ir.Constant(_WORDS, [16] * _WIDTH)
        bits = self._builder.shl(self._builder.zext(patterns, _WORDS), high)
        return self._builder.bitcast(bits, _FLOATS)

    def blend(self, first: Any, second: Any, lanes: list[int]) -> Any:
        """Select lanes by their indices in the concatenation of two vectors."""
        return self._builder.shuffle_vector(first, second, ir.Constant(_WORDS, lanes))

    def prefetch(self, address: Any, distance: Any) -> None:
        """Prefetch the cache line ``distance`` bytes after an address."""
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        hint = cgutils.get_or_insert_function(self._builder.module, kind, "llvm.prefetch.p0i8")
        target = self._builder.gep(self._builder.bitcast(address, byte), [_constant(distance)])
        self._builder.call(hint, [target, word(0), word(3), word(1)])

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self._builder.call(self._fma, [a, b, c])


def _constant(index: Any) -> Any:
    return ir.Constant(ir.IntType(64), index) if isinstance(index, int) else index


def _tile(rows: int, columns: int = LANES) -> Any:
    """Return an intrinsic that computes `accumulate` for ``rows`` consecutive rows of ``c``.

    Its last argument is the index of the first of these rows. Accumulators are kept in registers.

    Args:
        columns: number of columns of ``c`` and ``b``.
    """
    vectors = min(_VECTORS if rows <= _TALL else _VECTORS // 2, columns // _WIDTH)

    def typed(
        _typing: Any, c: Any, a: Any, _column: Any, b: Any, _row: Any, _steps: Any, _first: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            write = _Writer(context, builder, signature, arguments)
            _, _, column, _, row, steps, first = arguments
            numbers = [builder.add(first, _constant(number)) for number in range(rows)]
            for strip in range(0, columns, _WIDTH * vectors):
                lanes = [strip + vector * _WIDTH for vector in range(vectors)]
                targets = [[write.address(0, number, lane) for lane in lanes] for number in numbers]
                accs = [
                    [cgutils.alloca_once_value(builder, write.load(target)) for target in line]
                    for line in targets
                ]
                read = _reader(write, b, row, lanes)
                with cgutils.for_range(builder, steps) as step:
                    right = read(builder.add(row, step.index))
                    at = builder.add(column, step.index)
                    for number, row_accs in zip(numbers, accs, strict=True):
                        left = write.broadcast(write.address(1, number, at))
                        for vector, acc in zip(right, row_accs, strict=True):
                            builder.store(write.fma(left, vector, builder.load(acc)), acc)
                for line, row_accs in zip(targets, accs, strict=True):
                    for target, acc in zip(line, row_accs, strict=True):
                        write.store(builder.load(acc), target)
            return context.get_dummy_value()

        index = types.intp
        return types.void(c, a, index, b, index, index, index), generate

    return intrinsic(typed)


def _reader(write: _Writer, b: Any, row: Any, lanes: list[int]) -> Callable[[Any], list[Any]]:
    """Return a function that loads one row of the right-hand operand as fp32 vectors."""
    if isinstance(b, types.Array):
        if b.dtype == types.uint16:

            def widened(at: Any) -> list[Any]:
                write.prefetch(write.address(3, at, lanes[0]), 2 * LANES * _PREFETCH_ROWS)
                return [
                    write.widen(write.load(write.address(3, at, lane), _PATTERNS)) for lane in lanes
                ]

            return widened
        return lambda at: [write.load(write.address(3, at, lane)) for lane in lanes]
    group = write.group_of(row)
    scales = [write.load(write.address(4, group, lane)) for lane in lanes]
    offsets = [write.load(write.address(5, group, lane)) for lane in lanes]

    def decode(at: Any) -> list[Any]:
        if lanes[0] == 0:
            write.prefetch(write.address(3, at, 0), LANES * _PREFETCH_ROWS)
        codes = [write.to_floats(write.load(write.address(3, at, lane), _BYTES)) for lane in lanes]
        return [write.fma(*terms) for terms in zip(scales, codes, offsets, strict=True)]

    return decode


_one_row, _two_rows, _three_rows, _four_rows = (_tile(rows) for rows in (1, 2, 3, 4))
_narrow_one, _narrow_four = _tile(1, NARROW), _tile(4, NARROW)
_five_rows, _six_rows, _seven_rows, _eight_rows = (_tile(rows) for rows in (5, 6, 7, 8))


@compiled
def accumulate(c: Floats, a: Floats, column: int, b: Right, row: int, steps: int) -> None:
    """Compute ``c += a[:, column : column + steps] @ b[row : row + steps]`` in order of k.

    Args:
        c: fp32 `[m, LANES]`, accumulated in place.
        a: fp32 `[m, k]`, with any strides.
        b: fp32 or bf16 patterns `[n, LANES]`; or u8 codes `[n, LANES]` with fp32 scales and offsets
            `[n / GROUP, LANES]`, where an element is ``scale · code + offset``, rounded once. With
            codes, rows ``row … row + steps - 1`` must be in one group.
    """
    done = 0
    while len(c) - done >= 8:
        _eight_rows(c, a, column, b, row, steps, done)
        done += 8
    left = len(c) - done
    if left == 1:
        _one_row(c, a, column, b, row, steps, done)
    elif left == 2:
        _two_rows(c, a, column, b, row, steps, done)
    elif left == 3:
        _three_rows(c, a, column, b, row, steps, done)
    elif left == 4:
        _four_rows(c, a, column, b, row, steps, done)
    elif left == 5:
        _five_rows(c, a, column, b, row, steps, done)
    elif left == 6:
        _six_rows(c, a, column, b, row, steps, done)
    elif left == 7:
        _seven_rows(c, a, column, b, row, steps, done)


@compiled
def accumulate_cached(c: Floats, a: Floats, column: int, b: Right, row: int, steps: int) -> None:
    """Compute `accumulate`, faster if ``b`` is in the cache, with bitwise identical results.

    Tiles of 4 rows load fewer operands per multiplication than those of 8 rows, but read ``b``
    twice as often. With AVX2, products of attention are 1.5 to 1.8 times as fast.
    """
    whole = len(c) // 4 * 4
    for done in range(0, whole, 4):
        _four_rows(c, a, column, b, row, steps, done)
    if whole < len(c):
        accumulate(c[whole:], a[whole:], column, b, row, steps)


@compiled
def accumulate_narrow(c: Floats, a: Floats, column: int, b: Floats, row: int, steps: int) -> None:
    """Compute `accumulate_cached` for ``c`` `[m, NARROW]` and ``b`` `[n, NARROW]`."""
    whole = len(c) // 4 * 4
    for done in range(0, whole, 4):
        _narrow_four(c, a, column, b, row, steps, done)
    for done in range(whole, len(c)):
        _narrow_one(c, a, column, b, row, steps, done)


@intrinsic
def _square(_typing: Any, patterns: Any, _row: Any, _column: Any, out: Any, _at: Any) -> Any:
    """Transpose one square block; see `transpose`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        write = _Writer(context, builder, signature, arguments)
        rows = [builder.add(arguments[1], _constant(row)) for row in range(_WIDTH)]
        square = [write.load(write.address(0, row, arguments[2]), _PATTERNS) for row in rows]
        square = [write.widen(patterns) for patterns in square]
        distance = 1
        # Each pass swaps the off-diagonal quarters of blocks of `2 * distance` rows and columns.
        while distance < _WIDTH:
            for i in range(_WIDTH):
                if not i & distance:
                    pair = square[i], square[i + distance]
                    square[i] = write.blend(*pair, [_low(lane, distance) for lane in range(_WIDTH)])
                    square[i + distance] = write.blend(
                        *pair, [_low(lane, distance) + distance for lane in range(_WIDTH)]
                    )
            distance *= 2
        for row, vector in enumerate(square):
            target = builder.add(arguments[2], _constant(row))
            write.store(vector, write.address(3, target, arguments[4]))
        return context.get_dummy_value()

    index = types.intp
    return types.void(patterns, index, index, out, index), generate


def _low(lane: int, distance: int) -> int:
    """Return which lane of two concatenated rows moves to ``lane`` of the first row.

    Args:
        distance: distance between the two rows in the block, a power of two.
    """
    return lane + _WIDTH - distance if lane & distance else lane


@compiled
def transpose(patterns: Halves, out: Floats, at: int) -> None:
    """Transpose bf16 patterns into floats: ``out[d, at + j] = patterns[j, d]``.

    Args:
        patterns: u16 `[slot, dim]`.
        out: fp32 `[dim, n]`, written in columns ``at`` to ``at + slot - 1``.
    """
    rows, columns = patterns.shape
    whole_rows, whole_columns = rows // _WIDTH * _WIDTH, columns // _WIDTH * _WIDTH
    for row in range(0, whole_rows, _WIDTH):
        for column in range(0, whole_columns, _WIDTH):
            _square(patterns, row, column, out, at + row)
    for row in range(rows):
        for column in range(whole_columns if row < whole_rows else 0, columns):
            out[column, at + row] = as_float(_u(patterns[row, column]) << _u(16))


@intrinsic
def prefetch(_typing: Any, pages: Any, _page: Any, _head: Any) -> Any:
    """Prefetch all of ``pages[page, head]``, u16 `[slot, dim]`: ``prefetch(pages, page, head)``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        write = _Writer(context, builder, signature, arguments)
        start = write.address(0, *arguments[1:], 0, 0)
        patterns = builder.mul(write.extent(0, 2), write.extent(0, 3))
        with cgutils.for_range(builder, builder.udiv(patterns, _constant(32))) as line:
            write.prefetch(start, builder.mul(line.index, _constant(64)))
        return context.get_dummy_value()

    return types.void(pages, types.intp, types.intp), generate
