"""Report of one run."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from loadgen.errors import UsageError
from loadgen.knee import saturation
from loadgen.measures import BY_NAME, MEASURES, Goodput, Objective, Window
from loadgen.number import plain
from loadgen.objectives import Requirement
from loadgen.record import Failure, Record
from loadgen.report import tile
from loadgen.report.cdf import cdfs
from loadgen.report.environment import lines, subtitle
from loadgen.report.page import render
from loadgen.report.timeline import timeline
from loadgen.report.turns import turns_plot

_STAGE_COLOURS = ("blue", "orange", "green", "purple", "ochre", "slate", "red")
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")


@dataclass(frozen=True)
class FailureRow:
    """Failed requests of one kind, with their most common message.

    Attributes:
        name: name in the summary document.
        words: what happened to the requests.
        others: number of other messages.
    """

    name: str
    words: str
    count: int
    share: float
    example: str
    others: int


@dataclass(frozen=True)
class RequirementRow:
    """A requirement as it was given, and its bound and the measured value with their unit."""

    text: str
    bound: str
    found: str
    met: bool


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
    bounds = {one.measure.name: one.seconds for one in objectives}
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
        saturation=_saturation(document),
        requirements=_requirements(document.get("requirements") or {}),
        cdfs=cdfs(due, bounds),
        turns=document.get("turns") or (),
        turns_plot=turns_plot(document.get("turns") or ()),
        cached=document.get("cached"),
        timeline=timeline(records, window, document.get("faults") or (), bounds),
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
    rows = []
    for name, count in sorted(outcomes["failed"].items(), key=lambda one: -one[1]):
        details = seen.get(name) or Counter({"": count})
        (example, _), *others = details.most_common()
        share = count / outcomes["total"]
        rows.append(FailureRow(name, Failure(name).words, count, share, example, len(others)))
    return rows


def _saturation(document: dict[str, Any]) -> str | None:
    """Return how requests in flight grew if the server did not keep up with an open loop."""
    if document.get("concurrency") is not None:
        return None
    arrivals = document.get("arrivals", document["throughput"]["offered"])
    return saturation(arrivals, document["in_flight"]["growth"])


def _requirements(verdicts: dict[str, dict[str, Any]]) -> list[RequirementRow]:
    rows = []
    for text, verdict in verdicts.items():
        bound, found = "", plain(verdict["found"])
        with suppress(UsageError):  # the text is from a file
            requirement = Requirement.parse(text)
            bound, found = requirement.words, requirement.figure.format.with_unit(verdict["found"])
        rows.append(RequirementRow(text, bound, found, bool(verdict["met"])))
    return rows


def _stages(seconds: dict[str, float]) -> list[Stage]:
    whole = sum(seconds.values()) or 1.0
    return [
        Stage(name, taken, taken / whole, _STAGE_COLOURS[number % len(_STAGE_COLOURS)])
        for number, (name, taken) in enumerate(seconds.items())
    ]
