"""Comparison of greedy answers with those of a reference server, token for token.

Token ids are compared if both targets report them, as over gRPC; otherwise text is compared. The
partial answer of a cancelled request is compared with the reference's answer, truncated to the same
length.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from loadgen.clock import Clock
from loadgen.record import Record
from loadgen.schedule import ScheduledRequest
from loadgen.target.base import Target
from loadgen.workload.base import RequestSpec

MAX_CONCURRENT = 8
"""Concurrent requests to the reference, which may be slower than the target."""
_MAX_EXAMPLES = 10
_CONTEXT = 20


@dataclass(frozen=True)
class Difference:
    """First difference between an answer of the target and the reference's answer.

    Attributes:
        number: index of the request in the schedule.
        at: index of the first different token or character.
        unit: ``token`` or ``character``.
        found, expected: excerpts of the target's and the reference's answer around that index.
    """

    number: int
    at: int
    unit: str
    found: str
    expected: str


@dataclass(frozen=True)
class Check:
    """Result of comparing all answers of a run with those of a reference.

    Attributes:
        equal: number of equal answers.
        different: the first difference of each unequal answer.
        missing: number of requests that the target or the reference did not answer.
    """

    reference: str
    equal: int
    different: tuple[Difference, ...]
    missing: int

    @property
    def passed(self) -> bool:
        """Whether at least one answer was compared and all compared answers are equal."""
        return self.equal > 0 and not self.different

    def as_json(self) -> dict[str, Any]:
        return {
            "reference": self.reference,
            "equal": self.equal,
            "different": len(self.different),
            "missing": self.missing,
            "examples": [vars(one) for one in self.different[:_MAX_EXAMPLES]],
        }


async def check(
    records: Sequence[Record], schedule: Sequence[ScheduledRequest], reference: Target
) -> Check:
    """Send the answered requests to the reference and compare the answers.

    Equal requests are sent once. Requests cancelled before their first token count as missing.
    """
    limit = asyncio.Semaphore(MAX_CONCURRENT)
    clock = Clock()
    answered = [
        (r, s.spec)
        for r, s in zip(records, schedule, strict=True)
        if r.succeeded or (r.cancelled and r.times)
    ]

    async def send(number: int, spec: RequestSpec) -> Record:
        result = Record(number, 0.0, spec.input_tokens, spec.output_tokens)
        async with limit:
            await reference.send(ScheduledRequest(spec, 0.0), result, clock)
        return result

    distinct = dict.fromkeys(spec for _, spec in answered)
    answers = await asyncio.gather(*(send(i, spec) for i, spec in enumerate(distinct)))
    expected_of = dict(zip(distinct, answers, strict=True))
    equal = 0
    different = []
    for record, spec in answered:
        expected = expected_of[spec]
        if not expected.succeeded:
            continue
        found = compare(record, expected)
        equal += found is None
        different += [found] if found else []
    missing = len(records) - equal - len(different)
    return Check(reference.name, equal, tuple(different), missing)


def compare(found: Record, expected: Record) -> Difference | None:
    """Return the first difference, or None if the answers are equal.

    If ``found`` was cancelled, the reference's answer is first truncated to the same length.
    """
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
            around = slice(max(0, at - _CONTEXT), at + _CONTEXT)
            return Difference(found.number, at, unit, str(ours[around]), str(theirs[around]))
    return None
