"""Rate of work over the recent past."""

import math


class Rate:
    """Work per second of busy time. Older work has a smaller weight: it decays exponentially.

    Args:
        memory_s: busy time after which the weight of work has fallen to 1/e, seconds.
        known_after_s: busy time until the rate is known, seconds.
    """

    def __init__(self, memory_s: float, known_after_s: float = 0.0) -> None:
        self._memory_s = memory_s
        self._known_after_s = known_after_s
        self._observed_s = 0.0  # without decay
        self._busy_s = 0.0
        self._work = 0.0

    def add(self, work: float, busy_s: float) -> None:
        """Record work, and the busy time since the last call in seconds."""
        decay = math.exp(-busy_s / self._memory_s)
        self._observed_s += busy_s
        self._busy_s = self._busy_s * decay + self._memory_s * (1 - decay)
        self._work = self._work * decay + work

    @property
    def per_s(self) -> float | None:
        """Work per second, or None while it is unknown."""
        if not self._busy_s or self._observed_s < self._known_after_s:
            return None
        return self._work / self._busy_s
