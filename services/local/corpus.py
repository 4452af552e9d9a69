"""Real text that every Python has with it: its language reference, as `help()` shows it.

Calibration and evaluation take disjoint topics: none is in both.
"""

from functools import cache
from pydoc_data.topics import topics


@cache
def _split() -> tuple[str, str]:
    """Every fifth topic, in alphabetical order, is held out."""
    ordered = [topics[name] for name in sorted(topics)]
    held_out = ordered[::5]
    calibration = [text for at, text in enumerate(ordered) if at % 5]
    return "\n\n".join(calibration), "\n\n".join(held_out)


def calibration_text() -> str:
    """For whitening statistics and codebooks; about 0.6 MB."""
    return _split()[0]


def held_out_text() -> str:
    """For perplexity and for prompts of tests; about 0.15 MB, never calibrated on."""
    return _split()[1]
