"""Is what the target wrote what a reference writes? Each greedy answer, token for token.

Token ids are compared where both targets tell them (gRPC), text elsewhere. A client that left early
has the beginning of its answer, which is compared with the reference's beginning.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from loadgen.clock import Clock
from loadgen.plan import Planned
from loadgen.record import Record
from loadgen.target.base import Target

AT_A_TIME = 8
"""Requests that the reference is asked: it need not be as fast as the target."""
_SHOWN = 10
_AROUND = 20


@dataclass(frozen=True)
class Difference:
    """The first place where an answer differs: ``at`` a token, or a character where there is only
    text, and what is there."""

    number: int
    at: int
    unit: str
    found: str
    expected: str


@dataclass(frozen=True)
class Check:
    """Of all answers of a run, with those of a ``reference``.

    Attributes:
        equal, different: answers.
        missing: those that target or reference did not give.
    """

    reference: str
    equal: int
    different: tuple[Difference, ...]
    missing: int

    @property
    def passed(self) -> bool:
        """A check of nothing is none."""
        return self.equal > 0 and not self.different

    def as_json(self) -> dict[str, Any]:
        return {
            "reference": self.reference,
            "equal": self.equal,
            "different": len(self.different),
            "missing": self.missing,
            "examples": [vars(one) for one in self.different[:_SHOWN]],
        }


async def check(records: Sequence[Record], planned: Sequence[Planned], reference: Target) -> Check:
    """Asks the reference for the same as the target, as fast as it answers."""
    turn, clock = asyncio.Semaphore(AT_A_TIME), Clock()
    asked = [(r, p) for r, p in zip(records, planned, strict=True) if r.succeeded or r.cancelled]

    async def answer(record: Record, one: Planned) -> Record:
        made = Record(record.number, 0.0, one.ask.input_tokens, one.ask.output_tokens)
        async with turn:
            await reference.send(Planned(one.ask, 0.0), made, clock)
        return made

    answers = await asyncio.gather(*(answer(*pair) for pair in asked))
    equal, different = 0, []
    for (record, _), expected in zip(asked, answers, strict=True):
        if not expected.succeeded:
            continue
        found = compare(record, expected)
        equal += found is None
        different += [found] if found else []
    missing = len(records) - equal - len(different)
    return Check(reference.name, equal, tuple(different), missing)


def compare(found: Record, expected: Record) -> Difference | None:
    """None: they are equal, as far as the client had stayed."""
    unit: str
    ours: Sequence[Any]
    theirs: Sequence[Any]
    if found.token_ids and expected.token_ids:
        unit, ours, theirs = "token", found.token_ids, expected.token_ids
    else:
        unit, ours, theirs = "character", found.text, expected.text
    if found.cancelled:
        theirs = theirs[: len(ours)]
    for at, (a, b) in enumerate(zip_longest(ours, theirs)):
        if a != b:
            around = slice(max(0, at - _AROUND), at + _AROUND)
            return Difference(found.number, at, unit, str(ours[around]), str(theirs[around]))
    return None
