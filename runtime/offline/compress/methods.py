"""The factorization methods, and how each distributes ranks over the linears of a model."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from runtime.checkpoint.family import LayerLayout


class Allocation(StrEnum):
    """Ways to distribute ranks over linears."""

    UNIFORM = "uniform"
    """Every linear keeps the same fraction of its parameters."""
    LOSS = "loss"
    """Minimal total loss over the whole model, see `ranks.allocate_ranks`. The loss of a linear is
    estimated from gradients; without gradients it is the relative error of its output."""
    LOG_LOSS = "log-loss"
    """Fractions depend on the losses of linears of the same kind, see `ranks.log_loss_ranks`."""


@dataclass(frozen=True)
class _Properties:
    """Properties of a method.

    Attributes:
        gradients: whether errors are weighted by output gradients.
        layers: number of layers that share a V.
        inputs: whether errors are weighted by inputs.
        by_row: whether the weights of output gradients are the importance of each row.
    """

    version: int
    allocation: Allocation
    input_damping: float
    gradients: bool
    layers: int
    inputs: bool = True
    by_row: bool = False


class Method(StrEnum):
    """Factorization methods.

    - `SVD`: the truncated SVD of the weight.
    - `FWSVD` (arXiv 2207.00112): errors of a row of the weight are weighted by the row's Fisher
      information.
    - `FISHER`, developed here: errors are weighted by inputs and by output gradients.
    - `SVD_LLM` (arXiv 2403.07378): errors are weighted by inputs.
    - `SVD_LLM_V2` (arXiv 2503.12340): as `SVD_LLM`, with another square root of the same moment.
      Among linears of one kind, such as all q projections, a larger loss gives a higher rank.
    - `BASIS_SHARING` (arXiv 2410.03765): a linear shares its V with the same linear of the adjacent
      layer, except for linears that write to the residual stream.
    """

    SVD = "svd"
    FWSVD = "fwsvd"
    FISHER = "fisher"
    SVD_LLM = "svd-llm"
    SVD_LLM_V2 = "svd-llm-v2"
    BASIS_SHARING = "basis-sharing"

    @property
    def allocation(self) -> Allocation:
        """Default allocation of the method."""
        return _PROPERTIES[self].allocation

    @property
    def uses_gradients(self) -> bool:
        return _PROPERTIES[self].gradients

    @property
    def uses_inputs(self) -> bool:
        return _PROPERTIES[self].inputs

    @property
    def by_row(self) -> bool:
        """Whether output gradients are used as the importance of each row."""
        return _PROPERTIES[self].by_row

    @property
    def input_damping(self) -> float:
        """Value added to the diagonal of the input moment, relative to its mean."""
        return _PROPERTIES[self].input_damping

    def label(self, allocation: Allocation) -> str:
        """Return the value of ``method`` in the metadata of checkpoints.

        Its version number increases whenever the same inputs give different factors.
        """
        ranks = "" if allocation is self.allocation else f", ranks by {allocation}"
        return f"{self}-svd-{_PROPERTIES[self].version}{ranks}"

    def blocks(self, num_layers: int) -> list[range]:
        """Return the layers that are factorized together, in order."""
        size = _PROPERTIES[self].layers
        return [range(first, min(first + size, num_layers)) for first in range(0, num_layers, size)]

    def groups(self, block: range, layout: LayerLayout) -> Iterator[tuple[tuple[int, str], ...]]:
        """Yield the (layer, field) pairs of linears in ``block`` that are factorized together."""
        for field, linear in layout.linears.items():
            members = tuple((layer, field) for layer in block)
            if linear.writes_residual:
                yield from ((member,) for member in members)
            else:
                yield members


_PROPERTIES = {
    Method.SVD: _Properties(1, Allocation.UNIFORM, 0.0, False, 1, inputs=False),
    Method.FWSVD: _Properties(1, Allocation.UNIFORM, 0.0, True, 1, inputs=False, by_row=True),
    Method.FISHER: _Properties(2, Allocation.LOSS, 1e-3, True, 1),
    Method.SVD_LLM: _Properties(1, Allocation.UNIFORM, 0.0, False, 1),
    Method.SVD_LLM_V2: _Properties(1, Allocation.LOG_LOSS, 0.0, False, 1),
    Method.BASIS_SHARING: _Properties(1, Allocation.UNIFORM, 0.0, False, 2),
}
