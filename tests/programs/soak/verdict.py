"""Evaluation of a soak: the outcome of each request, and recovery after each fault."""

import json
import re
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from loadgen.record import Failure, Record

DEADLINE_S = 45.0
"""Deadline of a request in the gateway."""
HUNG_S = DEADLINE_S + 20.0
"""A request that takes longer has hung. It is more than the deadline, since the gateway may be
stopped for some seconds, or starved on a busy machine."""
GATEWAY_S = 40.0
"""Time after a fault of the gateway in which it may have to start."""
_BROKEN = {Failure.REFUSED, Failure.RESET, Failure.INTERRUPTED}
_TYPED = {Failure.REJECTED, Failure.CLIENT_ERROR, Failure.SERVER_ERROR, Failure.TIMEOUT}


_SIGNALLED = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGABRT, 0}
"""Exit codes after faults. UCX may abort a worker that was stopped and then continued."""
_RANK_FAULT = 1
"""Exit code of a worker one of whose ranks has failed."""
_OF_RANK = re.compile(r"(?:kill|stop) ((?:prefill|decode)-\d+)")


@dataclass(frozen=True)
class Verdict:
    """Outcomes of all requests of a soak.

    Attributes:
        total, answered, cancelled: numbers of requests.
        early: number of requests that were cancelled before their first token.
        equal, different, missing: comparison with the reference; see `loadgen.check.Check`.
        typed: number of requests with each typed error.
        lost: connections that ended with a gateway that was killed, stopped or restarted.
        hung: requests that took longer than `HUNG_S`, or did not end.
        broken: requests that ended without an answer or a typed error, by message.
    """

    total: int
    answered: int
    cancelled: int
    early: int
    equal: int
    different: int
    typed: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    hung: int = 0
    broken: Counter[str] = field(default_factory=Counter)

    @property
    def passed(self) -> bool:
        """Whether some answers were compared and nothing was wrong, hung or broken."""
        return self.equal > 0 and not (self.different or self.hung or self.broken)

    @classmethod
    def of(cls, records: Sequence[Record], document: dict[str, Any]) -> Self:
        """Evaluate the records and the summary of a run of the load generator."""
        gateway_faults = [
            fault["at"]
            for fault in document["faults"]
            if "gateway" in fault["what"] and "failed" not in fault
        ]
        typed: Counter[str] = Counter()
        broken: Counter[str] = Counter()
        lost = hung = 0
        for record in records:
            if record.ended is None or record.ended - (record.sent or 0.0) > HUNG_S:
                hung += 1
            elif record.failure in _TYPED:
                typed[_kind(record)] += 1
            elif record.failure is not None:
                ended = record.ended
                if record.failure in _BROKEN and any(
                    at <= ended <= at + GATEWAY_S for at in gateway_faults
                ):
                    lost += 1
                else:
                    broken[_kind(record)] += 1
        check = document["check"] or {"equal": 0, "different": 0}
        return cls(
            total=len(records),
            answered=sum(record.succeeded for record in records),
            cancelled=sum(record.cancelled for record in records),
            early=sum(record.cancelled and not record.times for record in records),
            equal=check["equal"],
            different=check["different"],
            typed=typed,
            lost=lost,
            hung=hung,
            broken=broken,
        )


def crashes(
    log: Path, faults: Sequence[dict[str, Any]], *, with_faults: bool, ranks: int = 1
) -> list[str]:
    """Return the processes that exited on their own, each with its exit code.

    Args:
        log: log of `headrace up`.
        faults: faults that were injected.
        with_faults: whether processes were killed and terminated, so that some exits are expected.
        ranks: number of ranks of each worker. With several, a worker exits if one of them was
            killed, or stopped for too long.
    """
    lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
    exits = [one for one in map(json.loads, lines) if one.get("event") == "process exited"]
    expected = _SIGNALLED if with_faults else set()
    hit = Counter(map(_worker, faults)) if ranks > 1 else Counter()
    found = []
    for one in exits:
        if one["code"] == _RANK_FAULT and hit[one["process"]]:
            hit[one["process"]] -= 1
        elif one["code"] not in expected:
            found.append(f"{one['process']} ({one['code']})")
    return found


def _worker(fault: dict[str, Any]) -> str | None:
    """Return the worker of which a fault has killed or stopped a rank, or None."""
    found = _OF_RANK.match(fault["what"])
    return found[1] if found and "failed" not in fault else None


def first_answers(
    records: Sequence[Record], faults: Sequence[dict[str, Any]]
) -> dict[str, list[float]]:
    """Return, by action and role, the seconds from each fault to the first answer after it.

    It is the end of the first complete answer to a request that was sent after the fault.
    """
    answers = sorted((r.ended, r.sent) for r in records if r.succeeded and r.ended and r.sent)
    found = []
    for fault in faults:
        if "failed" in fault:
            continue
        ends = [ended for ended, sent in answers if sent >= fault["at"]]
        if ends:
            found.append((_label(fault["what"]), ends[0] - fault["at"]))
    found.sort()
    return {label: [s for _, s in group] for label, group in groupby(found, lambda one: one[0])}


def _label(what: str) -> str:
    """Return action and role of a fault, such as ``kill decode``."""
    words = what.partition(" for ")[0].split()
    action = "cut" if words[0] == "run" else words[0]
    return f"{action} {words[-1].partition('-')[0]}"


def _kind(record: Record) -> str:
    return f"{record.failure}: {record.detail[:160]}"
