"""Report of one run."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.measures import BY_NAME, MEASURES, Goodput, Objective, Window
from loadgen.record import Record
from loadgen.report import tile
from loadgen.report.cdf import cdfs
from loadgen.report.environment import lines, subtitle
from loadgen.report.page import render
from loadgen.report.timeline import timeline

_STAGE_COLOURS = ("blue", "orange", "green", "purple", "ochre", "slate", "red")
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")


@dataclass(frozen=True)
class FailureRow:
    """Failed requests of one kind, with their most common message."""

    name: str
    count: int
    share: float
    example: str


@dataclass(frozen=True)
class Stage:
    """Mean time of requests in one stage of the server, as reported by the server."""

    name: str
    seconds: float
    share: float
    colour: str


def run_page(records: Sequence[Record], document: dict[str, Any]) -> str:
    """Return the HTML report of a run read by `loadgen.files.read_run`.

    Args:
        records: all requests, including those outside the window.
        document: summary; optional keys are ``faults`` ([{"at": seconds, "what": text}]),
            ``server`` ({"stages": {name: mean seconds}, "kv_bytes": {"raw", "wire", "ratio"}}),
            ``objectives`` ({measure: seconds}) and ``check`` (`loadgen.check.Check.as_json`).
    """
    window = Window(**document["window"])
    due = window.due(records)
    objectives = _objectives(document)
    attained = [
        (one.measure.title, one.seconds, Goodput.of(records, window, [one]).attainment)
        for one in objectives
    ]
    server = document.get("server") or {}
    return render(
        "run.html.j2",
        document=document,
        subtitle=subtitle(document["manifest"]),
        manifest=lines(document["manifest"]),
        tiles=tile.of_run(document),
        columns=_COLUMNS,
        measures=[(one, document["measures"].get(one.name)) for one in MEASURES],
        attained=attained,
        cdfs=cdfs(due, {one.measure.name: one.seconds for one in objectives}),
        timeline=timeline(records, window, document.get("faults") or ()),
        stages=_stages(server.get("stages") or {}),
        kv_bytes=server.get("kv_bytes"),
        check=document.get("check"),
        failures=_failures(records, window, document["outcomes"]),
    )


def _objectives(document: dict[str, Any]) -> list[Objective]:
    return [Objective(BY_NAME[name], s) for name, s in document.get("objectives", {}).items()]


def _failures(
    records: Sequence[Record], window: Window, outcomes: dict[str, Any]
) -> list[FailureRow]:
    seen: dict[str, Counter[str]] = {}
    for record in records:
        if record.failure is not None and window.has(record.due):
            seen.setdefault(str(record.failure), Counter())[record.detail] += 1
    return [
        FailureRow(name, count, count / outcomes["total"], _most_common(seen.get(name)))
        for name, count in sorted(outcomes["failed"].items(), key=lambda one: -one[1])
    ]


def _most_common(details: Counter[str] | None) -> str:
    return details.most_common(1)[0][0] if details else ""


def _stages(seconds: dict[str, float]) -> list[Stage]:
    whole = sum(seconds.values()) or 1.0
    return [
        Stage(name, taken, taken / whole, _STAGE_COLOURS[number % len(_STAGE_COLOURS)])
        for number, (name, taken) in enumerate(seconds.items())
    ]
