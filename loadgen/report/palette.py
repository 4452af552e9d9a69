"""Colours by name: a page says in its style what each is in the light, in the dark and on paper.

matplotlib wants numbers, so that a name is drawn as one that nothing else has, and taken for the
style's variable afterwards. Blue, orange, green, purple and ochre can be told apart by readers who
do not see red or green; lines that share a plot differ in their dashes or markers as well.
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
"""The same on every page."""


def paint(name: str) -> str:
    """The colour for matplotlib."""
    return _NUMBERS[name]


def variables(svg: str) -> str:
    """What was drawn, with the style's variables for colours."""
    return _NUMBER.sub(lambda found: f"var(--{NAMES[int(found[1], 16)]})", svg)
