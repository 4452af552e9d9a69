"""Measurements of the tables: systems, passes and loads, and figures computed from their times."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeVar

from runtime.core.plan import MAX_CHUNKS
from runtime.offline.bench.ranks import Collectives, Elements
from runtime.offline.bench.shapes import Kept
from runtime.parallel.partition import Scheme

PASS_TOKENS = 1024
"""Maximum number of prompt tokens in a pass. With decode rows, passes still have CUDA graphs."""


class Place(NamedTuple):
    """A process group.

    Attributes:
        ranks: number of ranks, each with a GPU.
        nvlink: whether GPUs access one another, see ``direct`` of `over_ranks`.
    """

    ranks: int
    nvlink: bool

    def __str__(self) -> str:
        link = "" if self.ranks == 1 else ", NVLink" if self.nvlink else ", no NVLink"
        return f"T = {self.ranks}{link}"


@dataclass(frozen=True)
class Weights:
    """A model with random weights, and its division among ranks.

    Attributes:
        shape: name in `SHAPES`.
        fraction: fraction that factor pairs keep; 1 for a dense model.
        kept: what it is a fraction of.
        kv_format: KV format of the cache.
    """

    shape: str
    fraction: float
    kept: Kept
    scheme: Scheme
    kv_format: str = "dense"


@dataclass(frozen=True)
class System:
    """A model and the collectives between its ranks."""

    weights: Weights
    collectives: Collectives


@dataclass(frozen=True)
class Pass:
    """A forward pass of an engine over sequences of equal length.

    Attributes:
        prompts: number of prompts that the pass computes; 0 for a decode pass.
        tokens: tokens of each prompt.
        decoding: number of sequences that decode one token.
        context: number of tokens before that token.
        graph: whether passes are CUDA graphs. On a CPU there are none.
        silent: whether ranks exchange nothing, for times without communication.
    """

    prompts: int
    tokens: int
    decoding: int
    context: int
    graph: bool = True
    silent: bool = False


class Count(NamedTuple):
    """Asks for the elements of collectives instead of the time of a pass."""


class Case(NamedTuple):
    """One measurement."""

    place: Place
    system: System
    work: Pass | Count


@dataclass(frozen=True)
class Timing:
    """Times in milliseconds of a pass through a model with fewer layers than the whole one.

    Attributes:
        one_ms: time with one layer.
        layer_ms: additional time of each other layer.
        layers: number of layers of the whole model.
    """

    one_ms: float
    layer_ms: float
    layers: int

    @classmethod
    def of(cls, one_ms: float, several_ms: float, several: int, layers: int) -> "Timing":
        """Return the timing of a model of which one and ``several`` layers were measured."""
        return cls(one_ms, max(several_ms - one_ms, 0) / (several - 1), layers)

    @property
    def ms(self) -> float:
        """Time of all layers of the whole model."""
        return self.one_ms + (self.layers - 1) * self.layer_ms


@dataclass(frozen=True)
class Failure:
    """A case that could not be measured, and the reason."""

    reason: str


Result = Timing | Elements | Failure
T = TypeVar("T", Timing, Elements)


class Results:
    """Results by case. Tables ask for those that they need.

    Attributes:
        found: results of the cases measured so far.
        wanted: cases that were asked for, in that order.
    """

    def __init__(self, found: Mapping[Case, Result] | None = None) -> None:
        self.found = dict(found or {})
        self.wanted: dict[Case, None] = {}

    def timing(self, place: Place, system: System, work: Pass) -> Timing | None:
        """Return the times of a pass; None if they were not measured."""
        return self._of_type(Case(place, system, work), Timing)

    def elements(self, place: Place, system: System) -> Elements | None:
        """Return the elements of collectives per token and layer, or None."""
        return self._of_type(Case(place, system, Count()), Elements)

    def _of_type(self, case: Case, kind: type[T]) -> T | None:
        self.wanted[case] = None
        found = self.found.get(case)
        return found if isinstance(found, kind) else None


@dataclass(frozen=True)
class Load:
    """Equal prompts that arrive at once.

    The engine computes at most `MAX_CHUNKS` prompts and `PASS_TOKENS` of their tokens in a pass.
    Sequences whose prompt is complete decode in the same passes.

    Attributes:
        prompts: number of prompts.
        tokens: tokens of each prompt.
        generated: tokens generated for each.
    """

    prompts: int
    tokens: int
    generated: int

    @property
    def prompts_per_pass(self) -> int:
        return max(1, min(self.prompts, MAX_CHUNKS, PASS_TOKENS // self.tokens))

    @property
    def prefill_passes(self) -> int:
        """Number of passes that compute prompts."""
        return -(-self.prompts // self.prompts_per_pass)

    def prefill(self, *, last: bool, graph: bool = True) -> Pass:
        """Return the first or the last pass that computes prompts."""
        each = self.prompts_per_pass
        decoding = each * (self.prefill_passes - 1) if last else 0
        return Pass(each, self.tokens, decoding, self.tokens, graph)

    def decode(self, *, graph: bool = True, silent: bool = False) -> Pass:
        """Return a decode pass over all sequences at their mean length."""
        context = self.tokens + self.generated // 2
        return Pass(0, 0, self.prompts, context, graph, silent)

    def __str__(self) -> str:
        return f"{self.prompts} prompts of {self.tokens} tokens, {self.generated} generated"


@dataclass(frozen=True)
class Served:
    """Latency and throughput of a load, computed from the times of its passes.

    Attributes:
        first_token_ms: mean time to the first token.
        gap_ms: time between tokens after all prompts.
        tokens_per_s: generated tokens of all sequences divided by the time until the last one.
    """

    first_token_ms: float
    gap_ms: float
    tokens_per_s: float


def served(
    load: Load, results: Results, place: Place, system: System, *, graph: bool = True
) -> Served | None:
    """Compute the figures of a load; None if a pass was not measured.

    Times of prefill passes between the first and the last one are interpolated.
    """
    first, last, decode = (
        results.timing(place, system, work)
        for work in (
            load.prefill(last=False, graph=graph),
            load.prefill(last=True, graph=graph),
            load.decode(graph=graph),
        )
    )
    if first is None or last is None or decode is None:
        return None
    count = load.prefill_passes
    growth = (last.ms - first.ms) / max(count - 1, 1)
    ends = list(accumulate(first.ms + growth * number for number in range(count)))
    whole_ms = ends[-1] + (load.generated - 1) * decode.ms
    tokens = load.prompts * load.generated
    return Served(sum(ends) / count, decode.ms, tokens / whole_ms * 1e3)
