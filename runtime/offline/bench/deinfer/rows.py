"""Rows of the tables: our figure of a system beside the paper's."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from runtime.offline.bench.deinfer.cases import Place
from runtime.offline.bench.deinfer.systems import Competitor
from runtime.offline.bench.shapes import title


@dataclass(frozen=True)
class Row:
    """One figure of a system beside the paper's.

    Attributes:
        model: name of the model, with the fraction that it keeps.
        fraction: this fraction; 1 for a dense model.
        kept: what it is a fraction of.
        ranks, nvlink: the place.
        figure: what was measured.
        unit: its unit.
        system: scheme or "dense", collectives, and KV format.
        ours: our figure.
        base: ours of the system that it is compared with.
        paper: the paper's figure.
        paper_ratio: the paper's figure divided by that of the system that it is compared with.
        paper_ranks: number of the paper's GPUs.
    """

    model: str
    fraction: float
    kept: str
    ranks: int
    nvlink: bool
    figure: str
    unit: str
    system: str
    ours: float | None
    base: float | None = None
    paper: float | None = None
    paper_ratio: float | None = None
    paper_ranks: int | None = None

    @property
    def place(self) -> Place:
        return Place(self.ranks, self.nvlink)

    @property
    def ratio(self) -> float | None:
        return quotient(self.ours, self.base)


def quotient(figure: float | None, base: float | None) -> float | None:
    """Return a figure divided by another; None if either is missing, or the other is 0."""
    return figure / base if figure is not None and base else None


def compare(
    place: Place,
    systems: Sequence[Competitor],
    figure: str,
    unit: str,
    values: Sequence[float | None],
    theirs: Mapping[str, float],
    paper_ranks: int | None = None,
) -> Iterator[Row]:
    """Yield a row for each system, compared with the first of them.

    Args:
        values: figure of each system.
        theirs: the paper's figure by method.
        paper_ranks: see `Row`; by default those of ``place``.
    """
    base = values[0] if len(systems) > 1 else None
    for one, value in zip(systems, values, strict=True):
        row = row_of(place, one, figure, unit, value, base)
        if (cell := theirs.get(one.method or "")) is not None:
            compared = quotient(cell, theirs.get("base"))
            count = paper_ranks or place.ranks
            row = replace(row, paper=cell, paper_ratio=compared, paper_ranks=count)
        yield row


def row_of(
    place: Place, one: Competitor, figure: str, unit: str, ours: float | None, base: float | None
) -> Row:
    weights = one.system.weights
    model = title(weights.shape, weights.fraction, kept=weights.kept)
    return Row(model, weights.fraction, weights.kept, *place, figure, unit, one.name, ours, base)
