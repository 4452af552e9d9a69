"""Calibration and evaluation text: the documentation that Python ships."""

import importlib
import inspect
from collections.abc import Iterable, Sequence
from pydoc_data.topics import topics

import torch
from torch import Tensor

from runtime.errors import CompressionError

_HELD_OUT = 8
"""One of this many topics is held out, at regular intervals."""
_DOCSTRING_MODULES = (
    "argparse",
    "collections",
    "difflib",
    "fractions",
    "json",
    "logging",
    "random",
    "statistics",
    "tarfile",
)


def documentation() -> tuple[str, str]:
    """Return the calibration text and the held-out text, which is every eighth topic.

    The topics are those of the language reference for ``help()``.

    Topics quote each other, so held-out paragraphs are removed from the calibration text. The text
    differs slightly between versions of Python, and so do checkpoints calibrated on it.
    """
    names = sorted(topics)
    held_out = names[_HELD_OUT - 1 :: _HELD_OUT]
    paragraphs = _paragraphs(held_out)
    unseen = frozenset(paragraphs)
    seen = _paragraphs(name for name in names if name not in held_out)
    return "\n\n".join(text for text in seen if text not in unseen), "\n\n".join(paragraphs)


def docstrings() -> str:
    """Return docstrings of the standard library, text of another kind than `documentation`.

    They are those of a few modules and of their public names.
    """
    found: list[str] = []
    for name in _DOCSTRING_MODULES:
        module = importlib.import_module(name)
        public = (getattr(module, entry) for entry in getattr(module, "__all__", ()))
        for value in (module, *public):
            text = inspect.getdoc(value) if value is module or callable(value) else None
            if text is not None:
                found.append(text)
    return "\n\n".join(found)


def cut_rows(token_ids: Sequence[int], length: int, count: int) -> Tensor:
    """Cut up to ``count`` rows of ``length`` tokens from a text, evenly spread and without overlap.

    Returns:
        int64 ``[count, length]``, or fewer rows if the text is too short.

    Raises:
        CompressionError: the text does not fill one row.
    """
    available = len(token_ids) // length
    if available < 1 or count < 1:
        raise CompressionError(f"{len(token_ids)} tokens do not fill {count} rows of {length}")
    rows = torch.tensor(token_ids[: available * length], dtype=torch.int64).view(-1, length)
    count = min(count, available)
    return rows[[index * available // count for index in range(count)]]


def _paragraphs(names: Iterable[str]) -> list[str]:
    return [text.strip("\n") for name in names for text in str(topics[name]).split("\n\n")]
