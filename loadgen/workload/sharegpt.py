"""Requests from published conversations. See `loadgen.workload.traces` for files with times."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from loadgen.errors import UsageError
from loadgen.workload.base import Ask, Tokenizer
from loadgen.workload.prompts import in_blocks
from loadgen.workload.rows import Row, read_list
from loadgen.workload.tokenizer import special_around, together

_PEOPLE = frozenset({"human", "user"})
_MODELS = frozenset({"gpt", "chatgpt", "assistant"})


class ShareGPT:
    """What people asked a chat model first, and answers as long as theirs were.

    JSON: a list of ``{"conversations": [{"from": "human", "value": …}, {"from": "gpt", …}, …]}``.
    The first human turn is the prompt and the answer after it counts; conversations without such
    a pair are passed over, as the published files have many.

    Raises:
        UsageError: the file or an entry of it cannot be used, or no conversation has the pair.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        lead, trail = special_around(tokenizer)
        self._special = len(lead) + len(trail)
        pairs = (_first_exchange(row) for row in read_list(path))
        self._pairs = [pair for pair in pairs if pair is not None]
        if not self._pairs:
            raise UsageError(f"{path}: no conversation in which a human is answered")

    def asks(self, seed: int) -> Iterator[Ask]:
        """One for each conversation, in an order that the seed draws."""
        order = np.random.default_rng(seed).permutation(len(self._pairs)).tolist()
        for block in in_blocks(order):
            texts = [text for i in block for text in self._pairs[i]]
            counts = [len(tokens) for tokens in together(self._tokenizer.encode, texts)]
            for i, asked, answered in zip(block, counts[::2], counts[1::2], strict=True):
                yield Ask(self._pairs[i][0], asked, max(1, answered - self._special))


def _first_exchange(row: Row) -> tuple[str, str] | None:
    """What the human said first and what the model answered."""
    turns = row.values.get("conversations")
    if not isinstance(turns, list):
        raise row.wrong("no list of conversations")
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise row.wrong("a turn of the conversation has no text as its value")
    speakers = [turn.get("from") for turn in turns]
    first = next((i for i, speaker in enumerate(speakers) if speaker in _PEOPLE), len(turns))
    if first + 1 >= len(turns) or speakers[first + 1] not in _MODELS:
        return None
    asked, answered = turns[first]["value"], turns[first + 1]["value"]
    return (asked, answered) if asked and answered else None
