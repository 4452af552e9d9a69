"""Timeline of a run: request rates, requests in flight, latencies, and output tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from loadgen.measures import Window
from loadgen.record import Record
from loadgen.report.bins import edges_of
from loadgen.report.latencies import Latencies, latencies
from loadgen.report.palette import OF_MEASURE, placeholder_colour
from loadgen.report.plot import NARROW, WIDE, Drawing, Key, Plot
from loadgen.report.scale import Scale

_MAX_BINS = 100
_PANEL, _TICKS = 104, 3

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Timeline:
    """Means over equal time bins of a run.

    Attributes:
        edges: bin edges in seconds, shape (bins + 1,).
        tokens: output tokens per second, shape (bins,).
        in_flight: requests in flight, shape (bins,).
        sent, answered, failed: requests per second, shape (bins,).
    """

    edges: Floats
    tokens: Floats
    in_flight: Floats
    sent: Floats
    answered: Floats
    failed: Floats

    @classmethod
    def of(cls, records: Sequence[Record]) -> Self | None:
        """Return the timeline, or None if nothing was sent."""
        sent = _times(record.sent for record in records)
        if not sent.size:
            return None
        last = max(max(r.sent or 0.0, r.ended or 0.0, r.last or 0.0) for r in records)
        edges = edges_of(last, _MAX_BINS)
        left = _times(last if r.ended is None else r.ended for r in records if r.sent is not None)
        width = edges[1] - edges[0]
        return cls(
            edges=edges,
            tokens=_tokens(records, edges) / width,
            in_flight=np.diff(_seconds_after(sent, edges) - _seconds_after(left, edges)) / width,
            sent=_count(sent, edges) / width,
            answered=_count(_times(r.ended for r in records if r.succeeded), edges) / width,
            failed=_count(_times(r.ended for r in records if r.failure), edges) / width,
        )


def timeline(
    records: Sequence[Record],
    window: Window,
    faults: Sequence[dict[str, Any]],
    objectives: Mapping[str, float],
) -> Plot:
    """Return the timeline plot; it contains no drawings if nothing was sent.

    Args:
        faults: injected faults, such as ``{"at": 30.0, "what": "kill prefill"}``.
        objectives: bounds in seconds by measure name.
    """
    found = Timeline.of(records)
    if found is None:
        return Plot("", (), note="Nothing was sent.")
    delays = latencies(records, float(found.edges[-1]))
    shown = {
        one.measure.name: objectives[one.measure.name]
        for one in delays
        if objectives.get(one.measure.name, np.inf) <= np.nanmax(one.p99)
    }
    at = [float(fault["at"]) for fault in faults]
    drawings = tuple(
        _drawing(found, delays, window, shown, at, name, width)
        for name, width in (("timeline-wide", WIDE), ("timeline-narrow", NARROW))
    )
    keys = [Key("sent", "blue"), Key("answered", "green"), Key("failed", "red", "dashed")]
    note = f"Means over each {found.edges[1] - found.edges[0]:g} s."
    if delays:
        keys += [Key("p50", "muted"), Key("p99", "muted", "dashed")]
        width = delays[0].edges[1] - delays[0].edges[0]
        note += f" Latencies of each {width:g} s, of requests by the time at which they were due."
    if shown:
        keys.append(Key("objective", "red", "dotted"))
    if window.begin > 0 or window.end < found.edges[-1]:
        keys.append(Key("not measured", "shade", "area"))
    keys += [Key(label, "ink", "dotted") for label in _fault_labels(faults)]
    return Plot("", drawings, tuple(keys), note)


def _fault_labels(faults: Sequence[dict[str, Any]]) -> list[str]:
    """Return a label for each kind of fault, with all its times."""
    times: dict[str, list[str]] = {}
    for fault in faults:
        kind = fault["what"] + (" (failed)" if "failed" in fault else "")
        times.setdefault(kind, []).append(f"{float(fault['at']):.4g}")
    return [f"{', '.join(at)} s: {kind}" for kind, at in times.items()]


def _drawing(
    found: Timeline,
    delays: Sequence[Latencies],
    window: Window,
    objectives: Mapping[str, float],
    faults: Sequence[float],
    name: str,
    width: int,
) -> Markup:
    drawing = Drawing(width, panel=_PANEL, panels=3 + len(delays))
    end = float(found.edges[-1])
    time = Scale.linear(end / 1.04, ticks=10 if width == WIDE else 5)
    for number, axes in enumerate(drawing.panels):
        time.along_x(axes, labels=number == len(drawing.panels) - 1)
        for begin, until in ((0.0, window.begin), (window.end, end)):
            if begin < min(until, end):
                axes.axvspan(
                    begin, min(until, end), color=placeholder_colour("shade"), linewidth=0, zorder=0
                )
        for at in faults:
            axes.axvline(at, color=placeholder_colour("ink"), linestyle=":", linewidth=1.6)
    rates, in_flight, *others = range(len(drawing.panels))
    outcomes = (
        (found.sent, "blue", "-"),
        (found.answered, "green", "-"),
        (found.failed, "red", "--"),
    )
    _draw(drawing, rates, "requests per second", found.edges, outcomes)
    _draw(
        drawing, in_flight, "requests in flight", found.edges, ((found.in_flight, "purple", "-"),)
    )
    for number, one in zip(others, delays, strict=False):
        _draw_latencies(drawing, number, one, objectives.get(one.measure.name))
    tokens = ((found.tokens, "slate", "-"),)
    _draw(drawing, others[-1], "output tokens per second", found.edges, tokens)
    drawing.label_x("time since the start, s")
    return drawing.svg(name, "Request rates, requests in flight, latencies and tokens over time")


def _draw(
    drawing: Drawing,
    panel: int,
    label: str,
    edges: Floats,
    lines: Sequence[tuple[Floats, str, str]],
) -> None:
    """Draw values of each bin, filled to the axis if there is a single line."""
    axes = drawing.panels[panel]
    Scale.linear(max(float(values.max()) for values, _, _ in lines), ticks=_TICKS).along_y(axes)
    drawing.label_y(panel, label)
    for values, colour, style in lines:
        if len(lines) == 1:
            axes.stairs(values, edges, color=placeholder_colour(colour), fill=True, alpha=0.18)
        axes.stairs(values, edges, color=placeholder_colour(colour), linewidth=1.6, linestyle=style)


def _draw_latencies(
    drawing: Drawing, panel: int, found: Latencies, objective: float | None
) -> None:
    axes = drawing.panels[panel]
    colour = placeholder_colour(OF_MEASURE[found.measure.name])
    p50, p99 = 1e3 * found.p50, 1e3 * found.p99
    Scale.linear(float(np.nanmax(p99)), ticks=_TICKS).along_y(axes)
    drawing.label_y(panel, f"{found.measure.title[0].lower()}{found.measure.title[1:]}, ms")
    axes.stairs(p99, found.edges, baseline=p50, color=colour, fill=True, alpha=0.14)
    for values, style in ((p50, "-"), (p99, "--")):
        axes.stairs(
            values, found.edges, baseline=None, color=colour, linewidth=1.6, linestyle=style
        )
    if objective is not None:
        axes.axhline(1e3 * objective, color=placeholder_colour("red"), linestyle=":", linewidth=1.6)


def _times(times: Any) -> Floats:
    return np.sort(np.fromiter((at for at in times if at is not None), dtype=np.float64))


def _count(times: Floats, edges: Floats) -> Floats:
    return np.histogram(times, edges)[0].astype(np.float64)


def _seconds_after(times: Floats, edges: Floats) -> Floats:
    """Return, for each edge, the sum of ``edge - time`` over all times before the edge.

    Args:
        times: times in increasing order.
    """
    sums = np.concatenate(([0.0], np.cumsum(times)))
    before = np.searchsorted(times, edges)
    return np.asarray(before * edges - sums[before], dtype=np.float64)


def _tokens(records: Sequence[Record], edges: Floats) -> Floats:
    """Return the number of output tokens per bin, counted as in `loadgen.measures.throughput`."""
    times = np.fromiter(chain.from_iterable(r.times for r in records), dtype=np.float64)
    counts = np.fromiter(chain.from_iterable(r.counts for r in records), dtype=np.float64)
    shares = [r.output_tokens / max(sum(r.counts), 1) for r in records]
    weights = counts * np.repeat(shares, [len(r.times) for r in records])
    return np.asarray(np.histogram(times, edges, weights=weights)[0], dtype=np.float64)
