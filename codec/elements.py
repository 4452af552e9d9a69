"""What an element is made of: an exponent, which gets a code, and a rest, which stays as it is."""

from dataclasses import dataclass

import torch

from codec.errors import UnsupportedDtype


@dataclass(frozen=True)
class ElementType:
    """An element's bits, from the highest: sign, exponent, mantissa.

    Attributes:
        name: in artifacts.
        number: in headers.
        dtype: torch's.
        size: in bytes.
        exponent_bits, mantissa_bits: how many there are of each.
        rest_widths: the streams that hold the rest, sign above mantissa, from its lowest bits up.
    """

    name: str
    number: int
    dtype: torch.dtype
    size: int
    exponent_bits: int
    mantissa_bits: int
    rest_widths: tuple[int, ...]

    @property
    def exponents(self) -> int:
        """How many exponents there are."""
        return 1 << self.exponent_bits

    @property
    def words(self) -> int:
        """32-bit words of 32 elements."""
        return 8 * self.size

    @property
    def rest_words(self) -> int:
        """32-bit words of the rests of 32 elements."""
        return sum(self.rest_widths)


BF16 = ElementType("bf16", 1, torch.bfloat16, 2, 8, 7, (8,))
FP16 = ElementType("fp16", 2, torch.float16, 2, 5, 10, (8, 3))
E5M2 = ElementType("e5m2", 3, torch.float8_e5m2, 1, 5, 2, (3,))
E4M3 = ElementType("e4m3", 4, torch.float8_e4m3fn, 1, 4, 3, (4,))

ELEMENT_TYPES = (BF16, FP16, E5M2, E4M3)
BY_NUMBER = {element.number: element for element in ELEMENT_TYPES}
BY_NAME = {element.name: element for element in ELEMENT_TYPES}
_BY_DTYPE = {element.dtype: element for element in ELEMENT_TYPES}


def element_of(dtype: torch.dtype) -> ElementType:
    """The element type of a torch dtype. Raises `UnsupportedDtype`."""
    try:
        return _BY_DTYPE[dtype]
    except KeyError:
        names = ", ".join(element.name for element in ELEMENT_TYPES)
        raise UnsupportedDtype(f"the codec carries {names}, not {dtype}") from None
