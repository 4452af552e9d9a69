"""Record types and tuples that describe a segment for the compiled loops."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from codec.checks import Pages
from codec.format import CHUNK, Geometry

Record = Any
"""Row of one of these tables. Compiled code accesses its fields by name."""
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
"""Location of a plane in memory, and of its block in the segment.

    address: address of the first element.
    page_stride, head_stride: strides in bytes.
    codes, low, high: byte offsets of the streams in the segment: codes (or the only stream of a
        raw plane), low and high bits of the remainders. Missing streams start at `end`.
    end: byte offset of the end of the block.
"""

BOOK = np.dtype(
    [
        ("code_bits", np.int64),
        ("count", np.int64),
        ("escape", np.int64),
        ("window", np.int64),
        ("lowest", np.int64),
        ("overflow", np.int64),
        ("num_second", np.int64),
        ("codes", np.uint8, 256),
        ("second_codes", np.uint8, 256),
        ("exponents", np.uint8, 16),
        ("second_exponents", np.uint8, 16),
    ]
)
"""Mode and codebook of a plane; all fields are 0 if the plane is raw.

    code_bits, count: bits of a code, and number of exponents with a code.
    escape: the escape code, or 0 if the mode has none.
    window: whether the exponents are consecutive; `lowest` is the first.
    overflow: `format.overflow_words`.
    num_second: number of second-level codes.
    codes: code of each exponent. For exponents without a code, `fields.NO_CODE` plus the bits that
        are stored in place of a code.
    second_codes: `Codebook.second_table`.
    exponents, second_exponents: exponent of each first- and second-level code.
"""

CHUNKS = np.dtype(
    [("page", np.int64), ("head", np.int64), ("start", np.int64), ("length", np.int64)]
)
"""Location of a chunk: page and head of its run, the index of its first element in the run, and its
length in elements.
"""


class Element(NamedTuple):
    """Element type: unit size in bytes, bits of each field, and bits of each remainder stream."""

    size: int
    mantissa_bits: int
    exponent_bits: int
    low_bits: int
    high_bits: int


class SegmentAddresses(NamedTuple):
    """Addresses of a segment, of its table of entry starts and of its entries."""

    segment: int
    starts: int
    entries: int


def chunk_table(pages: Pages, geometry: Geometry) -> Table:
    """Return a table of `CHUNKS` records, one for each chunk of a plane, in segment order.

    Args:
        pages: int64 `[geometry.num_pages]` page ids, in token order.
        geometry: geometry of the segment.
    """
    runs = [
        (page, 0, start, min(CHUNK, run - start))
        for page, run in zip(pages.tolist(), geometry.head_runs, strict=True)
        for start in range(0, run, CHUNK)
    ]
    one_head = np.array(runs, dtype=CHUNKS)
    table = np.tile(one_head, geometry.kv_heads)
    table["head"] = np.repeat(np.arange(geometry.kv_heads), len(one_head))
    return table
