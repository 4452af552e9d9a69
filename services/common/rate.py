"""Rate of work over the recent past."""

import math


class Rate:
    """Work per second of busy time. Older work has a smaller weight: it decays exponentially.

    The rate is unknown until it is based on enough busy time, and again after a long idle time.

    Args:
        memory_s: time after which the weight of work has fallen to 1/e, seconds.
        known_after_s: weighted busy time from which the rate is known, seconds.
    """

    def __init__(self, memory_s: float, known_after_s: float) -> None:
        self._memory_s = memory_s
        self._known_after_s = known_after_s
        self._busy_s = 0.0
        self._work = 0.0

    def add(self, work: float, busy_s: float) -> None:
        """Record work, and the busy time since the last call in seconds."""
        self.idle(busy_s)
        self._busy_s += self._memory_s * -math.expm1(-busy_s / self._memory_s)
        self._work += work

    def idle(self, idle_s: float) -> None:
        """Record idle time in seconds, which reduces the weight of earlier work."""
        decay = math.exp(-idle_s / self._memory_s)
        self._busy_s *= decay
        self._work *= decay

    def reset(self) -> None:
        """Forget everything."""
        self._busy_s = self._work = 0.0

    @property
    def per_s(self) -> float | None:
        """Work per second, or None while it is unknown."""
        return self._work / self._busy_s if self._busy_s >= self._known_after_s else None
