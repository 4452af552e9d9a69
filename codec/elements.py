"""Element types: the bit fields of each dtype that the codec stores."""

from dataclasses import dataclass

import torch
from torch import Tensor

from codec.errors import UnsupportedDtype


@dataclass(frozen=True)
class ElementType:
    """Bit fields and storage of one dtype.

    A floating-point element is a sign, an exponent and a mantissa, from the highest bit down. The
    exponent gets a code; sign and mantissa, the *remainder*, are stored unchanged. An integer
    element has no exponent and is only stored raw. Integers of more than two bytes are stored as
    several 16-bit units, and a segment treats each unit as an element.

    Attributes:
        name: name of the type in codebook artifacts.
        number: number that identifies the type in segment headers.
        dtype: torch dtype.
        size: bytes of one stored unit, 1 or 2.
        exponent_bits: bits of the exponent; 0 for integers.
        mantissa_bits: bits of the mantissa; 0 for integers.
        remainder_widths: bits per element in each stream of the remainder (sign above mantissa),
            starting with the lowest bits.
        units: number of stored units per element.
    """

    name: str
    number: int
    dtype: torch.dtype
    size: int
    exponent_bits: int = 0
    mantissa_bits: int = 0
    remainder_widths: tuple[int, ...] = ()
    units: int = 1

    @property
    def exponents(self) -> int:
        """Number of possible values of the exponent."""
        return 1 << self.exponent_bits

    @property
    def words(self) -> int:
        """Number of 32-bit words that hold 32 stored units."""
        return 8 * self.size

    @property
    def remainder_words(self) -> int:
        """Number of 32-bit words that hold the remainders of 32 elements."""
        return sum(self.remainder_widths)


BF16 = ElementType("bf16", 1, torch.bfloat16, 2, 8, 7, (8,))
FP16 = ElementType("fp16", 2, torch.float16, 2, 5, 10, (8, 3))
E5M2 = ElementType("e5m2", 3, torch.float8_e5m2, 1, 5, 2, (3,))
E4M3 = ElementType("e4m3", 4, torch.float8_e4m3fn, 1, 4, 3, (4,))
UINT8 = ElementType("uint8", 16, torch.uint8, 1)
INT8 = ElementType("int8", 17, torch.int8, 1)
INT16 = ElementType("int16", 18, torch.int16, 2)
INT32 = ElementType("int32", 19, torch.int32, 2, units=2)
INT64 = ElementType("int64", 20, torch.int64, 2, units=4)

FLOAT_TYPES = (BF16, FP16, E5M2, E4M3)
INTEGER_TYPES = (UINT8, INT8, INT16, INT32, INT64)
ELEMENT_TYPES = FLOAT_TYPES + INTEGER_TYPES
BY_NUMBER = {element.number: element for element in ELEMENT_TYPES}
BY_NAME = {element.name: element for element in ELEMENT_TYPES}
_BY_DTYPE = {element.dtype: element for element in ELEMENT_TYPES}


def element_of(dtype: torch.dtype) -> ElementType:
    """Return the element type of a torch dtype.

    Raises:
        UnsupportedDtype: the codec does not store this dtype.
    """
    try:
        return _BY_DTYPE[dtype]
    except KeyError:
        names = ", ".join(element.name for element in ELEMENT_TYPES)
        raise UnsupportedDtype(f"the codec supports {names}, not {dtype}") from None


def unit_view(plane: Tensor) -> Tensor:
    """View a plane `[page, kv_head, slot, dim]` as integers `[page, kv_head, slot, dim * units]`.

    The result is int16 for units of two bytes and uint8 for units of one. The slots of a head must
    be contiguous.
    """
    element = element_of(plane.dtype)
    if element.units > 1:
        # A dimension of size 1 may have any stride, but `view` requires a last stride of 1.
        plane = plane.as_strided(plane.shape, (*plane.stride()[:3], 1))
    return plane.view(torch.int16 if element.size == 2 else torch.uint8)
