"""Turns of chats. The prompt of a turn contains the answer to the turn before it."""

from collections.abc import Iterator

from loadgen.record import Record
from loadgen.schedule import ScheduledRequest
from loadgen.workload.base import Dialogue, RequestSpec


def next_turn(scheduled: ScheduledRequest, record: Record) -> ScheduledRequest:
    """Return the turn after an answered one, due when its user has read the answer.

    The history has the answer as it was received. The number of prompt tokens is the sum of those
    of the previous turn, its answer and the message.

    Args:
        scheduled, record: the answered turn, which is not the last one of its chat. The record
            has the text of the answer or, for prompts of token ids, its token ids.
    """
    spec = scheduled.spec
    assert spec.later
    assert isinstance(spec.prompt, Dialogue)
    assert record.ended is not None
    turn, *later = spec.later
    answer = record.text if isinstance(turn.message, str) else tuple(record.token_ids)
    following = RequestSpec(
        spec.prompt.continued(answer, turn),
        record.input_tokens + record.output_tokens + turn.input_tokens,
        turn.output_tokens,
        later=tuple(later),
    )
    return ScheduledRequest(following, record.ended + turn.think_s)


def later_turns(scheduled: ScheduledRequest, due: float) -> Iterator[ScheduledRequest]:
    """Yield the turns after ``scheduled``. The prompt of each is only its message."""
    for turn in scheduled.spec.later or ():
        yield ScheduledRequest(
            RequestSpec(turn.message, turn.input_tokens, turn.output_tokens), due
        )
