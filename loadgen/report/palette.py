"""Colours by name; the style sheet defines their values for light, dark and print.

matplotlib needs numeric colours. Each name is therefore drawn in a unique placeholder colour, which
is replaced by a CSS variable in the finished SVG.

Blue, orange, green, purple and ochre are distinguishable with colour vision deficiency. Lines in
one plot also differ in dashes or markers.
"""

import re

NAMES = (
    "ink", "muted", "grid", "shade", "blue", "orange", "green", "purple", "ochre", "slate", "red",
)  # fmt: skip
_NUMBERS = {name: f"#fe00{number:02x}" for number, name in enumerate(NAMES)}
_NUMBER = re.compile("#fe00([0-9a-f]{2})")

OF_MEASURE = {
    "ttft": "blue",
    "itl": "orange",
    "e2e": "green",
    "tpot": "purple",
    "normalized_latency": "ochre",
}
"""Colour of each measure, in all reports."""


def placeholder_colour(name: str) -> str:
    """Return the placeholder with which matplotlib draws a named colour; see `variables`."""
    return _NUMBERS[name]


def variables(svg: str) -> str:
    """Return the SVG with placeholder colours replaced by CSS variables."""
    return _NUMBER.sub(lambda found: f"var(--{NAMES[int(found[1], 16)]})", svg)
