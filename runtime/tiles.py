"""Register tiles: the inner steps of products that the compiler does not find by itself.

Every element is summed on its own, in the order of k, by fused multiply-adds. So neither the width
of the vectors nor the shape of a tile changes a bit of a result: both are this machine's choice.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from runtime.compiled import Floats, Halves, as_float, compiled

LANES = 64
"""Columns of what is accumulated or decoded."""

_FEATURES = cpu_target.target_context.codegen().magic_tuple()[2]
_WIDTH, _VECTORS = (16, 4) if "+avx512f" in _FEATURES else (8, 2)
"""Floats of a vector, and vectors of a tile's row: four such rows just fit the registers."""

_FLOATS = ir.VectorType(ir.FloatType(), _WIDTH)
_WORDS = ir.VectorType(ir.IntType(32), _WIDTH)
_PATTERNS = ir.VectorType(ir.IntType(16), _WIDTH)
_BYTES = ir.VectorType(ir.IntType(8), _WIDTH)
_u = np.uint32


class _Writer:
    """Writes vector instructions into the function that numba is compiling.

    Args:
        signature, arguments: of an intrinsic whose arrays may have any strides.
    """

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self._builder = builder
        self._arrays: list[Any] = [
            context.make_array(kind)(context, builder, value) if kind != types.intp else None
            for kind, value in zip(signature.args, arguments, strict=True)
        ]
        name, kind = f"llvm.fma.v{_WIDTH}f32", ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        self._fma = cgutils.get_or_insert_function(builder.module, kind, name)

    def address(self, array: int, *indices: Any) -> Any:
        """Of one element of the array that is the argument of this number."""
        view = self._arrays[array]
        at = self._builder.ptrtoint(view.data, ir.IntType(64))
        for axis, index in enumerate(indices):
            stride = self._builder.extract_value(view.strides, axis)
            at = self._builder.add(at, self._builder.mul(_constant(index), stride))
        return self._builder.inttoptr(at, view.data.type)

    def load(self, address: Any, kind: ir.VectorType = _FLOATS) -> Any:
        return self._builder.load(self._builder.bitcast(address, kind.as_pointer()), align=1)

    def store(self, vector: Any, address: Any) -> None:
        self._builder.store(vector, self._builder.bitcast(address, _FLOATS.as_pointer()), align=1)

    def everywhere(self, address: Any) -> Any:
        """One float in all lanes."""
        empty = ir.Constant(_FLOATS, ir.Undefined)
        first = self._builder.insert_element(
            empty, self._builder.load(address), ir.Constant(ir.IntType(32), 0)
        )
        return self._builder.shuffle_vector(first, empty, ir.Constant(_WORDS, [0] * _WIDTH))

    def to_floats(self, codes: Any) -> Any:
        return self._builder.uitofp(self._builder.zext(codes, _WORDS), _FLOATS)

    def widen(self, patterns: Any) -> Any:
        """Floats of bf16 patterns."""
        high = ir.Constant(_WORDS, [16] * _WIDTH)
        bits = self._builder.shl(self._builder.zext(patterns, _WORDS), high)
        return self._builder.bitcast(bits, _FLOATS)

    def blend(self, first: Any, second: Any, lanes: list[int]) -> Any:
        """Lanes of two vectors, which are numbered one after the other."""
        return self._builder.shuffle_vector(first, second, ir.Constant(_WORDS, lanes))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self._builder.call(self._fma, [a, b, c])


def _constant(index: Any) -> Any:
    return ir.Constant(ir.IntType(64), index) if isinstance(index, int) else index


