"""Plots as inline SVG, with selectable text, colours from CSS variables, and unique ids."""

import io
import re
from dataclasses import dataclass
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadgen.report.palette import placeholder_colour, variables

NARROW, WIDE = 360, 1040
"""Nominal widths of drawings in CSS pixels. Pages scale drawings, including their text."""
_FONT = 12
_LEFT, _RIGHT, _TOP, _BOTTOM, _BETWEEN = 48, 18, 28, 46, 36
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": ["sans-serif"],
    "font.size": _FONT,
    "path.simplify": True,
    "axes.formatter.use_mathtext": False,
}
_UNWANTED = re.compile(r"^.*?(?=<svg)|<metadata>.*?</metadata>|<style.*?</style>", re.DOTALL)
_SIZE = re.compile(r'(<svg[^>]*?) width="[^"]*"| height="[^"]*"(?=[^>]*viewBox)')
_ID = re.compile(r'(\bid="|url\(#|href="#)')
_FONT_STYLE = re.compile(r"font: [^;\"]*;?\s*|font-(?:size|family): [^;\"]*;?\s*")


@dataclass(frozen=True)
class Key:
    """Entry of a legend, which is placed outside the drawing.

    Attributes:
        colour: name in the palette.
        look: "line", "dashed", "dotted", "area", "hollow" or "cross".
    """

    label: str
    colour: str
    look: str = "line"


@dataclass(frozen=True)
class Plot:
    """Plot with title and legend.

    Attributes:
        drawings: a single drawing, or two: for wide and for narrow screens.
        keys: entries of the legend.
        note: line of text below the plot.
    """

    title: str
    drawings: tuple[Markup, ...]
    keys: tuple[Key, ...] = ()
    note: str = ""


class Drawing:
    """Vertically stacked panels with a common x axis.

    Margins are fixed, so that adjacent plots align, and all text is horizontal, so that the layout
    does not depend on the reader's font.
    """

    def __init__(self, width: int = NARROW, *, panel: int = 166, panels: int = 1) -> None:
        self._height = _TOP + panels * panel + (panels - 1) * _BETWEEN + _BOTTOM
        self._width = width
        with matplotlib.rc_context(_SETTINGS):
            self._figure = Figure(figsize=(width / 72, self._height / 72))
            self.panels = [self._add(number, panel) for number in range(panels)]

    def _add(self, number: int, panel: int) -> Axes:
        top = _TOP + number * (panel + _BETWEEN)
        inner = self._width - _LEFT - _RIGHT
        axes = self._figure.add_axes((
            _LEFT / self._width, 1 - (top + panel) / self._height,
            inner / self._width, panel / self._height,
        ))  # fmt: skip
        axes.patch.set_visible(False)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(placeholder_colour("muted"))
        axes.grid(color=placeholder_colour("grid"), linewidth=1)
        axes.set_axisbelow(True)
        axes.tick_params(
            length=0,
            pad=8,
            colors=placeholder_colour("muted"),
            labelcolor=placeholder_colour("muted"),
            labelsize=_FONT,
        )
        return axes

    def label_y(self, panel: int, text: str) -> None:
        """Add the label of a panel's y axis, left-aligned above the axis."""
        top = self.panels[panel].get_position().y1
        at = 1 / self._width, top + 12 / self._height
        self._figure.text(*at, text, color=placeholder_colour("ink"), parse_math=False)

    def label_x(self, text: str) -> None:
        """Label the x axis, below the lowest panel."""
        at = 1 - _RIGHT / self._width, 5 / self._height
        self._figure.text(*at, text, color=placeholder_colour("ink"), ha="right", parse_math=False)

    def svg(self, name: str, alt_text: str) -> Markup:
        """Return the drawing as SVG.

        Args:
            name: unique name in the page.
            alt_text: description for screen readers.
        """
        written = io.StringIO()
        self._figure.patch.set_visible(False)
        with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": name}):
            self._figure.savefig(written, format="svg", metadata={"Date": None})
        text = _UNWANTED.sub("", written.getvalue())
        text = _FONT_STYLE.sub("", _SIZE.sub(r"\1", text))
        text = _ID.sub(rf"\g<1>{name}-", text)
        label = f'<svg role="img" aria-label="{escape(alt_text)}"'
        return Markup(variables(text).replace("<svg", label, 1).strip())
