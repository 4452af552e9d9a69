"""Cases: what is measured on each system. Each is data, and yields its results row by row."""

from tests.programs.serving_bench.cases.base import Case, Context
from tests.programs.serving_bench.cases.cached import Cached
from tests.programs.serving_bench.cases.constrained import Constrained
from tests.programs.serving_bench.cases.hang_ups import HangUps
from tests.programs.serving_bench.cases.interference import Interference
from tests.programs.serving_bench.cases.load import Load
from tests.programs.serving_bench.cases.mixes import Mixes
from tests.programs.serving_bench.cases.search import Search
from tests.programs.serving_bench.cases.single import Single

__all__ = [
    "Cached",
    "Case",
    "Constrained",
    "Context",
    "HangUps",
    "Interference",
    "Load",
    "Mixes",
    "Search",
    "Single",
]
