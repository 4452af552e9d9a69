"""The prompt in a response: its text (``echo``), and the log probabilities of its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.v1 import sampling_pb2
from services.gateway.http.token_text import finite, token_text
from services.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class PromptFields:
    """Fields of a response that depend on its prompts.

    Attributes:
        prompts: token ids of each prompt.
        choices: number of choices of each prompt.
        echo: whether the text of each choice starts with that of its prompt.
        logprobs: number of alternatives in ``logprobs`` of the echoed tokens; None without.
        prompt_logprobs: number of alternatives in ``prompt_logprobs``; None without.
    """

    prompts: tuple[tuple[int, ...], ...]
    choices: int = 1
    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def scored(self) -> bool:
        """Whether log probabilities of prompt tokens are needed."""
        return self.prompt_logprobs is not None or (self.echo and self.logprobs is not None)


class PromptParts:
    """The parts of a response that one prompt has, formatted as its log probabilities arrive.

    Attributes:
        text: text of the prompt; empty without ``echo``.
        scores: value of ``prompt_logprobs``; None without.
    """

    def __init__(self, fields: PromptFields, prompt: Sequence[int], tokenizer: Tokenizer) -> None:
        self._fields = fields
        self._prompt = prompt
        self._pieces = tokenizer.pieces
        self._texts = tokenizer.texts(prompt) if fields.echo else []
        self.text = "".join(self._texts)
        self._offsets: list[int] = []
        offset = 0
        for text in self._texts:
            self._offsets.append(offset)
            offset += len(text)
        # The first token has no log probability.
        self._logprobs: list[float | None] = [None]
        self._top: list[dict[str, float] | None] = [None]
        self.scores: list[dict[str, Any] | None] | None = (
            None if fields.prompt_logprobs is None else [None]
        )

    @property
    def ready(self) -> int:
        """Number of prompt tokens that can be sent."""
        return len(self._logprobs) if self._fields.scored else len(self._prompt)

    def take(self, piece: sampling_pb2.PromptLogprobs) -> None:
        """Add log probabilities of the next tokens."""
        width = len(piece.top_tokens) // max(1, len(piece.logprobs))
        tokens, logprobs = list(piece.top_tokens), list(piece.top_logprobs)
        for at, (own, rank) in enumerate(zip(piece.logprobs, piece.ranks, strict=True)):
            token = self._prompt[piece.first + at]
            row = slice(at * width, (at + 1) * width)
            top = list(zip(tokens[row], logprobs[row], strict=True))
            self._logprobs.append(finite(own))
            if self._fields.echo and self._fields.logprobs is not None:
                self._top.append(self._alternatives(token, own, top[: self._fields.logprobs]))
            if self.scores is not None:
                kept = top[: self._fields.prompt_logprobs]
                self.scores.append(self._ranked(token, own, rank, kept))

    def part(self, first: int, end: int) -> tuple[str, dict[str, Any] | None]:
        """Return the text of some prompt tokens, and their ``logprobs``, in OpenAI's format.

        Raises:
            IndexError: ``end`` exceeds `ready`.
        """
        text = "".join(self._texts[first:end])
        if self._fields.logprobs is None:
            return text, None
        if end > self.ready:
            raise IndexError(f"{end} of {self.ready} prompt tokens")
        return text, {
            "tokens": [token_text(self._pieces, token) for token in self._prompt[first:end]],
            "token_logprobs": self._logprobs[first:end],
            "top_logprobs": self._top[first:end],
            "text_offset": self._offsets[first:end],
        }

    def _alternatives(
        self, token: int, own: float, top: Sequence[tuple[int, float]]
    ) -> dict[str, float]:
        """Return the most likely tokens, and the token itself, as for output tokens."""
        found = {token_text(self._pieces, other): finite(logprob) for other, logprob in top}
        found[token_text(self._pieces, token)] = finite(own)
        return found

    def _ranked(
        self, token: int, own: float, rank: int, top: Sequence[tuple[int, float]]
    ) -> dict[str, Any]:
        """Return the most likely tokens, and the token itself, in vLLM's format."""
        entries = [(other, logprob, at) for at, (other, logprob) in enumerate(top, 1)]
        return {
            str(other): {
                "logprob": finite(logprob),
                "rank": place,
                "decoded_token": token_text(self._pieces, other),
            }
            for other, logprob, place in (*entries, (token, own, rank))
        }
