"""Measured part of a run: what is planned before it, and what ran of that."""

import math

from loadgen.config import RunConfig
from loadgen.errors import UsageError
from loadgen.lookahead import Lookahead
from loadgen.measures import Window
from loadgen.number import plain
from loadgen.runner import Runner
from loadgen.schedule import INSTANT_S, Schedule

_SHORTEST_S = 1e-3
"""Requests due within so many seconds are sent at once, so that they have no rate."""


def planned_window(config: RunConfig, load: Schedule | Lookahead) -> Window:
    """Return the measured part of a run, from the end of warm-up to the start of cool-down.

    The end is infinite if it is known only after the run: for a closed loop and for chats if they
    have no duration, and if all requests are due at once.

    Raises:
        UsageError: if warm-up and cool-down leave nothing to measure.
    """
    end = math.inf if config.limits.duration_s is None else config.limits.duration_s
    if isinstance(load, Schedule) and config.workload.turns is None:
        end = load.end
    if not _is_trimmed(config):
        return Window(0.0, end if end >= _SHORTEST_S else math.inf)
    window = Window(config.warm_up_s, end - config.cool_down_s)
    if window.seconds < _SHORTEST_S:
        raise UsageError(
            "warm-up and cool-down leave nothing of the run to measure, in which requests are due "
            f"for {plain(end)} s; shorten --warm-up or --cool-down, raise --duration, or send more "
            "requests"
        )
    return window


def measured_window(config: RunConfig, planned: Window, runner: Runner) -> Window:
    """Return the part of the planned window that ran.

    It ends with the load, or when the run was stopped. Requests that are all due at once, such as a
    single one in a trace, are measured until the last one has ended.
    """
    end = min(planned.end, runner.load_end - config.cool_down_s + INSTANT_S)
    if end - planned.begin < _SHORTEST_S:
        end = planned.begin if _is_trimmed(config) else runner.ended_at
    if runner.stopped.is_set():
        end = min(end, runner.ended_at)
    return Window(planned.begin, max(planned.begin, end))


def _is_trimmed(config: RunConfig) -> bool:
    return config.warm_up_s > 0 or config.cool_down_s > 0
