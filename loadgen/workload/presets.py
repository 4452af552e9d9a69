"""Length presets: the datasets of the FDC paper, Table 6.

The paper is "FDC: Fast KV Dimensionality Compression for Efficient LLM Inference".
"""

from dataclasses import dataclass

from loadgen.errors import UsageError
from loadgen.workload.lengths import Bounded


@dataclass(frozen=True, slots=True)
class Preset:
    """Length distributions of prompts and outputs, in tokens."""

    inputs: Bounded
    outputs: Bounded


PRESETS = {
    "imdb": Preset(Bounded(106, 315, 821), Bounded(16, 37, 87)),
    "arxiv": Preset(Bounded(1_600, 6_300, 14_100), Bounded(29, 243, 464)),
    "cocktail": Preset(Bounded(9_400, 49_700, 104_900), Bounded(44, 159, 246)),
    "humaneval": Preset(Bounded(75, 204, 697), Bounded(11, 139, 552)),
    "pg19": Preset(Bounded(138, 277, 419), Bounded(24_300, 61_500, 97_500)),
}
"""Presets by name, with minimum, mean and maximum from Table 6.

The paper does not state the shape of the distributions; see `Bounded`.
"""


def preset(name: str, scale: float = 1.0) -> Preset:
    """Return a preset by name.

    Args:
        scale: factor by which all lengths are multiplied, for smaller machines. Lengths remain at
            least 1.

    Raises:
        UsageError: if the name is unknown or the scale is not above 0.
    """
    found = PRESETS.get(name)
    if found is None:
        raise UsageError(f"no preset {name!r}; presets are {', '.join(PRESETS)}")
    return Preset(found.inputs.scaled(scale), found.outputs.scaled(scale))
