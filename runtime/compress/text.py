"""Real text that every Python carries: the language reference behind ``help()``."""

from collections.abc import Iterable, Sequence
from pydoc_data.topics import topics

import torch
from torch import Tensor

from runtime.errors import CompressionError

_HELD_OUT = 8


def documentation() -> tuple[str, str]:
    """``(calibration, held out)``: every eighth topic is held out.

    Topics quote one another, so paragraphs that are held out are dropped from the calibration text.
    The text differs a little between versions of Python, and so then do artifacts made with it.
    """
    names = sorted(topics)
    held_out = names[_HELD_OUT - 1 :: _HELD_OUT]
    paragraphs = _paragraphs(held_out)
    unseen = frozenset(paragraphs)
    seen = _paragraphs(name for name in names if name not in held_out)
    return "\n\n".join(text for text in seen if text not in unseen), "\n\n".join(paragraphs)


def cut_rows(token_ids: Sequence[int], length: int, count: int) -> Tensor:
    """``[count, length]`` int64: pieces of a long text, evenly spread over it, none overlapping.

    Fewer rows if the text is shorter. Raises `CompressionError` if it does not fill one.
    """
    available = len(token_ids) // length
    if available < 1 or count < 1:
        raise CompressionError(f"{len(token_ids)} tokens are less than {count} rows of {length}")
    rows = torch.tensor(token_ids[: available * length], dtype=torch.int64).view(-1, length)
    count = min(count, available)
    return rows[[index * available // count for index in range(count)]]


def _paragraphs(names: Iterable[str]) -> list[str]:
    return [text.strip("\n") for name in names for text in str(topics[name]).split("\n\n")]
