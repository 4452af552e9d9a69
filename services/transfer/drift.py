"""Whether KV still looks like the text that its codebooks were calibrated on."""

from dataclasses import dataclass

_ELEMENTS = 1 << 24
"""What is remembered: as much of it is forgotten as comes in."""
_TIMES, _PLUS = 2.0, 0.005
"""The rate at which a calibration is out of date: so many times what it was when it was made, and
so much more. Twice the escapes of a three-bit codebook cost about 2 % of its ratio."""


@dataclass(frozen=True)
class Escapes:
    """Of a segment: how many elements had no code, and the share that the calibration expects."""

    found: int
    expected_rate: float


class EscapeDrift:
    """Escape rates of what was encoded lately, and of what the codebooks were made from."""

    def __init__(self) -> None:
        self._elements = self._escapes = self._expected = 0.0

    def add(self, elements: int, escapes: int, expected_rate: float) -> None:
        """Of a segment: its coded elements, how many had no code, and the share that should."""
        kept = max(0.0, 1 - elements / _ELEMENTS)
        self._elements = kept * self._elements + elements
        self._escapes = kept * self._escapes + escapes
        self._expected = kept * self._expected + elements * expected_rate

    @property
    def rate(self) -> float:
        """Escapes per element, lately."""
        return self._escapes / self._elements if self._elements else 0.0

    @property
    def expected(self) -> float:
        """The same of the samples that the codebooks were made from."""
        return self._expected / self._elements if self._elements else 0.0

    @property
    def recalibrate(self) -> bool:
        """Whether a new calibration is advised; until enough was seen it is not."""
        seen = self._elements >= _ELEMENTS / 16
        return seen and self.rate > _TIMES * self.expected + _PLUS
