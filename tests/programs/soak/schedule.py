"""Faults of a soak, drawn from a seed."""

import random

from loadgen.faults import Fault

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
OTHERS = ("router", "gateway")
OTHER_SHARE = 0.15
"""Fraction of the faults that hit the router or the gateway."""
ACTIONS = {"kill": 3.0, "terminate": 3.0, "stop": 2.0, "cut": 2.0}
"""Weights of the actions; ``cut`` applies to workers only."""
GAP_S = (5.0, 20.0)
LASTS_S = (0.5, 6.0)
"""Bounds of the uniform time between two faults, and of the time for which one lasts."""
RANK_TIMEOUT_S = 6.0
RANK_STOPPED_S = (0.5, 2 * RANK_TIMEOUT_S)
"""`rank_timeout_s` of workers of several ranks, and bounds of the time for which a rank is stopped.
On a busy machine, ranks wait for one another for seconds."""
QUIET_S = 4.0
"""Time without faults at the start."""
RANK_ACTIONS = ("kill", "stop")
"""Actions that may hit any rank of a worker; the others are for its first one."""
LAST = 0.85
"""Fraction of the run after which no fault starts."""


def draw(seed: int, seconds: float, cut_command: str | None, ranks: int = 1) -> list[Fault]:
    """Return the faults of a run.

    Args:
        seconds: length of the run.
        cut_command: command to which the name of a worker is added to cut its links; None if
            links cannot be cut.
        ranks: number of ranks of each worker.
    """
    rng = random.Random(seed)
    actions = {name: weight for name, weight in ACTIONS.items() if name != "cut" or cut_command}
    faults = []
    at = QUIET_S
    while at < LAST * seconds:
        is_other = rng.random() < OTHER_SHARE
        process = rng.choice(OTHERS if is_other else WORKERS)
        weights = {name: weight for name, weight in actions.items() if name != "cut"}
        if not is_other:
            weights = actions
        action = rng.choices(list(weights), list(weights.values()))[0]
        if ranks > 1 and not is_other and action in RANK_ACTIONS and (rank := rng.randrange(ranks)):
            process += f".{rank}"
        bounds = RANK_STOPPED_S if ranks > 1 and action == "stop" else LASTS_S
        lasts_s = round(rng.uniform(*bounds), 1) if action in ("stop", "cut") else None
        if action == "cut":
            action = "run"
            process = f"{cut_command} {process}"
        faults.append(Fault(action, process, round(at, 1), lasts_s))
        at += rng.uniform(*GAP_S)
    return faults


def as_option(fault: Fault) -> str:
    """Return the text that `Fault.parse` converts to this fault."""
    lasts = "" if fault.for_s is None else f" for {fault.for_s}s"
    return f"{fault.action} {fault.process} at {fault.at}s{lasts}"
