"""Prediction of the faster path of a prompt from measured times."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.decode.prompt_times import (
    RECENT_PROMPTS,
    RECENT_S,
    FetchedPrompt,
    Line,
    Measured,
    PromptSize,
    PromptTimes,
    compute_s,
    fetch_s,
    is_faster_here,
)

MEASURED = Measured(
    compute=Line(0.0, 2e-4),
    prefill=Line(0.0, 1e-4),
    transfer=Line(0.004, 1e-6),
    fixed_s=0.006,
    queue_s=0.0,
    reused=1.0,
)
"""This worker computes half as fast as a prefill worker; a fetch takes 10 ms more."""


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(100, 0.2)], Line(0.0, 0.002)),
        ([(100, 0.2), (101, 0.1)], Line(0.0, 0.0015)),  # too close to each other for two parts
        ([(100, 0.2), (300, 0.4)], Line(0.1, 0.001)),
        ([(100, 0.4), (300, 0.2)], Line(0.3, 0.0)),
        ([(100, 0.1), (300, 0.5)], Line(0.0, 0.0016)),
        ([(0, 0.1), (0, 0.3)], Line(0.2, 0.0)),
    ],
)
def test_line_has_the_least_errors_of_those_that_do_not_fall(
    points: list[tuple[float, float]], line: Line
) -> None:
    found = Line.through(points)
    assert found.fixed_s == pytest.approx(line.fixed_s)
    assert found.token_s == pytest.approx(line.token_s, rel=0.01)


@given(st.lists(st.tuples(st.integers(0, 1 << 17), st.floats(0, 1e3)), min_size=1, max_size=32))
def test_lines_predict_no_negative_time(points: list[tuple[int, float]]) -> None:
    found = Line.through(points)
    assert found.at(0) >= 0
    assert found.at(1 << 17) >= found.at(0)


@pytest.mark.parametrize(
    ("size", "step_s", "here"),
    [
        (PromptSize(4000, 50), 0.0, True),  # 10 ms here; 5 + 10 ms by a fetch
        (PromptSize(4000, 90), 0.0, True),
        (PromptSize(4000, 110), 0.0, False),
        (PromptSize(4000, 50), 0.010, False),  # a long step is in progress
        (PromptSize(4000, 50, waiting_here=50), 0.0, False),
        (PromptSize(4000, 50, waiting_here=50, waiting_there=2000), 0.0, True),
        (PromptSize(4000, 256, waiting_there=100), 0.0, False),
        (PromptSize(4000, 256, waiting_there=160), 0.0, True),
    ],
)
def test_the_faster_path_is_chosen(size: PromptSize, step_s: float, here: bool) -> None:
    assert is_faster_here(size, MEASURED, step_s) is here


def test_what_a_prefill_worker_has_not_cached_counts() -> None:
    size = PromptSize(4000, 256)
    assert fetch_s(size, MEASURED) == pytest.approx(0.010256 + 0.0256)
    from_scratch = replace(MEASURED, reused=0.25)
    assert fetch_s(size, from_scratch) == pytest.approx(0.010256 + 0.3)
    assert is_faster_here(size, from_scratch, 0.0)


def test_the_queue_of_a_prefill_worker_counts() -> None:
    waiting = replace(MEASURED, queue_s=0.5)
    assert fetch_s(PromptSize(400, 100), waiting) == pytest.approx(0.5201)
    own = PromptSize(400, 100, waiting_there=9000)
    assert fetch_s(own, waiting) == pytest.approx(0.9201), "this worker's own prompts take longer"


def test_a_worker_without_measurements_computes_as_fast_as_a_prefill_worker() -> None:
    measured = replace(MEASURED, compute=None)
    assert compute_s(PromptSize(400, 100), measured, 0.002) == pytest.approx(0.012)


def fetched(tokens: int = 1000, reused: int = 0, queue_s: float = 0.0) -> FetchedPrompt:
    """Return a prompt of 10,000 tokens per second and 5 ms for messages."""
    prefill_s = (tokens - reused) * 1e-4
    first_s = queue_s + prefill_s + 0.005
    return FetchedPrompt(tokens, reused, tokens, queue_s, prefill_s, first_s, rest_s=0.02)


def test_nothing_is_predicted_before_the_first_fetch() -> None:
    times = PromptTimes()
    times.add_computed(100, 0.1, now=0.0)
    assert times.measured(1.0) is None


def test_times_of_recent_prompts() -> None:
    times = PromptTimes()
    times.add_fetched(fetched(2000, 500, queue_s=1.0), now=0.0)
    times.add_fetched(fetched(1000, 1000, queue_s=0.4), now=10.0)
    times.add_computed(100, 0.05, now=10.0)
    found = times.measured(10.0)
    assert found is not None
    assert found.compute == Line(0.0, 0.0005)
    assert found.prefill.at(1500) == pytest.approx(0.15)
    assert found.fixed_s == pytest.approx(0.005)
    assert (found.queue_s, found.reused) == (0.4, 0.5)


def test_a_queue_is_forgotten_so_that_prefill_workers_are_tried_again() -> None:
    times = PromptTimes()
    times.add_fetched(fetched(queue_s=8.0), now=0.0)
    ages = (0.0, 5.0, RECENT_S)
    queues = [measured.queue_s for now in ages if (measured := times.measured(now))]
    assert queues == pytest.approx([8.0, 2.943, 0.0], abs=0.001)


def test_slow_computation_is_forgotten_so_that_it_is_tried_again() -> None:
    times = PromptTimes()
    times.add_fetched(fetched(), now=0.0)
    times.add_computed(10, 30.0, now=0.0)
    size = PromptSize(1000, 20)
    times.add_fetched(fetched(), now=RECENT_S)
    for now, here in ((1.0, False), (RECENT_S + 1, True)):
        measured = times.measured(now)
        assert measured is not None
        assert is_faster_here(size, measured, 0.0) is here


def test_fast_fetches_are_forgotten_so_that_fetches_are_measured_again() -> None:
    times = PromptTimes()
    times.add_fetched(fetched(reused=500), now=0.0)
    times.add_fetched(fetched(reused=1000), now=50.0)
    found = [times.measured(now) for now in (50.0, 61.0, 111.0)]
    assert [measured and measured.reused for measured in found] == [0.75, 1.0, None]


def test_only_the_last_prompts_count() -> None:
    times = PromptTimes()
    for number in range(3 * RECENT_PROMPTS):
        slow = number < 2 * RECENT_PROMPTS
        times.add_fetched(fetched(reused=0 if slow else 1000), now=float(number))
        times.add_computed(100, 9.0 if slow else 0.1, now=float(number))
    measured = times.measured(3.0 * RECENT_PROMPTS)
    assert measured is not None
    assert measured.reused == 1
    assert measured.compute == Line(0.0, 0.001)
