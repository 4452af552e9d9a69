"""Plot of `headrace kv-statistics`. Only this module needs matplotlib (extra `plots`)."""

import sys
from collections.abc import Sequence
from pathlib import Path

from services.common.errors import SettingsError
from services.offline.kv_measure import MODES, KVStatistics, PlaneStatistics

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise SettingsError(
        f"plots need matplotlib: run `{sys.executable} -m pip install 'headrace[plots]'`"
    ) from error

_COLORS = dict(zip((*MODES, "bound"), ("#56b4e9", "#0072b2", "#d55e00", "#555555"), strict=True))
"""Palette of Okabe and Ito, which color-blind readers can distinguish."""
_MARKERS = dict(zip(MODES, (("s", 6), ("^", 3), ("o", 3.5)), strict=True))
"""Marker and size. Small triangles stay visible inside squares where two modes coincide."""
_BANDS = (
    (0.001, 0.999, "#deebf7", "99.8 %"),
    (0.05, 0.95, "#9ecae1", "90 %"),
    (0.25, 0.75, "#4292c6", "50 %"),
)
_BIAS = 127


def draw(statistics: KVStatistics, path: Path) -> None:
    """Write an SVG of compression ratios (top) and exponents (bottom) of each layer's K and V.

    The file is reproducible: equal statistics give bitwise identical files.
    """
    style = matplotlib.rc_context(
        {
            "font.size": 9,
            "font.sans-serif": ["DejaVu Sans", "Arial"],
            "axes.spines.top": False,
            "axes.spines.right": False,
            "svg.fonttype": "none",  # text as text, not as paths: smaller and searchable
            "svg.hashsalt": "headrace",  # reproducible element ids
        }
    )
    with style:
        figure = Figure(figsize=(9, 5.6), layout="constrained", facecolor="white")
        top, bottom = figure.subplots(2, 2, sharex=True, sharey="row", height_ratios=(3, 2))
        for plane, ratio, exponents in zip("kv", top, bottom, strict=True):
            planes = [entry for entry in statistics.planes if entry.plane == plane]
            _draw_ratios(ratio, planes)
            _draw_exponents(exponents, planes)
            ratio.set_title(plane.upper())
            exponents.set_xlabel("layer")
        top[0].set_ylabel("ratio, whole payload")
        bottom[0].set_ylabel("exponent, unbiased")
        lines = top[0].get_lines()
        figure.legend(handles=lines, loc="outside upper center", ncols=len(lines), frameon=False)
        bottom[0].legend(loc="lower left", ncols=4, frameon=False)
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
    """Return a quantile of the biased exponents.

    This is the smallest exponent for which at least the fraction ``share`` of the elements have
    that exponent or a smaller one.

    Raises:
        ValueError: if ``share`` is above 1.
    """
    target = share * sum(plane.exponents.values())
    cumulative = 0
    for exponent, count in sorted(plane.exponents.items()):
        cumulative += count
        if cumulative >= target:
            return exponent
    raise ValueError(f"share must be at most 1, not {share}")
