"""Time to first token of chats by turn."""

from collections.abc import Mapping, Sequence
from typing import Any

from loadgen.report.palette import placeholder_colour
from loadgen.report.plot import Drawing, Key, Plot
from loadgen.report.scale import Scale

_PERCENTILES = (("p50", "blue"), ("p90", "green"), ("p99", "orange"))
_MAX_TICKS = 12


def turns_plot(turns: Sequence[Mapping[str, Any]]) -> Plot | None:
    """Plot percentiles of the time to first token against the turn; None without values.

    Args:
        turns: ``turns`` of a summary document.
    """
    measured = [turn for turn in turns if turn["ttft"]]
    if not measured:
        return None
    numbers = [turn["turn"] for turn in measured]
    lines = {name: [1e3 * turn["ttft"][name] for turn in measured] for name, _ in _PERCENTILES}
    values = [value for line in lines.values() for value in line]
    drawing = Drawing()
    axes = drawing.panels[0]
    step = -(-max(numbers) // _MAX_TICKS)
    ticks = tuple(range(step, max(numbers) + 1, step))
    Scale(0.0, max(numbers) + 0.5, ticks).along_x(axes)
    upward = Scale.fitting(min(values), max(values))
    upward.along_y(axes)
    for name, colour in _PERCENTILES:
        shown = placeholder_colour(colour)
        axes.plot(numbers, lines[name], "o-", color=shown, ms=5, linewidth=1.8, clip_on=False)
    drawing.label_y(0, f"ms{upward.label_suffix}")
    drawing.label_x("turn")
    title = "Time to first token by turn"
    keys = tuple(Key(name, colour) for name, colour in _PERCENTILES)
    return Plot(title, (drawing.svg("turns", f"{title} of the chats"),), keys)
