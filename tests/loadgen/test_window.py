"""The measured part of a run ends with the load, or where the run was stopped."""

import math
from dataclasses import replace

import pytest

from loadgen.arrivals import Constant
from loadgen.config import ArrivalConfig, RunConfig, WorkloadConfig
from loadgen.errors import UsageError
from loadgen.measures import Window
from loadgen.runner import Runner
from loadgen.schedule import Limits, Schedule, ScheduledRequest, make_schedule
from loadgen.window import measured_window, planned_window
from loadgen.workload.base import RequestSpec
from tests.loadgen.test_chats import Target, chat_of, played
from tests.loadgen.workloads import Same

SPEC = RequestSpec("a prompt", 2, 10)


def config_of(
    limits: Limits, warm_up_s: float = 0.0, cool_down_s: float = 0.0, *, turns: str | None = None
) -> RunConfig:
    workload, arrivals = WorkloadConfig(turns=turns), ArrivalConfig()
    config = RunConfig("http://a/v1", workload, arrivals, limits)
    return replace(config, warm_up_s=warm_up_s, cool_down_s=cool_down_s)


def constant(limits: Limits) -> Schedule:
    """Return two requests per second."""
    return make_schedule(Constant(2.0), Same(SPEC), limits, seed=0)


def at_once(count: int) -> Schedule:
    """Return the schedule of a trace whose requests are all due at its start."""
    return Schedule([ScheduledRequest(SPEC, 0.0)] * count, 1e-9)


def measured(
    config: RunConfig, load: Schedule, *, ended_at: float = 100.0, stopped: bool = False
) -> Window:
    """Return the window of a run that ended at a given time."""
    runner = Runner(load.requests, Target(), end=load.end)
    runner.ended_at = ended_at
    if stopped:
        runner.stopped.set()
    return measured_window(config, planned_window(config, load), runner)


@pytest.mark.parametrize(
    ("limits", "end"),
    [
        (Limits(requests=1), 0.5),
        (Limits(requests=8), 4.0),
        (Limits(duration_s=3.9), 3.9),
        (Limits(requests=8, duration_s=60.0), 4.0),
        (Limits(requests=8, duration_s=2.0), 2.0),
    ],
)
def test_first_limit_reached_ends_the_window(limits: Limits, end: float) -> None:
    assert measured(config_of(limits), constant(limits)) == Window(0.0, end)
    trimmed = config_of(limits, warm_up_s=0.1, cool_down_s=0.2)
    assert measured(trimmed, constant(limits)) == Window(0.1, end - 0.2)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("limits", [Limits(requests=5), Limits(duration_s=60.0)])
def test_requests_that_are_due_at_once_are_measured_until_they_have_ended(
    limits: Limits, count: int
) -> None:
    assert measured(config_of(limits), at_once(count), ended_at=2.5) == Window(0.0, 2.5)
    with pytest.raises(UsageError, match="leave nothing of the run to measure"):
        planned_window(config_of(limits, warm_up_s=1.0), at_once(count))


@pytest.mark.parametrize(
    ("ended_at", "window"),
    [(10.0, Window(2.0, 10.0)), (70.0, Window(2.0, 55.0)), (1.0, Window(2.0, 2.0))],
    ids=["during the load", "after the load", "during the warm-up"],
)
def test_window_ends_where_the_run_was_stopped(ended_at: float, window: Window) -> None:
    limits = Limits(duration_s=60.0)
    config = config_of(limits, warm_up_s=2.0, cool_down_s=5.0)
    assert measured(config, constant(limits), ended_at=ended_at, stopped=True) == window


@pytest.mark.parametrize(("warm_up_s", "cool_down_s"), [(4.0, 0.0), (0.0, 4.0), (2.0, 2.0)])
def test_warm_up_and_cool_down_leave_a_part_of_the_load(
    warm_up_s: float, cool_down_s: float
) -> None:
    limits = Limits(requests=8, duration_s=60.0)
    with pytest.raises(UsageError, match="requests are due for 4 s"):
        planned_window(config_of(limits, warm_up_s, cool_down_s), constant(limits))


@pytest.mark.parametrize("duration_s", [None, 60.0])
async def test_chats_that_end_early_end_the_window(duration_s: float | None) -> None:
    runner = await played([chat_of(3)], Target(), duration_s=duration_s, end=0.001)
    config = config_of(Limits(requests=1, duration_s=duration_s), turns="fixed:3")
    planned = planned_window(config, Schedule(runner.schedule, 0.001))
    assert planned == Window(0.0, duration_s or math.inf)
    found = measured_window(config, planned, runner)
    assert found.end == pytest.approx(runner.records[-1].due, abs=1e-6)
    assert len(found.due(runner.records)) == 3


async def test_chats_that_the_duration_ends_are_measured_until_then() -> None:
    runner = await played([chat_of(100)], Target(), duration_s=0.2, end=0.001)
    config = config_of(Limits(requests=1, duration_s=0.2), turns="fixed:100")
    planned = planned_window(config, Schedule(runner.schedule, 0.001))
    assert measured_window(config, planned, runner) == Window(0.0, 0.2)


async def test_stopped_chats_are_measured_until_then() -> None:
    """The second chat was never sent."""
    runner = Runner([chat_of(3), chat_of(3, due=50.0)], Target(), end=60.0)
    config = config_of(Limits(requests=2), turns="fixed:3")
    planned = planned_window(config, Schedule(runner.schedule, 60.0))
    runner.stopped.set()
    runner.ended_at = 7.0
    assert measured_window(config, planned, runner) == Window(0.0, 7.0)
