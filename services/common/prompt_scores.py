"""Log probabilities of a prompt that arrive in pieces, without gaps and repetition."""

import math
from itertools import chain

from headrace.v1 import sampling_pb2


class PromptScores:
    """Checks the pieces of one prompt, and drops what an earlier attempt has sent.

    The first token has no log probability, so the pieces cover the tokens from position 1 on.

    Args:
        prompt_tokens: number of tokens of the prompt.
        top: number of most probable tokens that are reported beside each token.

    Attributes:
        next: position of the next token.
    """

    def __init__(self, prompt_tokens: int, top: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._top = top
        self.next = 1

    @property
    def complete(self) -> bool:
        """Whether all tokens have arrived."""
        return self.next >= self._prompt_tokens

    def take(
        self, piece: sampling_pb2.PromptLogprobs, vocab_size: int
    ) -> sampling_pb2.PromptLogprobs | None:
        """Return the part of a piece that is new, or None if there is none.

        Raises:
            ValueError: the piece leaves a gap, exceeds the prompt or is malformed.
        """
        count, top = len(piece.logprobs), self._top
        if not 1 <= piece.first <= self.next or piece.first + count > self._prompt_tokens:
            raise ValueError(
                f"log probabilities of prompt tokens from {piece.first} on, expected {self.next}"
            )
        sizes = len(piece.ranks), len(piece.top_tokens), len(piece.top_logprobs)
        if sizes != (count, count * top, count * top):
            raise ValueError(f"{sizes} values for the log probabilities of {count} prompt tokens")
        if max(piece.top_tokens, default=0) >= vocab_size or not all(
            map(math.isfinite, chain(piece.logprobs, piece.top_logprobs))
        ):
            raise ValueError("malformed log probabilities of prompt tokens")
        known, self.next = self.next - piece.first, max(self.next, piece.first + count)
        if known == 0:
            return piece if count else None
        if known >= count:
            return None
        return sampling_pb2.PromptLogprobs(
            first=piece.first + known,
            logprobs=piece.logprobs[known:],
            ranks=piece.ranks[known:],
            top_tokens=piece.top_tokens[known * top :],
            top_logprobs=piece.top_logprobs[known * top :],
        )
