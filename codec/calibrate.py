"""Calibration: from a sample of a plane's values, the mode and the codebook that fit it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from codec.codebook import SECOND_CODES, Codebook, Codebooks
from codec.elements import ElementType, element_of
from codec.errors import InvalidCodebook, UnsupportedDtype
from codec.format import Mode

_ENTRY_BITS, _NIBBLE_BITS = 32, 4
_WORTH_A_TABLE = 1.005
"""A window of consecutive exponents is coded without a table, two to three times as fast: any other
set must save more than half a percent."""


@dataclass(frozen=True)
class Histogram:
    """How often each exponent occurs in a sample.

    Attributes:
        counts: one for each exponent of the element type.
    """

    element: ElementType
    counts: tuple[int, ...]

    @classmethod
    def of(cls, sample: Tensor | Sequence[Tensor], dtype: torch.dtype) -> "Histogram":
        """Of values of any shape, on any device, rounded to `dtype` first; no sync for each value.

        Raises `InvalidCodebook` for an empty sample, `UnsupportedDtype` for one of integers.
        """
        element = element_of(dtype)
        if not element.exponent_bits:
            raise UnsupportedDtype(f"{element.name} has no exponents to calibrate")
        counts = torch.zeros(element.exponents, dtype=torch.int64)
        for tensor in [sample] if isinstance(sample, Tensor) else sample:
            if not tensor.is_floating_point():
                raise UnsupportedDtype(f"a sample of {tensor.dtype} has no exponents")
            values = tensor.detach().to(dtype).reshape(-1)
            patterns = values.view(torch.int16 if element.size == 2 else torch.uint8)
            exponents = patterns.to(torch.int32) >> element.mantissa_bits & element.exponents - 1
            counts += torch.bincount(exponents, minlength=element.exponents).cpu()
        if not counts.any():
            raise InvalidCodebook("an empty sample calibrates nothing")
        return cls(element, tuple(counts.tolist()))

    @property
    def total(self) -> int:
        return sum(self.counts)

    def by_frequency(self) -> list[int]:
        """All exponents: those that occur, the most frequent first, of equal ones the smaller; then
        0, which zeros have, and those nearest to the most frequent, where unseen values are
        likeliest."""
        seen = [exponent for exponent, count in enumerate(self.counts) if count]
        seen.sort(key=lambda exponent: (-self.counts[exponent], exponent))
        unseen = [exponent for exponent, count in enumerate(self.counts) if not count]
        unseen.sort(key=lambda exponent: (exponent != 0, abs(exponent - seen[0]), exponent))
        return seen + unseen

    def window(self, size: int) -> tuple[int, ...]:
        """So many consecutive exponents that occur the most often; of equal ones the nearest to the
        middle of what occurs."""
        order = self.by_frequency()
        peak = order[0]

        def rank(first: int) -> tuple[int, int]:
            inside = sum(self.counts[first : first + size])
            return -inside, abs(2 * first + size - 1 - 2 * peak)

        best = min(range(len(self.counts) - size + 1), key=rank)
        return tuple(range(best, best + size))

    def bits(self, codebook: Codebook) -> float:
        """Bits of an element that is stored with this codebook, on average, if the sample's
        exponents lie anywhere: escapes included, what a chunk has for itself not."""
        escaped = self.total - sum(self.counts[exponent] for exponent in codebook.exponents)
        listed = escaped - sum(self.counts[exponent] for exponent in codebook.second)
        nibbles = _NIBBLE_BITS * escaped if codebook.mode.has_escape_code else 0
        stored = codebook.mode.code_bits + self.element.remainder_words
        return stored + (nibbles + _ENTRY_BITS * listed) / self.total

    def entropy_bits(self) -> float:
        """The least that an element takes if its exponent is coded by itself: the entropy of the
        exponents, and the rest."""
        shares = torch.tensor([count for count in self.counts if count], dtype=torch.float64)
        shares /= self.total
        return float(-(shares * shares.log2()).sum()) + self.element.remainder_words

    def codebook(self, mode: Mode) -> Codebook:
        """The best codebook of this mode. Raises `InvalidCodebook` if the element has none."""
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
        worth = self.bits(window) > _WORTH_A_TABLE * self.bits(most_frequent)
        return most_frequent if worth else window


def calibrate(
    sample: Tensor | Sequence[Tensor],
    dtype: torch.dtype = torch.bfloat16,
    mode: Mode | None = None,
) -> Codebook:
    """The codebook that stores a sample in the fewest bits.

    Args:
        sample: values of any shape, or several such tensors, on any device. Tensors of another
            floating dtype are rounded to `dtype` first.
        dtype: the element type that will be encoded.
        mode: `None` takes the mode of the fewest bits; of equal ones the first.

    Codes go to the most frequent exponents, or to the best window of consecutive ones, if that
    costs next to nothing more. Samples with the same sets give the same id.

    Raises `InvalidCodebook` for an empty sample or a mode that the element type does not have,
    `UnsupportedDtype` for a dtype without codebooks.
    """
    histogram = Histogram.of(sample, dtype)
    if mode is not None:
        return histogram.codebook(mode)
    modes = [m for m in Mode if m and m.supports(histogram.element)]
    return min((histogram.codebook(m) for m in modes), key=histogram.bits)


def calibrate_model(
    planes_samples: Mapping[tuple[int, str], Tensor | Sequence[Tensor]],
    dtype: torch.dtype = torch.bfloat16,
    mode: Mode | None = None,
) -> Codebooks:
    """Calibrate each (layer, plane) from its own sample. See `calibrate`."""
    books = {key: calibrate(sample, dtype, mode) for key, sample in planes_samples.items()}
    return Codebooks.of(books)