def _tile(rows: int) -> Any:
    """`accumulate` for ``rows`` rows from ``first`` on, whose sums stay in registers."""

    def typed(_typing: Any, c: Any, a: Any, _at: Any, b: Any, _steps: Any, _first: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            write = _Writer(context, builder, signature, arguments)
            numbers = [builder.add(arguments[5], _constant(row)) for row in range(rows)]
            for strip in range(0, LANES, _WIDTH * _VECTORS):
                lanes = [strip + vector * _WIDTH for vector in range(_VECTORS)]
                targets = [[write.address(0, row, lane) for lane in lanes] for row in numbers]
                sums = [
                    [cgutils.alloca_once_value(builder, write.load(target)) for target in row]
                    for row in targets
                ]
                with cgutils.for_range(builder, arguments[4]) as step:
                    right = [write.load(write.address(3, step.index, lane)) for lane in lanes]
                    at = builder.add(arguments[2], step.index)
                    for row, totals in zip(numbers, sums, strict=True):
                        left = write.everywhere(write.address(1, row, at))
                        for vector, total in zip(right, totals, strict=True):
                            builder.store(write.fma(left, vector, builder.load(total)), total)
                for row, totals in zip(targets, sums, strict=True):
                    for target, total in zip(row, totals, strict=True):
                        write.store(builder.load(total), target)
            return context.get_dummy_value()

        return types.void(c, a, types.intp, b, types.intp, types.intp), generate

    return intrinsic(typed)


_one_row, _two_rows, _three_rows, _four_rows = (_tile(rows) for rows in (1, 2, 3, 4))


@compiled
def accumulate(c: Floats, a: Floats, column: int, b: Floats, steps: int) -> None:
    """``c += a[:, column : column + steps] b[:steps]``, each element in the order of the steps.

    Args:
        c: `[m, LANES]`.
        a: `[m, k]`, of any strides.
        b: `[steps or more, LANES]`.
    """
    rows, row = len(c), 0
    while row + 4 <= rows:
        _four_rows(c, a, column, b, steps, row)
        row += 4
    if rows - row == 3:
        _three_rows(c, a, column, b, steps, row)
    elif rows - row == 2:
        _two_rows(c, a, column, b, steps, row)
    elif rows - row == 1:
        _one_row(c, a, column, b, steps, row)


def _decode_type(
    _typing: Any,
    codes: Any,
    scales: Any,
    offsets: Any,
    _b: Any,
    _k: Any,
    _g: Any,
    out: Any,
    _n: Any,
) -> Any:
    """How `decode` is typed and compiled."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        write = _Writer(context, builder, signature, arguments)
        block, first, group, steps = arguments[3], arguments[4], arguments[5], arguments[7]
        lanes = range(0, LANES, _WIDTH)
        scale = [write.load(write.address(1, block, group, lane)) for lane in lanes]
        offset = [write.load(write.address(2, block, group, lane)) for lane in lanes]
        with cgutils.for_range(builder, steps) as step:
            at = builder.add(first, step.index)
            for lane, s, o in zip(lanes, scale, offset, strict=True):
                code = write.to_floats(write.load(write.address(0, block, at, lane), _BYTES))
                write.store(write.fma(s, code, o), write.address(6, step.index, lane))
        return context.get_dummy_value()

    index = types.intp
    return types.void(codes, scales, offsets, index, index, index, out, index), generate


decode = intrinsic(_decode_type)
"""``decode(codes, scales, offsets, b, k, g, out, n)``: ``n`` columns, from ``k`` on, of block ``b``
as ``scale · code + offset``, rounded once. Codes u8 `[b, in, LANES]`, scales and offsets
`[b, groups, LANES]` at group ``g``, out `[n or more, LANES]`."""


def _square_type(_typing: Any, patterns: Any, _row: Any, _column: Any, out: Any, _at: Any) -> Any:
    """How a square of `transpose` is typed and compiled."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        write = _Writer(context, builder, signature, arguments)
        rows = [builder.add(arguments[1], _constant(row)) for row in range(_WIDTH)]
        square = [write.load(write.address(0, row, arguments[2]), _PATTERNS) for row in rows]
        square = [write.widen(patterns) for patterns in square]
        distance = 1
        while distance < _WIDTH:  # swap the off-diagonal quarters of ever larger blocks
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
    """Which of two rows' lanes, one after the other, comes to ``lane`` of the first."""
    return lane + _WIDTH - distance if lane & distance else lane


_square = intrinsic(_square_type)


@compiled
def transpose(patterns: Halves, out: Floats, at: int) -> None:
    """``out[d, at + j]`` becomes the float of the bf16 pattern ``patterns[j, d]``."""
    rows, columns = patterns.shape
    whole_rows, whole_columns = rows // _WIDTH * _WIDTH, columns // _WIDTH * _WIDTH
    for row in range(0, whole_rows, _WIDTH):
        for column in range(0, whole_columns, _WIDTH):
            _square(patterns, row, column, out, at + row)
    for row in range(rows):
        for column in range(whole_columns if row < whole_rows else 0, columns):
            out[column, at + row] = as_float(_u(patterns[row, column]) << _u(16))
