"""Units to which packed weights are aligned and in which kernels count offsets.

A kernel receives an offset in one of these units and multiplies it. The compiler then knows that
the product is a multiple of the unit, and emits vector loads.
"""

VECTOR_ELEMENTS = 8
"""bf16 elements of a 16-byte load: the unit of row widths, row strides and input columns."""
LINE_ELEMENTS = 64
"""bf16 elements of a 128-byte line: the unit of tensor offsets; packed rows begin on a line."""
LINE_BYTES = 128


def round_up(number: int, multiple: int = VECTOR_ELEMENTS) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``number``."""
    return -(-number // multiple) * multiple
