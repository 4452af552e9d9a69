"""Time bins of plots."""

import math

import numpy as np
from numpy.typing import NDArray

_WIDTHS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 3600.0)


def edges_of(last: float, max_bins: int) -> NDArray[np.float64]:
    """Return the edges of equal bins from 0 to at least ``last`` seconds, of a round width."""
    last = max(last, _WIDTHS[0])
    width = next((one for one in _WIDTHS if last / one <= max_bins), _WIDTHS[-1])
    return width * np.arange(math.ceil(last / width - 1e-9) + 1, dtype=np.float64)
