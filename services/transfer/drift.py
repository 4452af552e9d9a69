"""Escape rates of recent KV, compared with the escape rates in the calibration sample."""

from dataclasses import dataclass

_WINDOW = 1 << 24
"""Length of the moving averages in elements; older elements have decaying weights."""
_FACTOR, _MARGIN = 2.0, 0.005
"""Calibration is out of date if the measured rate exceeds ``_FACTOR * expected + _MARGIN``. With
a three-bit codebook, twice the expected escapes reduce the compression ratio by about 2 %."""


@dataclass(frozen=True)
class Escapes:
    """Escapes of one encoded segment.

    Attributes:
        elements: number of elements in planes with a codebook.
        found: number of elements whose exponent has no code.
        expected_rate: escapes per element in the calibration sample.
    """

    elements: int
    found: int
    expected_rate: float


class EscapeDrift:
    """Moving averages of the measured and the expected escape rate."""

    def __init__(self) -> None:
        self._elements = self._escapes = self._expected = 0.0

    def add(self, elements: int, escapes: int, expected_rate: float) -> None:
        """Add one segment; see `Escapes`."""
        kept = max(0.0, 1 - elements / _WINDOW)
        self._elements = kept * self._elements + elements
        self._escapes = kept * self._escapes + escapes
        self._expected = kept * self._expected + elements * expected_rate

    @property
    def rate(self) -> float:
        """Recent escapes per element."""
        return self._escapes / self._elements if self._elements else 0.0

    @property
    def expected(self) -> float:
        """Escapes per element that the calibration samples predict for the same planes."""
        return self._expected / self._elements if self._elements else 0.0

    @property
    def recalibrate(self) -> bool:
        """Whether a new calibration is advised; False until enough elements were added."""
        enough = self._elements >= _WINDOW / 16
        return enough and self.rate > _FACTOR * self.expected + _MARGIN
