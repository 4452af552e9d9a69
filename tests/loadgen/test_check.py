"""Comparison of answers with those of a reference."""

import pytest

from loadgen.check import MAX_CONCURRENT, check, compare
from loadgen.clock import Clock
from loadgen.record import Failure, Record
from loadgen.schedule import ScheduledRequest
from loadgen.workload.base import RequestSpec


def record(text: str, *, ids: list[int] | None = None, cancelled: bool = False) -> Record:
    return Record(
        3,
        0.0,
        2,
        9,
        sent=0.0,
        times=[0.5] if text else [],
        ended=1.0,
        text=text,
        token_ids=ids or [],
        cancelled=cancelled,
    )


@pytest.mark.parametrize(
    ("found", "expected", "at"),
    [
        (record("ab"), record("ab"), None),
        (record("ab"), record("ac"), (1, "character")),
        (record("ab"), record("abc"), (2, "character")),
        (record("abc"), record("ab"), (2, "character")),
        (record("ab", cancelled=True), record("abc"), None),
        (record("ax", cancelled=True), record("abc"), (1, "character")),
        (record("ab", ids=[1, 2]), record("xx", ids=[1, 2]), None),
        (record("ab", ids=[1, 2]), record("ab", ids=[1, 3]), (1, "token")),
        (record("ab", ids=[1, 2]), record("ab"), None),
        (record(""), record(""), None),
    ],
)
def test_first_difference_is_found(
    found: Record, expected: Record, at: tuple[int, str] | None
) -> None:
    difference = compare(found, expected)
    assert (difference and (difference.at, difference.unit)) == at


class Reference:
    """Target that echoes prompts, fails for one prompt, and records its maximum concurrency."""

    name = "reference"

    def __init__(self) -> None:
        self.in_flight = self.max_in_flight = self.sent = 0

    async def send(self, scheduled: ScheduledRequest, record: Record, clock: Clock) -> None:
        self.in_flight += 1
        self.sent += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        record.sent = clock()
        record.text = str(scheduled.spec.prompt)
        assert scheduled.cancel_after is None
        if scheduled.spec.prompt == "broken":
            record.failure = Failure.RESET
        record.ended = clock()
        self.in_flight -= 1

    async def close(self) -> None:
        return


async def test_every_answer_is_compared_with_the_reference() -> None:
    prompts = ["same", "other", "broken", "failed", "cancelled", "at once"] + ["same"] * 30
    schedule = [
        ScheduledRequest(RequestSpec(prompt, 1, 4), 0.0, cancel_after=2) for prompt in prompts
    ]
    records = [record(prompt) for prompt in prompts]
    records[1].text = "another"
    records[3].failure = Failure.TIMEOUT
    records[4].cancelled = True
    records[4].text = "canc"
    records[5].cancelled = True
    records[5].text = ""
    records[5].times = []
    reference = Reference()
    found = await check(records, schedule, reference)
    assert (found.equal, len(found.different), found.missing) == (32, 1, 3)
    assert reference.sent == 4, "equal requests are sent once"
    assert not found.passed
    assert found.as_json()["examples"][0]["expected"] == "other"
    assert reference.max_in_flight <= MAX_CONCURRENT
    good = await check(records[:1], schedule[:1], reference)
    assert good.passed
    assert not (await check(records[3:4], schedule[3:4], reference)).passed
