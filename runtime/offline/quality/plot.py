"""Plot of quality against bytes per token. Only this module needs matplotlib (extra `plots`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.errors import QualityError
from runtime.offline.quality.measure import Result

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise QualityError("plots need matplotlib: run `pip install -e '.[plots]'`") from error

_COLOR, _FLOOR = "#0072b2", "#555555"
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans", "Arial"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",  # text as text, not as paths: smaller and searchable
    "svg.hashsalt": "headrace",  # reproducible element ids
}


def draw(results: Sequence[Result], path: Path) -> None:
    """Write an SVG of KL divergence, perplexity change and token match against bytes per token.

    The file is reproducible: equal results give bitwise identical files.
    """
    outputs = [one for one in results if one.outputs]
    with matplotlib.rc_context(_STYLE):
        count = 3 if outputs else 2
        figure = Figure(figsize=(3.3 * count, 3), layout="constrained", facecolor="white")
        panels = figure.subplots(1, count)
        _draw_kl(panels[0], results)
        _draw_perplexity(panels[1], results)
        if outputs:
            _draw_match(panels[2], outputs)
        for axes in panels:
            axes.set_xlabel("bytes per token")
            axes.set_xlim(left=0, right=1.25 * max(one.bytes_per_token for one in results))
            axes.grid(color="#dddddd", linewidth=0.6)
            axes.set_axisbelow(True)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _draw_kl(axes: Axes, results: Sequence[Result]) -> None:
    axes.set_title("KL divergence, nats")
    axes.set_yscale("log")
    lossy = [one for one in results if one.quality.kl_mean > 0]
    points = [(one.bytes_per_token, one.quality.kl_mean) for one in lossy]
    _points(axes, points, lossy)
    floor = max(one.noise.kl_mean for one in results)
    if floor > 0:
        axes.axhline(floor, color=_FLOOR, linestyle="--", linewidth=1)
        axes.annotate("order of summation", (0, floor), (2, 3), textcoords="offset points")


def _draw_perplexity(axes: Axes, results: Sequence[Result]) -> None:
    axes.set_title("change of perplexity, %")
    points = [(one.bytes_per_token, 100 * one.quality.perplexity_change) for one in results]
    for (x, _), one in zip(points, results, strict=True):
        bounds = 100 * one.quality.change_low, 100 * one.quality.change_high
        axes.plot((x, x), bounds, color=_COLOR, linewidth=1)
    axes.axhline(0, color=_FLOOR, linewidth=1)
    _points(axes, points, results)


def _draw_match(axes: Axes, results: Sequence[Result]) -> None:
    axes.set_title("equal tokens of greedy outputs, %")
    axes.set_ylim(0, 102)
    matches = [one.outputs.mean_token for one in results if one.outputs]
    points = [(one.bytes_per_token, 100 * m) for one, m in zip(results, matches, strict=True)]
    _points(axes, points, results)


def _points(axes: Axes, points: Sequence[tuple[float, float]], results: Sequence[Result]) -> None:
    axes.plot(*zip(*points, strict=True), "o", color=_COLOR, markersize=4)
    for point, one in zip(points, results, strict=True):
        axes.annotate(one.name, point, (5, 3), textcoords="offset points")
