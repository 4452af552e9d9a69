"""The published ways to factorize a model that are made here, and how they share out the rank."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from runtime.checkpoint.assemble import PROJECTIONS


class Allocation(StrEnum):
    """Which rank a projection gets."""

    UNIFORM = "uniform"  # each keeps the same fraction of its parameters
    LOSS = "loss"  # least loss over the whole model, see `ranks.allocate_ranks`: of the model, by
    # gradients, or without them each projection's share of its output's power
    LOG_LOSS = "log-loss"  # among projections of one kind, see `ranks.log_loss_ranks`


@dataclass(frozen=True)
class _Facts:
    version: int
    allocation: Allocation
    input_damping: float
    gradients: bool
    layers: int


class Method(StrEnum):
    """How a model is factorized.

    - `FISHER`, ours: truncation weighted by inputs and by output gradients.
    - `SVD_LLM` (arXiv 2403.07378): weighted by inputs.
    - `SVD_LLM_V2` (arXiv 2503.12340): the same truncation, another root of the same moment, and
      more rank for the projections of a kind that lose more.
    - `BASIS_SHARING` (arXiv 2410.03765): pairs of layers have one V for q, k, v, gate and up.
    """

    FISHER = "fisher"
    SVD_LLM = "svd-llm"
    SVD_LLM_V2 = "svd-llm-v2"
    BASIS_SHARING = "basis-sharing"

    @property
    def allocation(self) -> Allocation:
        """The method's own."""
        return _FACTS[self].allocation

    @property
    def uses_gradients(self) -> bool:
        return _FACTS[self].gradients

    @property
    def input_damping(self) -> float:
        """Added to the diagonal of the inputs' moment, relative to its mean."""
        return _FACTS[self].input_damping

    def label(self, allocation: Allocation) -> str:
        """What a checkpoint says of how it was made; the number changes with the factors."""
        ranks = "" if allocation is self.allocation else f", ranks by {allocation}"
        return f"{self}-svd-{_FACTS[self].version}{ranks}"

    def groups(self, num_layers: int) -> Iterator[tuple[tuple[int, str], ...]]:
        """Which projections, by layer and field, are factorized together."""
        for first in range(0, num_layers, _FACTS[self].layers):
            layers = range(first, min(first + _FACTS[self].layers, num_layers))
            for projection in PROJECTIONS:
                members = tuple((layer, projection) for layer in layers)
                if projection in ("o", "down"):
                    yield from ((member,) for member in members)
                else:
                    yield members


_FACTS = {
    Method.FISHER: _Facts(2, Allocation.LOSS, 1e-3, True, 1),
    Method.SVD_LLM: _Facts(1, Allocation.UNIFORM, 0.0, False, 1),
    Method.SVD_LLM_V2: _Facts(1, Allocation.LOG_LOSS, 0.0, False, 1),
    Method.BASIS_SHARING: _Facts(1, Allocation.UNIFORM, 0.0, False, 2),
}
