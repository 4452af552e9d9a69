"""Calibration: select the mode and codebook of a plane from a sample (SplitZip, calibration)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from codec.codebook import SECOND_CODES, Codebook
from codec.elements import ElementType, element_of
from codec.errors import InvalidCodebook, UnsupportedDtype
from codec.format import Mode

_ENTRY_BITS, _NIBBLE_BITS = 32, 4
_MIN_TABLE_GAIN = 1.005
"""Calibration gives the codes to the most frequent exponents only if the best window of consecutive
exponents needs more bits by at least this factor. A window needs no lookup table, so encoding and
decoding are two to three times as fast.
"""


@dataclass(frozen=True)
class Histogram:
    """Frequency of each exponent in a sample.

    Attributes:
        element: element type of the sample.
        counts: number of occurrences of each exponent.
    """

    element: ElementType
    counts: tuple[int, ...]

    @classmethod
    def of(cls, sample: Tensor | Sequence[Tensor], dtype: torch.dtype) -> "Histogram":
        """Count the exponents of a sample, rounded to `dtype`.

        Args:
            sample: floating-point values of any shape, or several such tensors, on any device.
            dtype: dtype to round to.

        Raises:
            InvalidCodebook: the sample is empty.
            UnsupportedDtype: the sample or `dtype` is not a supported floating-point dtype.
        """
        element = element_of(dtype)
        if not element.exponent_bits:
            raise UnsupportedDtype(f"{element.name} has no exponents to calibrate")
        counts = torch.zeros(element.exponents, dtype=torch.int64)
        for tensor in [sample] if isinstance(sample, Tensor) else sample:
            if not tensor.is_floating_point():
                raise UnsupportedDtype(f"a sample must be floating-point, not {tensor.dtype}")
            values = tensor.detach().to(dtype).reshape(-1)
            patterns = values.view(torch.int16 if element.size == 2 else torch.uint8)
            exponents = patterns.to(torch.int32) >> element.mantissa_bits & element.exponents - 1
            counts += torch.bincount(exponents, minlength=element.exponents).cpu()
        if not counts.any():
            raise InvalidCodebook("the sample is empty")
        return cls(element, tuple(counts.tolist()))

    @property
    def total(self) -> int:
        return sum(self.counts)

    def by_frequency(self) -> list[int]:
        """Return all exponents by descending frequency, smaller exponents first on ties.

        Exponents that do not occur are last: first 0, the exponent of zeros, then the others by
        distance from the most frequent exponent.
        """
        seen = [exponent for exponent, count in enumerate(self.counts) if count]
        seen.sort(key=lambda exponent: (-self.counts[exponent], exponent))
        unseen = [exponent for exponent, count in enumerate(self.counts) if not count]
        unseen.sort(key=lambda exponent: (exponent != 0, abs(exponent - seen[0]), exponent))
        return seen + unseen

    def window(self, size: int) -> tuple[int, ...]:
        """Return the `size` consecutive exponents with the most occurrences.

        On a tie, return the window whose center is nearest to the most frequent exponent.
        """
        order = self.by_frequency()
        peak = order[0]

        def rank(first: int) -> tuple[int, int]:
            inside = sum(self.counts[first : first + size])
            return -inside, abs(2 * first + size - 1 - 2 * peak)

        best = min(range(len(self.counts) - size + 1), key=rank)
        return tuple(range(best, best + size))

    def bits(self, codebook: Codebook) -> float:
        """Return the average number of bits per element, escapes included, with a codebook.

        Padding and the table of entry starts are not included.
        """
        escaped = self.total - sum(self.counts[exponent] for exponent in codebook.exponents)
        listed = escaped - sum(self.counts[exponent] for exponent in codebook.second)
        nibbles = _NIBBLE_BITS * escaped if codebook.mode.has_escape_code else 0
        stored = codebook.mode.code_bits + self.element.remainder_words
        return stored + (nibbles + _ENTRY_BITS * listed) / self.total

    def entropy_bits(self) -> float:
        """Return the entropy of the exponents plus the bits of the remainder, per element."""
        shares = torch.tensor([count for count in self.counts if count], dtype=torch.float64)
        shares /= self.total
        return float(-(shares * shares.log2()).sum()) + self.element.remainder_words

    def codebook(self, mode: Mode) -> Codebook:
        """Return the best codebook of a mode.

        Raises:
            InvalidCodebook: the mode is `RAW`, or the element type does not support it.
        """
        order = self.by_frequency()
        dtype = self.element.dtype
        if mode is Mode.RAW or not mode.supports(self.element):
            return Codebook((), mode, (), dtype)

        def with_codes(exponents: tuple[int, ...]) -> Codebook:
            others = [exponent for exponent in order if exponent not in exponents]
            second = others[: SECOND_CODES * mode.has_escape_code]
            escaped = sum(self.counts[exponent] for exponent in others) / self.total
            return Codebook(exponents, mode, tuple(sorted(second)), dtype, escaped)

        most_frequent = with_codes(tuple(sorted(order[: mode.codes])))
        window = with_codes(self.window(mode.codes))
        worth = self.bits(window) > _MIN_TABLE_GAIN * self.bits(most_frequent)
        return most_frequent if worth else window


def calibrate(
    sample: Tensor | Sequence[Tensor],
    dtype: torch.dtype = torch.bfloat16,
    mode: Mode | None = None,
) -> Codebook:
    """Return the codebook that stores a sample in the fewest bits.

    The codes are given to the most frequent exponents, or to the best window of consecutive
    exponents if that costs at most half a percent more.

    Args:
        sample: floating-point values of any shape, or several such tensors, on any device.
        dtype: dtype of the elements that will be encoded; the sample is rounded to it.
        mode: mode of the codebook; None selects the mode with the fewest bits.

    Raises:
        InvalidCodebook: the sample is empty, or the dtype does not support the mode.
        UnsupportedDtype: the sample or the dtype is not a supported floating-point dtype.
    """
    histogram = Histogram.of(sample, dtype)
    if mode is not None:
        return histogram.codebook(mode)
    modes = [m for m in Mode if m and m.supports(histogram.element)]
    return min((histogram.codebook(m) for m in modes), key=histogram.bits)
