"""The load that a sweep varies: the offered rate, or the concurrency of closed loops."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from loadgen.number import counted


@dataclass(frozen=True)
class Axis:
    """Quantity on the x axis of a sweep.

    Attributes:
        name: key of the value in JSON, in tables and in folder names.
        plural: name for several values of the quantity.
        title: short title in reports.
        noun, per: unit of the value, such as "request" and "per second". The noun of chats is
            "chat".
    """

    name: str
    plural: str
    title: str
    noun: str
    per: str

    @property
    def is_closed(self) -> bool:
        """Whether loads are numbers of requests or chats in flight."""
        return self.name == "concurrency"

    @property
    def counts_chats(self) -> bool:
        return self.noun == "chat"

    @property
    def unit(self) -> str:
        """Unit of the axis, such as "requests per second"."""
        return f"{self.noun}s {self.per}"

    @property
    def label(self) -> str:
        """Label of a plot's axis."""
        return f"{self.title}, {self.unit}"

    def of(self, load: float) -> str:
        """Return a value with its unit, such as "1 request per second"."""
        return f"{counted(load, self.noun)} {self.per}"


RATE = Axis("rate", "rates", "offered", "request", "per second")
CONCURRENCY = Axis("concurrency", "concurrencies", "closed loop", "request", "in flight")
_OF_CHATS = {axis.name: replace(axis, noun="chat") for axis in (RATE, CONCURRENCY)}


def axis_with(*, closed: bool, chats: bool) -> Axis:
    """Return the axis of closed loops or of rates, of chats or of single requests."""
    axis = CONCURRENCY if closed else RATE
    return _OF_CHATS[axis.name] if chats else axis


def axis_of(points: Sequence[Mapping[str, Any]]) -> Axis:
    """Return the axis of the points of a sweep document or the rows of a comparison."""
    return axis_with(
        closed=any(CONCURRENCY.name in point for point in points),
        chats=any(point.get("chats") for point in points),
    )
