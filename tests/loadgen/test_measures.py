"""Measures, compared with values computed by hand."""

import math

import pytest

from loadgen.measures import (
    E2E,
    E2E_SENT,
    ITL,
    LAG,
    MEASURES,
    NORMALIZED,
    TPOT,
    TTFT,
    TTFT_SENT,
    Cached,
    Goodput,
    InFlight,
    Measure,
    Objective,
    Outcomes,
    Throughput,
    Window,
    turns_of,
)
from loadgen.record import Failure, Record

WINDOW = Window(10.0, 20.0)


def answered(number: int = 0, *, due: float = 10.0) -> Record:
    """Return a request sent half a second late, with four tokens, the last two in one chunk."""
    return Record(
        number, due, input_tokens=30, wanted_tokens=4, sent=due + 0.5,
        times=[due + 1.0, due + 1.5, due + 3.0], counts=[1, 1, 2], ended=due + 4.0,
    )  # fmt: skip


def failed(failure: Failure, *, due: float = 11.0, tokens: int = 0) -> Record:
    times = [due + 1.0 + n for n in range(tokens)]
    return Record(
        1, due, 30, 4, sent=due, times=times, counts=[1] * tokens, ended=due + 5, failure=failure
    )


def cancelled(*, due: float = 12.0) -> Record:
    return Record(
        2, due, 30, 4, sent=due, times=[due + 1, due + 2], counts=[1, 1], ended=due + 2,
        cancelled=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("measure", "of_answered", "of_cancelled"),
    [
        (TTFT, [1.0], [1.0]),
        (TTFT_SENT, [0.5], [1.0]),
        (ITL, [0.5, 1.5], [1.0]),
        (TPOT, [2.0 / 3], []),
        (E2E, [4.0], []),
        (E2E_SENT, [3.5], []),
        (NORMALIZED, [1.0], []),
        (LAG, [0.5], [0.0]),
    ],
    ids=lambda value: value.name if isinstance(value, Measure) else "",
)
def test_values_of_one_request(
    measure: Measure, of_answered: list[float], of_cancelled: list[float]
) -> None:
    assert list(measure.of(answered())) == pytest.approx(of_answered)
    assert list(measure.of(cancelled())) == pytest.approx(of_cancelled)
    never_sent = Record(3, 10.0, 30, 4)
    assert list(measure.of(never_sent)) == []
    if measure is not LAG:
        assert list(measure.of(failed(Failure.RESET))) == []
        assert list(measure.of(failed(Failure.INTERRUPTED, tokens=3))) == []


def test_measures_have_unique_names() -> None:
    assert len({measure.name for measure in MEASURES}) == len(MEASURES) == 8


def test_token_count_of_the_target_takes_precedence() -> None:
    record = answered()
    record.reported_tokens = 5
    assert list(TPOT.of(record)) == pytest.approx([0.5])
    assert list(NORMALIZED.of(record)) == pytest.approx([0.8])


def test_single_token_has_no_time_per_output_token() -> None:
    one = Record(0, 0.0, 3, 1, sent=0.0, times=[1.0], counts=[1], ended=1.0)
    assert list(TPOT.of(one)) == []
    assert list(NORMALIZED.of(one)) == [1.0]


def test_throughput_counts_events_in_the_window() -> None:
    """Three requests overlap the window in different ways.

    The first was due before the window; its last two chunks and its end are in the window. The
    second has one of its two tokens in the window. The third fails after two tokens.
    """
    first = answered(due=8.5)  # chunks at 9.5, 10.0 and 11.5; ended at 12.5
    second = Record(1, 18.0, 50, 2, sent=18.0, times=[19.0, 21.0], counts=[1, 1], ended=21.0)
    third = failed(Failure.INTERRUPTED, tokens=2)  # chunks at 12 and 13
    found = Throughput.of([first, second, third], WINDOW)
    assert found.offered == pytest.approx(0.2)
    assert found.requests == pytest.approx(0.1)
    assert found.output_tokens == pytest.approx((3 + 1 + 2) / 10)
    assert found.input_tokens == pytest.approx(30 / 10)
    first.reported_tokens = 8  # twice the tokens received in chunks
    assert Throughput.of([first], WINDOW).output_tokens == pytest.approx(6 / 10)


def test_goodput_includes_failures_and_excludes_cancelled_requests() -> None:
    slow = answered(4)
    slow.times = [time + 1.0 for time in slow.times]
    records = [answered(), slow, failed(Failure.TIMEOUT), cancelled(), answered(5, due=30.0)]
    records.append(Record(6, 13.0, 30, 4, sent=13.0))  # never answered
    objectives = [Objective(TTFT, 1.5), Objective(TPOT, 0.7)]
    found = Goodput.of(records, WINDOW, objectives)
    assert found.requests == pytest.approx(0.1)
    assert found.attainment == pytest.approx(1 / 4)
    assert Goodput.of(records, WINDOW, [Objective(TTFT, 2.5)]).attainment == pytest.approx(2 / 4)
    assert Goodput.of(records, WINDOW, [Objective(ITL, 1.4)]).attainment == 0.0
    assert Goodput.of([cancelled()], WINDOW, objectives).attainment == 0.0


