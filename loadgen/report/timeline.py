"""Timeline of a run: token rate, requests in flight, and rates of requests sent and ended."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from loadgen.measures import Window
from loadgen.record import Record
from loadgen.report.palette import paint
from loadgen.report.plot import NARROW, WIDE, Drawing, Key, Plot
from loadgen.report.scale import Scale

_MAX_BINS = 100
_WIDTHS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 3600.0)

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
        edges = _edges(last)
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


def timeline(records: Sequence[Record], window: Window, faults: Sequence[dict[str, Any]]) -> Plot:
    """Return the timeline plot; it contains no drawings if nothing was sent.

    Args:
        faults: injected faults, such as ``{"at": 30.0, "what": "kill prefill"}``.
    """
    found = Timeline.of(records)
    if found is None:
        return Plot("", (), note="nothing was sent")
    at = [float(fault["at"]) for fault in faults]
    drawings = tuple(
        _drawing(found, window, at, name, width)
        for name, width in (("timeline-wide", WIDE), ("timeline-narrow", NARROW))
    )
    keys = [Key("sent", "blue"), Key("answered", "green"), Key("failed", "red", "dashed")]
    if window.begin > 0 or window.end < found.edges[-1]:
        keys.append(Key("not measured", "shade", "area"))
    keys += [Key(label, "ink", "dotted") for label in _fault_labels(faults)]
    width = f"{found.edges[1] - found.edges[0]:g}"
    return Plot("", drawings, tuple(keys), f"Means over each {width} s.")


def _fault_labels(faults: Sequence[dict[str, Any]]) -> list[str]:
    """Return a label for each kind of fault, with all its times."""
    times: dict[str, list[str]] = {}
    for fault in faults:
        kind = fault["what"] + (" (failed)" if "failed" in fault else "")
        times.setdefault(kind, []).append(f"{float(fault['at']):.4g}")
    return [f"{', '.join(at)} s: {kind}" for kind, at in times.items()]


def _drawing(found: Timeline, window: Window, faults: list[float], name: str, width: int) -> Markup:
    drawing = Drawing(width, panel=104, panels=3)
    end = float(found.edges[-1])
    time = Scale.linear(end / 1.04, ticks=10 if width == WIDE else 5)
    lines = (
        (("output tokens per second", found.tokens, "slate", "-"),),
        (("requests in flight", found.in_flight, "purple", "-"),),
        (
            ("requests per second", found.sent, "blue", "-"),
            ("", found.answered, "green", "-"),
            ("", found.failed, "red", "--"),
        ),
    )
    for panel, (axes, shown) in enumerate(zip(drawing.panels, lines, strict=True)):
        time.along_x(axes, labels=panel == len(lines) - 1)
        Scale.linear(max(float(values.max()) for _, values, _, _ in shown), ticks=3).along_y(axes)
        drawing.label_y(panel, shown[0][0])
        for begin, until in ((0.0, window.begin), (window.end, end)):
            if begin < min(until, end):
                axes.axvspan(begin, min(until, end), color=paint("shade"), linewidth=0, zorder=0)
        for _, values, colour, style in shown:
            if panel < 2:
                axes.stairs(values, found.edges, color=paint(colour), fill=True, alpha=0.18)
            axes.stairs(values, found.edges, color=paint(colour), linewidth=1.6, linestyle=style)
        for at in faults:
            axes.axvline(at, color=paint("ink"), linestyle=":", linewidth=1.6)
    drawing.label_x("time since the start, s")
    return drawing.svg(name, "Output tokens, requests in flight and request rates over time")


def _edges(last: float) -> Floats:
    last = max(last, _WIDTHS[0])
    width = next((one for one in _WIDTHS if last / one <= _MAX_BINS), _WIDTHS[-1])
    return width * np.arange(math.ceil(last / width - 1e-9) + 1, dtype=np.float64)


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
