"""Answers beside those of a reference."""

import pytest

from loadgen.check import AT_A_TIME, check, compare
from loadgen.clock import Clock
from loadgen.plan import Planned
from loadgen.record import Failure, Record
from loadgen.workload.base import Ask


def record(text: str, *, ids: list[int] | None = None, left: bool = False) -> Record:
    return Record(3, 0.0, 2, 9, sent=0.0, ended=1.0, text=text, token_ids=ids or [], cancelled=left)


@pytest.mark.parametrize(
    ("found", "expected", "at"),
    [
        (record("ab"), record("ab"), None),
        (record("ab"), record("ac"), (1, "character")),
        (record("ab"), record("abc"), (2, "character")),
        (record("abc"), record("ab"), (2, "character")),
        (record("ab", left=True), record("abc"), None),
        (record("ax", left=True), record("abc"), (1, "character")),
        (record("ab", ids=[1, 2]), record("xx", ids=[1, 2]), None),
        (record("ab", ids=[1, 2]), record("ab", ids=[1, 3]), (1, "token")),
        (record("ab", ids=[1, 2]), record("ab"), None),
        (record(""), record(""), None),
    ],
)
def test_the_first_difference_is_found(
    found: Record, expected: Record, at: tuple[int, str] | None
) -> None:
    difference = compare(found, expected)
    assert (difference and (difference.at, difference.unit)) == at


class Reference:
    """Answers with the prompt, but for some prompts; so many at a time at most."""

    name = "reference"

    def __init__(self) -> None:
        self.under_way = self.most = 0

    async def send(self, planned: Planned, record: Record, clock: Clock) -> None:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        record.sent, record.text = clock(), str(planned.ask.prompt)
        assert planned.leaves_after is None
        if planned.ask.prompt == "broken":
            record.failure = Failure.RESET
        record.ended = clock()
        self.under_way -= 1

    async def close(self) -> None:
        return


async def test_every_answer_is_asked_of_the_reference() -> None:
    prompts = ["same", "other", "broken", "failed", "left"] + ["same"] * 30
    planned = [Planned(Ask(prompt, 1, 4), 0.0, leaves_after=2) for prompt in prompts]
    records = [record(prompt) for prompt in prompts]
    records[1].text = "another"
    records[3].failure = Failure.TIMEOUT
    records[4].cancelled, records[4].text = True, "le"
    reference = Reference()
    found = await check(records, planned, reference)
    assert (found.equal, len(found.different), found.missing) == (32, 1, 2)
    assert not found.passed
    assert found.as_json()["examples"][0]["expected"] == "other"
    assert reference.most <= AT_A_TIME
    good = await check(records[:1], planned[:1], reference)
    assert good.passed
    assert not (await check(records[3:4], planned[3:4], reference)).passed
