"""The plot of `headrace kv-statistics`. Only here is matplotlib, extra `plots`."""

from collections.abc import Sequence
from pathlib import Path

from services.offline.kv_statistics import MODES, KVStatistics, PlaneStatistics, PlottingMissing

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise PlottingMissing("plots need matplotlib: run `pip install -e '.[plots]'`") from error

_COLORS = dict(zip((*MODES, "bound"), ("#56b4e9", "#0072b2", "#d55e00", "#555555"), strict=True))
"""Okabe and Ito's, which stay apart for the color-blind."""
_MARKERS = dict(zip(MODES, (("s", 6), ("^", 3), ("o", 3.5)), strict=True))
"""The first two modes nearly coincide: the one's triangles lie in the other's squares."""
_BANDS = (
    (0.001, 0.999, "#deebf7", "99.8 %"),
    (0.05, 0.95, "#9ecae1", "90 %"),
    (0.25, 0.75, "#4292c6", "50 %"),
)
_BIAS = 127


def draw(statistics: KVStatistics, path: Path) -> None:
    """Writes an SVG: above, the ratio of each layer's K and V; below, where their exponents lie."""
    style = matplotlib.rc_context(
        {
            "font.size": 9,
            "font.sans-serif": ["DejaVu Sans", "Arial"],
            "axes.spines.top": False,
            "axes.spines.right": False,
            "svg.fonttype": "none",  # text stays text: smaller, and it can be searched
            "svg.hashsalt": "headrace",  # equal statistics, equal bytes
        }
    )
    with style:
        figure = Figure(figsize=(9, 5.6), layout="constrained", facecolor="white")
        above, below = figure.subplots(2, 2, sharex=True, sharey="row", height_ratios=(3, 2))
        for plane, ratio, exponents in zip("kv", above, below, strict=True):
            planes = [entry for entry in statistics.planes if entry.plane == plane]
            _draw_ratios(ratio, planes)
            _draw_exponents(exponents, planes)
            ratio.set_title(plane.upper())
            exponents.set_xlabel("layer")
        above[0].set_ylabel("ratio, whole payload")
        below[0].set_ylabel("exponent, unbiased")
        lines = above[0].get_lines()
        figure.legend(handles=lines, loc="outside upper center", ncols=len(lines), frameon=False)
        below[0].legend(loc="lower left", ncols=4, frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _draw_ratios(axes: Axes, planes: Sequence[PlaneStatistics]) -> None:
    layers = [plane.layer for plane in planes]
    bounds = [plane.entropy_ratio for plane in planes]
    axes.plot(layers, bounds, "--", color=_COLORS["bound"], label="order-0 entropy bound")
    for name in MODES:
        ratios = [plane.codings[name].ratio for plane in planes]
        marker, size = _MARKERS[name]
        axes.plot(
            *(layers, ratios),
            color=_COLORS[name],
            marker=marker,
            markersize=size,
            linewidth=1.2,
            label=name,
        )
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)


def _draw_exponents(axes: Axes, planes: Sequence[PlaneStatistics]) -> None:
    layers = [plane.layer for plane in planes]
    for low, high, color, name in _BANDS:
        axes.fill_between(
            layers,
            [quantile(plane, low) - _BIAS - 0.5 for plane in planes],
            [quantile(plane, high) - _BIAS + 0.5 for plane in planes],
            step="mid",
            color=color,
            linewidth=0,
            label=name,
        )
    medians = [quantile(plane, 0.5) - _BIAS for plane in planes]
    axes.step(layers, medians, where="mid", color="black", linewidth=1.2, label="median")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)


def quantile(plane: PlaneStatistics, share: float) -> int:
    """The smallest exponent, biased, that at least this share of the plane does not exceed."""
    wanted = share * sum(plane.exponents.values())
    passed = 0
    for exponent, count in sorted(plane.exponents.items()):
        passed += count
        if passed >= wanted:
            return exponent
    raise ValueError(f"no share of a plane is {share}")
