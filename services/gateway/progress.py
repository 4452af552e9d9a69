"""Tokens of a request that were delivered to the client, across all attempts."""

import math
from collections.abc import Sequence

from headrace.v1 import decode_pb2, error_pb2, sampling_pb2
from services.gateway.requests import GenerationRequest
from services.gateway.text import FINISH_REASONS, FinishReason
from services.gateway.worker_failure import WorkerFailure

MAX_VOCAB_SIZE = 1 << 24


class Progress:
    """Delivered tokens of one request. A new attempt replays them after the prompt.

    Attributes:
        stop_token_ids: end-of-sequence tokens; none if the request ignores them.
        delivered: token ids of each choice, in order.
        unfinished: indices of the choices that the worker decodes: it has not ended them, and they
            were not cancelled.
    """

    def __init__(self, request: GenerationRequest, stop_token_ids: tuple[int, ...]) -> None:
        self._max_tokens = request.max_tokens
        self.stop_token_ids = stop_token_ids
        self.delivered: list[list[int]] = [[] for _ in range(request.options.n)]
        self.unfinished = set(range(request.options.n))

    @property
    def started(self) -> bool:
        """Whether any token was delivered."""
        return any(self.delivered)

    @property
    def count(self) -> int:
        """Number of delivered tokens of all choices."""
        return sum(map(len, self.delivered))

    @property
    def replayed(self) -> Sequence[int]:
        """Output tokens that the next attempt replays. Requires a request with a single choice."""
        return self.delivered[0]

    def accept(
        self,
        deltas: Sequence[decode_pb2.StreamDelta],
        worker_id: str,
        vocab_size: int = MAX_VOCAB_SIZE,
    ) -> None:
        """Record tokens; call this before they are delivered. On an error, nothing is recorded.

        Args:
            vocab_size: number of tokens of the worker's model.

        Raises:
            WorkerFailure: if a token is not the next one of its choice, is outside the vocabulary
                or has a log probability that is not finite, or if a choice ends with an invalid
                reason.
        """
        next_index = [len(tokens) for tokens in self.delivered]
        for delta in deltas:
            for token in delta.tokens:
                if token.choice >= len(next_index) or token.index != next_index[token.choice]:
                    raise _protocol_error(f"token {token.index} is out of order", worker_id)
                if not _is_valid(token, vocab_size):
                    raise _protocol_error(f"token {token.index} is malformed", worker_id)
                next_index[token.choice] += 1
            for end in delta.ended:
                if end.choice >= len(next_index) or end.reason not in FINISH_REASONS:
                    message = f"choice {end.choice} ended with finish reason {end.reason}"
                    raise _protocol_error(message, worker_id)
        for delta in deltas:
            for token in delta.tokens:
                self.delivered[token.choice].append(token.token)
            self.unfinished.difference_update(end.choice for end in delta.ended)

    def finish_reason(self) -> "FinishReason | None":
        """Return the finish reason if there is a single choice and its tokens are complete."""
        if len(self.delivered) > 1:
            return None
        delivered = self.delivered[0]
        if delivered and delivered[-1] in self.stop_token_ids:
            return sampling_pb2.FINISH_REASON_STOP
        if len(delivered) >= self._max_tokens:
            return sampling_pb2.FINISH_REASON_LENGTH
        return None


def _is_valid(token: sampling_pb2.Token, vocab_size: int) -> bool:
    """Return whether a token and its alternatives have valid ids and finite log probabilities."""
    if token.token >= vocab_size or not math.isfinite(token.logprob):
        return False
    return all(top.token < vocab_size and math.isfinite(top.logprob) for top in token.top)


def _protocol_error(message: str, worker_id: str) -> WorkerFailure:
    return WorkerFailure(
        f"worker {worker_id} violated the protocol: {message}",
        error_pb2.ERROR_CODE_INTERNAL,
        worker_id,
    )
