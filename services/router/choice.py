"""Choices among workers that can all serve a request: shortest queue, and others to compare."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from random import Random
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """A worker, or several that serve a request together.

    Attributes:
        last_placement: sequence number of the newest placement; 0 if there is none.
    """

    @property
    def last_placement(self) -> int: ...


C = TypeVar("C", bound=Candidate)

Delays = Callable[[Sequence[C]], list[float]]
"""Returns the delay of a request on each of the candidates."""


class PolicyName(StrEnum):
    """Name of a policy in the settings."""

    SHORTEST_QUEUE = "shortest_queue"
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    POWER_OF_TWO = "power_of_two"


def choose(policy: PolicyName, candidates: Sequence[C], delays: Delays[C], rng: Random) -> C:
    """Return the candidate that a policy chooses; there must be at least one."""
    match policy:
        case PolicyName.SHORTEST_QUEUE:
            return shortest_queue(candidates, delays, rng)
        case PolicyName.ROUND_ROBIN:  # the least recently used, fair even if workers join or leave
            return _least(candidates, [c.last_placement for c in candidates], rng)
        case PolicyName.RANDOM:
            return rng.choice(candidates)
        case PolicyName.POWER_OF_TWO:
            drawn = rng.sample(candidates, min(2, len(candidates)))
            return shortest_queue(drawn, delays, rng)


def shortest_queue(candidates: Sequence[C], delays: Delays[C], rng: Random) -> C:
    """Return the candidate with the shortest delay, a random one of several."""
    return _least(candidates, delays(candidates), rng)


def _least(candidates: Sequence[C], keys: Sequence[float], rng: Random) -> C:
    least = min(keys)
    if keys.count(least) == 1:
        return candidates[keys.index(least)]
    return rng.choice([c for c, value in zip(candidates, keys, strict=True) if value == least])
