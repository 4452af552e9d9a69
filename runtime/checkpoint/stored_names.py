"""Map the tensors of a Hugging Face folder to the tensor names of the model family.

A folder may omit the common prefix of all names, and may store several tensors as one.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from runtime.checkpoint.assemble import TensorSource
from runtime.checkpoint.family import StoredParts, TensorNames
from runtime.errors import CheckpointError


def full_names(names: TensorNames, stored: Collection[str]) -> Mapping[str, str]:
    """Return a mapping from the full name of each tensor to its stored name.

    If transformers saved a model without its LM head, all names lack their first component, such as
    ``model.``.
    """
    prefix = names.layer.partition(".")[0] + "."
    if names.embedding in stored or names.embedding.removeprefix(prefix) not in stored:
        prefix = ""
    return {
        _present(name if name == names.lm_head else prefix + name, names.former): name
        for name in stored
    }


def _present(name: str, former: Mapping[str, str]) -> str:
    for old, new in former.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


@dataclass(frozen=True)
class RowsSource:
    """A `TensorSource` whose tensors are rows of the tensors of another source.

    Attributes:
        rows: for each name, the name of a tensor in ``source`` and its rows. Tensors are read on
            demand.
    """

    source: TensorSource
    rows: Mapping[str, tuple[str, slice]]

    def names(self) -> frozenset[str]:
        return frozenset(self.rows)

    def read(self, name: str) -> Tensor:
        stored, rows = self.rows[name]
        tensor = self.source.read(stored)
        return tensor if rows == _ALL or not tensor.ndim else tensor[rows]


_ALL = slice(None)


def in_parts(source: TensorSource, names: Mapping[str, str], parts: StoredParts) -> TensorSource:
    """Return a source with full tensor names, whose combined tensors are split into their parts.

    Args:
        names: see `full_names`.
        parts: see `CheckpointFamily.stored_parts`.

    Raises:
        CheckpointError: neither a combined tensor nor any of its parts is stored.
    """
    rows = {name: (stored, _ALL) for name, stored in names.items()}
    for whole, members in parts.items():
        if whole not in rows:
            if not any(name in rows for name, _ in members):
                raise CheckpointError(f"the checkpoint has no tensor {whole}")
            continue
        stored, _ = rows.pop(whole)
        first = 0
        for at, (name, count) in enumerate(members):
            # The last part has all remaining rows, so that a wrong number of rows is an error.
            last = at == len(members) - 1
            if name:
                rows[name] = stored, slice(first, None if last else first + count)
            first += count
    return RowsSource(source, rows)
