"""Cumulative distribution plots of a run's latencies."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from loadgen.measures import E2E, E2E_SENT, ITL, TTFT, TTFT_SENT, Measure
from loadgen.number import ms
from loadgen.record import Record
from loadgen.report.palette import OF_MEASURE, placeholder_colour
from loadgen.report.plot import Drawing, Key, Plot
from loadgen.report.scale import Scale

_POINTS = 300
_SHOWN = ((TTFT, TTFT_SENT), (ITL, None), (E2E, E2E_SENT))
_MIN_OF_MEDIAN = 1e-2
"""Minimum lower end of a logarithmic axis, relative to the median, because values may be 0."""

Floats = NDArray[np.float64]


def cdfs(due: Sequence[Record], objectives: dict[str, float]) -> list[Plot]:
    """Return one plot for each measure with values.

    Args:
        due: measured records.
        objectives: bounds in seconds by measure name.
    """
    plots = []
    for measure, from_send in _SHOWN:
        values = _values(measure, due)
        if values.size:
            beside = _values(from_send, due) if from_send else values[:0]
            plots.append(_plot(measure, values, beside, objectives.get(measure.name)))
    return plots


def distribution(values: Floats) -> tuple[Floats, Floats]:
    """Return sorted values and their cumulative percentages, for a step plot.

    Large samples are reduced to evenly spaced quantiles, denser above the 99th percentile.
    """
    ordered = np.sort(values)
    if ordered.size <= _POINTS:
        return ordered, 100 * np.arange(1, ordered.size + 1) / ordered.size
    shares = np.union1d(np.linspace(0, 1, _POINTS), np.linspace(0.99, 1, _POINTS // 5))
    return np.quantile(ordered, shares), 100 * shares


def _values(measure: Measure, due: Sequence[Record]) -> Floats:
    return np.fromiter((value for one in due for value in measure.of(one)), dtype=np.float64)


def _plot(measure: Measure, values: Floats, beside: Floats, objective: float | None) -> Plot:
    median, tail = np.percentile(values, (50, 99))
    low = float(max(values.min(), median * _MIN_OF_MEDIAN))
    high = float(max(values.max(), objective or 0.0))
    scale = Scale.fitting(1e3 * low, 1e3 * high)
    drawing = Drawing()
    colour = OF_MEASURE[measure.name]
    axes = drawing.panels[0]
    scale.along_x(axes)
    Scale.percentages().along_y(axes)
    keys = [Key("from the due time", colour) if beside.size else Key("each gap", colour)]
    if objective is not None:
        axes.axvline(1e3 * objective, color=placeholder_colour("red"), linestyle=":", linewidth=1.6)
    for sample, name, width, style in (
        (values, colour, 2.2, "solid"),
        (beside, "ink", 1.0, (0, (3, 4))),
    ):
        if sample.size:
            at, share = distribution(np.maximum(sample, low))
            at, share = np.append(at[0], at), np.append(0.0, share)
            axes.step(
                1e3 * at,
                share,
                where="post",
                color=placeholder_colour(name),
                lw=width,
                linestyle=style,
            )
    if beside.size:
        keys.append(Key("from the send", "ink", "dashed"))
    if objective is not None:
        keys.append(Key(f"objective, {ms(objective)} ms", "red", "dotted"))
    axes.plot(
        [1e3 * median, 1e3 * tail], [50, 99], "o", color=placeholder_colour(colour), markersize=6
    )
    drawing.label_y(0, "share, %")
    drawing.label_x(f"{measure.title}, ms{scale.label_suffix}")
    alt_text = f"{measure.title}: p50 {ms(median)} ms, p99 {ms(tail)} ms"
    svg = drawing.svg(f"cdf-{measure.name}", alt_text)
    note = f"p50 {ms(median)} ms, p99 {ms(tail)} ms (dots), of {values.size:,}"
    return Plot(measure.title, (svg,), tuple(keys), note)