def test_every_request_has_one_outcome() -> None:
    records = [answered(n, due=10.0 + n) for n in range(3)]
    records += [failed(failure) for failure in Failure]
    records += [failed(Failure.RESET), cancelled(), Record(9, 19.0, 30, 4), answered(8, due=20.0)]
    found = Outcomes.of(records, WINDOW)
    assert (found.succeeded, found.cancelled, found.unfinished) == (3, 1, 1)
    assert found.failed == dict.fromkeys(Failure, 1) | {Failure.RESET: 2}
    assert found.total == len(records) - 1


def test_requests_in_flight_are_averaged_over_time() -> None:
    """One request overlaps the window's start, one is inside, one never ends, one is outside."""
    spans = [(8.0, 12.0), (11.0, 14.0), (18.0, None), (1.0, 9.0)]
    records = [
        Record(n, sent, 1, 1, sent=sent, ended=ended) for n, (sent, ended) in enumerate(spans)
    ]
    found = InFlight.of(records, WINDOW)
    assert found.mean == pytest.approx((2.0 + 3.0 + 2.0) / 10)
    assert found.most == 2
    # 2 + 1.5 request-seconds in the first quarter (10 to 12.5 s), 2 in the last (17.5 to 20 s).
    assert found.growth == pytest.approx((2.0 / 2.5 - 3.5 / 2.5) / 7.5)
    assert InFlight.of([], WINDOW) == InFlight(0.0, 0, 0.0)


def test_empty_window_has_no_rates() -> None:
    records, window = [answered(), cancelled()], Window(10.0, 10.0)
    assert InFlight.of(records, window) == InFlight(0.0, 0, 0.0)
    assert Throughput.of(records, window) == Throughput(0.0, 0.0, 0.0, 0.0)
    assert Goodput.of(records, window, [Objective(TTFT, 5.0)]) == Goodput(0.0, 0.0)
    assert Outcomes.of(records, window).total == 0


def test_queue_grows_by_unanswered_requests() -> None:
    """Four requests per second arrive and three are answered."""
    records = [Record(n, n / 4, 1, 1, sent=n / 4, ended=1.0 + n / 3) for n in range(400)]
    assert InFlight.of(records, Window(20.0, 100.0)).growth == pytest.approx(1.0, abs=0.03)


def test_littles_law_holds() -> None:
    """Over a complete run, mean requests in flight equal arrival rate times mean latency.

    Latency is measured from the send.
    """
    records = [answered(n, due=float(n)) for n in range(10)]
    window = Window(0.0, 20.0)
    mean = sum(next(iter(E2E_SENT.of(record))) for record in records) / len(records)
    rate = len(records) / window.seconds
    assert math.isclose(InFlight.of(records, window).mean, rate * mean)


def turn_of(chat: int, turn: int, *, cached: int | None = None, due: float = 12.0) -> Record:
    record = answered(due=due)
    record.chat, record.turn, record.cached_tokens = chat, turn, cached
    record.input_tokens = 100 * turn
    return record


def test_cached_tokens_are_a_fraction_of_the_prompts_that_report_them() -> None:
    records = [turn_of(0, 1, cached=0), turn_of(0, 2, cached=150), turn_of(1, 1), cancelled()]
    assert Cached.of(records) == Cached(2, 150, 300, 0.5, (0 + 0.75) / 2)
    assert Cached.of(records[2:]) is None
    assert Cached.of([]) is None


def test_requests_of_chats_are_grouped_by_turn() -> None:
    lost = Record(5, 13.0, 200, 4, ended=13.0, failure=Failure.NOT_SENT, chat=2, turn=2)
    refused = failed(Failure.REJECTED)
    refused.chat = 2
    others = [answered(), turn_of(3, 1, due=30.0)]
    chats = [turn_of(0, 1, cached=0), turn_of(0, 2, cached=150), turn_of(1, 1), refused, lost]
    first, second = turns_of([*chats, *others], WINDOW)
    assert (first.turn, first.sent, first.failed, first.not_sent) == (1, 3, 1, 0)
    assert (second.turn, second.sent, second.failed, second.not_sent) == (2, 1, 0, 1)
    assert (first.input_tokens, second.input_tokens) == (100, 200)
    assert first.ttft is not None
    assert (first.ttft.count, first.ttft.mean) == (2, 1.0)
    assert first.cached == Cached(1, 0, 100, 0.0, 0.0)
    assert second.cached == Cached(1, 150, 200, 0.75, 0.75)
    assert turns_of([answered()], WINDOW) == ()


def test_turns_that_were_not_sent_miss_the_objectives() -> None:
    lost = Record(5, 13.0, 200, 4, ended=13.0, failure=Failure.NOT_SENT, chat=2, turn=2)
    records = [turn_of(0, 1), lost]
    assert Goodput.of(records, WINDOW, [Objective(TTFT, 5.0)]) == Goodput(0.1, 0.5)
    outcomes = Outcomes.of(records, WINDOW)
    assert (outcomes.total, outcomes.failed) == (2, {Failure.NOT_SENT: 1})
