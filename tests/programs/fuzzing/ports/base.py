"""Base class of the ports under test, and the checks that they share."""

from abc import ABC, abstractmethod
from collections import Counter
from random import Random


class Wrong(AssertionError):
    """A service gave an answer that it must never give."""


class Port(ABC):
    """One running port of a service, in this process.

    Attributes:
        outcomes: number of messages by their outcome.
    """

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()

    @abstractmethod
    async def send(self, rng: Random, count: int) -> None:
        """Send ``count`` messages, most of them mutated.

        Raises:
            Wrong: an answer is not one of those that the port documents.
        """

    @abstractmethod
    async def check(self) -> None:
        """Check that an ordinary request has its usual answer, and that all is free afterwards.

        Raises:
            AssertionError, TimeoutError: if not.
        """
