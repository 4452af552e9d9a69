"""Prompts for free-running generation: documentation to continue, and chats about it."""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
from tokenizers import Tokenizer

from runtime.errors import QualityError

_TURN, _END = "<|im_start|>", "<|im_end|>"
_TASKS = (
    "Summarize this text in a few sentences.",
    "Explain this text to somebody who is new to programming.",
    "Write three questions that this text answers, and answer them.",
    "List the most important points of this text.",
    "Rewrite this text in simpler words.",
)
"""Tasks of the chats; a passage of the documentation follows each."""


class ChatEncoder:
    """Tokenizes plain text and questions to a chat model.

    Questions are in ChatML if the vocabulary has its tokens, and plain paragraphs otherwise.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.chat_ml = tokenizer.token_to_id(_TURN) is not None
        if self.chat_ml:
            tokenizer.add_special_tokens([_TURN, _END])

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; the tokens of ChatML are recognized."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        text: str = self._tokenizer.decode(list(tokens))
        return text

    def start_of_question(self, text: str) -> str:
        """Return the start of a user's message that begins with ``text``.

        `end_of_question` returns its end.
        """
        return f"{_TURN}user\n{text}" if self.chat_ml else text

    def end_of_question(self, text: str, answer: str = "") -> str:
        """Return the end of a user's message, ``text``, followed by the start of the reply.

        Args:
            answer: text with which the model's reply begins.
        """
        if self.chat_ml:
            return f"{text}{_END}\n{_TURN}assistant\n{answer}"
        return f"{text}\n\n{answer}"


def continuations(encoder: ChatEncoder, text: str, count: int, tokens: int) -> list[list[int]]:
    """Return ``count`` prompts of ``tokens`` tokens: passages of a text, for the model to continue.

    The passages are evenly spread over the text and do not overlap.

    Raises:
        QualityError: the text is too short.
    """
    ids = encoder.encode(text)
    if len(ids) < count * tokens:
        raise QualityError(f"{len(ids)} tokens are too few for {count} prompts of {tokens}")
    starts = [number * len(ids) // count for number in range(count)]
    return [ids[start : start + tokens] for start in starts]


def chats(encoder: ChatEncoder, text: str, count: int, tokens: int) -> list[list[int]]:
    """Return ``count`` prompts of ``tokens`` tokens: a task, and a passage of a text.

    Raises:
        QualityError: the text is too short, or ``tokens`` leaves no room for a passage.
    """
    prompts = []
    after = encoder.encode(encoder.end_of_question(""))
    for number, passage in enumerate(continuations(encoder, text, count, tokens)):
        task = _TASKS[number % len(_TASKS)]
        before = encoder.encode(encoder.start_of_question(f"{task}\n\n"))
        room = tokens - len(before) - len(after)
        if room < 1:
            raise QualityError(f"a prompt of {tokens} tokens has no room for a passage")
        prompts.append([*before, *passage[:room], *after])
    return prompts


def hash_of(texts: Sequence[Sequence[int]]) -> str:
    """Return the sha256 of token ids, 16 hex digits."""
    digest = hashlib.sha256()
    for tokens in texts:
        digest.update(np.array([len(tokens), *tokens], "<i8").tobytes())
    return digest.hexdigest()[:16]


Decode = Callable[[Sequence[int]], str]
"""Function that returns the text of tokens."""
