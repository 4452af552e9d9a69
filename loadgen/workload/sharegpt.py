"""Requests from ShareGPT conversations. See `loadgen.workload.traces` for other files."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from loadgen.errors import UsageError
from loadgen.workload.base import RequestSpec, Tokenizer
from loadgen.workload.prompts import in_blocks
from loadgen.workload.rows import Row, read_list
from loadgen.workload.tokenizer import map_concurrently, special_tokens

_PEOPLE = frozenset({"human", "user"})
_MODELS = frozenset({"gpt", "chatgpt", "assistant"})


class ShareGPT:
    """One request per conversation: its first prompt, and the length of the answer to it.

    The file is a JSON list of ``{"conversations": [{"from": "human", "value": …}, {"from": "gpt",
    …}, …]}``. Conversations in which the first human message is not answered are skipped.

    Raises:
        UsageError: if the file or an entry is invalid, or no conversation has an exchange.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        lead, trail = special_tokens(tokenizer)
        self._special = len(lead) + len(trail)
        pairs = (_first_exchange(row) for row in read_list(path))
        self._pairs = [pair for pair in pairs if pair is not None]
        if not self._pairs:
            raise UsageError(f"{path}: no conversation with an answered human message")

    def requests(self, seed: int) -> Iterator[RequestSpec]:
        """Yield one request per conversation, in random order."""
        order = np.random.default_rng(seed).permutation(len(self._pairs)).tolist()
        for block in in_blocks(order):
            texts = [text for i in block for text in self._pairs[i]]
            counts = [len(tokens) for tokens in map_concurrently(self._tokenizer.encode, texts)]
            for i, prompt, answer in zip(block, counts[::2], counts[1::2], strict=True):
                yield RequestSpec(self._pairs[i][0], prompt, max(1, answer - self._special))


def _first_exchange(row: Row) -> tuple[str, str] | None:
    """Return the first human message and its answer, or None if it has no answer."""
    messages = row.values.get("conversations")
    if not isinstance(messages, list):
        raise row.error("conversations is not a list")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("value"), str):
            raise row.error("a message of the conversation has no text value")
    speakers = [message.get("from") for message in messages]
    first = next((i for i, speaker in enumerate(speakers) if speaker in _PEOPLE), len(messages))
    if first + 1 >= len(messages) or speakers[first + 1] not in _MODELS:
        return None
    prompt, answer = messages[first]["value"], messages[first + 1]["value"]
    return (prompt, answer) if prompt and answer else None
