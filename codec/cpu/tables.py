"""What the CPU backend's loops are told about a segment: the tables that `cpu.py` fills."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Record = Any
"""A row of one of these tables; numba reads its fields by name."""
Table = NDArray[np.void]

PLANE = np.dtype(
    [
        ("address", np.int64),
        ("page_stride", np.int64),
        ("head_stride", np.int64),
        ("codes", np.int64),
        ("low", np.int64),
        ("high", np.int64),
        ("end", np.int64),
    ]
)
"""A plane: address of its first element, strides of pages and heads in bytes; where in the segment
its block has its streams (of codes, or the only one of a raw plane; of the rests' low bits and high
ones: where it ends if there are none) and where it ends."""

BOOK = np.dtype(
    [
        ("code_bits", np.int64),
        ("count", np.int64),
        ("escape", np.int64),
        ("window", np.int64),
        ("lowest", np.int64),
        ("spilled", np.int64),
        ("num_seconds", np.int64),
        ("codes", np.uint8, 256),
        ("second_codes", np.uint8, 256),
        ("exponents", np.uint8, 16),
        ("seconds", np.uint8, 16),
    ]
)
"""How a plane is stored; all zeros if raw.

    code_bits, count: bits of a code and how many exponents have one.
    escape: the escape code, or 0.
    window: whether the exponents are consecutive; `lowest` is the first.
    spilled: `format.spilled_words`.
    codes: the code of each exponent; of those that have none, `fields.NO_CODE` and the code's bits.
    second_codes: `Codebook.second_table`.
    exponents: of each code; `seconds`: of each of the `num_seconds` second-level codes.
"""

CHUNKS = np.dtype(
    [("page", np.int64), ("head", np.int64), ("start", np.int64), ("length", np.int64)]
)
"""A chunk: its run's page and head, its first element in the run, how many it has."""


class Element(NamedTuple):
    """An element type: its size in bytes, its bits, those of the rest in each stream."""

    size: int
    mantissa_bits: int
    exponent_bits: int
    low_bits: int
    high_bits: int


class Places(NamedTuple):
    """Addresses: of a segment, of its table of starts and of its entries."""

    segment: int
    starts: int
    entries: int
