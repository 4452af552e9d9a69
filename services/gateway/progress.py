"""Tokens of a request that were delivered to the client, across all attempts."""

import math
from collections.abc import Sequence

from headrace.v1 import decode_pb2, error_pb2, sampling_pb2
from services.common.placement import Placement
from services.common.prompt_scores import PromptScores
from services.gateway.requests import GenerationRequest
from services.gateway.text import FINISH_REASONS, FinishReason
from services.gateway.worker_failure import WorkerFailure


class Progress:
    """Delivered tokens of one request. A new attempt replays them after the prompt.

    Call `begin` before each attempt.

    Attributes:
        max_tokens: maximum output tokens of each choice in the current attempt.
        stop_token_ids: tokens that end a choice in the current attempt: those of the request and,
            unless it ignores them, end-of-sequence tokens.
        model_hash: version of the model that generates the output; set by the first attempt, and
            by later ones while there is no output.
        delivered: token ids of each choice, in order.
        unfinished: indices of the choices that the worker decodes: it has not ended them, and they
            were not cancelled.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self.max_tokens = request.max_tokens
        self.stop_token_ids: tuple[int, ...] = ()
        self.model_hash = ""
        self.delivered: list[list[int]] = [[] for _ in range(request.options.n)]
        self.unfinished = set(range(request.options.n))
        self._delivered_before = 0
        # Prompt tokens that no attempt has computed, and the number that was reported.
        self._cached: int | None = None
        self._reported = 0
        # Whether the current attempt has sent the number of its cached tokens.
        self._has_cached = False
        top = request.options.prompt_top
        self._scores = None if top is None else PromptScores(request.prompt_tokens, top)
        self._scored: list[sampling_pb2.PromptLogprobs] = []

    @property
    def prompt_logprobs(self) -> int | None:
        """Number of alternatives for each prompt token that the next attempt must report.

        None if log probabilities of the prompt are not wanted, or all have arrived.
        """
        complete = self._scores is None or self._scores.complete
        return None if complete else self._request.options.prompt_top

    @property
    def started(self) -> bool:
        """Whether any token was delivered."""
        return any(self.delivered)

    @property
    def advanced(self) -> bool:
        """Whether the current attempt has delivered tokens."""
        return self._count > self._delivered_before

    @property
    def replayed(self) -> Sequence[int]:
        """Output tokens that the next attempt replays. Requires a request with a single choice."""
        return self.delivered[0]

    @property
    def _count(self) -> int:
        """Number of delivered tokens of all choices."""
        return sum(map(len, self.delivered))

    def begin(self, placement: Placement, stop_token_ids: tuple[int, ...]) -> None:
        """Begin an attempt on the workers of a placement, within its maximum of output tokens.

        Args:
            stop_token_ids: tokens that end the output of their model.
        """
        options = self._request.options
        if not self._count:
            self.model_hash = placement.model.model_hash
        ends = () if options.ignore_eos else stop_token_ids
        self.stop_token_ids = tuple(dict.fromkeys((*ends, *options.stop_token_ids)))
        self.max_tokens = min(self._request.max_tokens, len(self.replayed) + placement.max_tokens)
        self._delivered_before = self._count
        self._has_cached = False

    def fail(self, failure: WorkerFailure) -> None:
        """Record that the current attempt has failed.

        If it ended before its first token, it may have computed any part of the prompt. The next
        attempt may find that part cached, but the request has computed it.
        """
        if not self._has_cached and failure.may_have_computed:
            self._cached = 0

    def accept(self, deltas: Sequence[decode_pb2.StreamDelta], placement: Placement) -> None:
        """Record tokens; call this before they are delivered. On an error, nothing is recorded.

        Args:
            deltas: what the decode worker of the placement sent.

        Raises:
            WorkerFailure: if log probabilities of the prompt are missing or malformed, if a token
                is not the next one of its choice, is outside the vocabulary or has a log
                probability that is not finite, or if a choice ends with an invalid reason.
        """
        vocab_size = placement.model.vocab_size
        next_index = [len(tokens) for tokens in self.delivered]
        for delta in deltas:
            self._accept_scored(delta, placement)
            if delta.tokens and self.prompt_logprobs is not None:
                raise _protocol_error(
                    "tokens before the log probabilities of the prompt", placement
                )
            for token in delta.tokens:
                if token.choice >= len(next_index) or token.index != next_index[token.choice]:
                    raise _protocol_error(f"token {token.index} is out of order", placement)
                if not _is_valid(token, vocab_size):
                    raise _protocol_error(f"token {token.index} is malformed", placement)
                next_index[token.choice] += 1
            for end in delta.ended:
                if end.choice >= len(next_index) or end.reason not in FINISH_REASONS:
                    message = f"choice {end.choice} ended with finish reason {end.reason}"
                    raise _protocol_error(message, placement)
        for delta in deltas:
            for token in delta.tokens:
                self.delivered[token.choice].append(token.token)
            self.unfinished.difference_update(end.choice for end in delta.ended)
            if delta.HasField("cached_tokens"):
                known = self._request.prompt_tokens if self._cached is None else self._cached
                self._cached = min(delta.cached_tokens, known)
                self._has_cached = True

    def newly_scored(self) -> list[sampling_pb2.PromptLogprobs]:
        """Return log probabilities of the prompt that have arrived since the last call."""
        new, self._scored = self._scored, []
        return new

    def _accept_scored(self, delta: decode_pb2.StreamDelta, placement: Placement) -> None:
        """Record log probabilities of the prompt, without those of an earlier attempt."""
        for piece in delta.prompt_logprobs:
            if self._scores is None:
                raise _protocol_error("unexpected log probabilities of the prompt", placement)
            try:
                new = self._scores.take(piece, placement.model.vocab_size)
            except ValueError as error:
                raise _protocol_error(str(error), placement) from error
            if new is not None:
                self._scored.append(new)

    def newly_cached(self) -> int:
        """Return the change of the number of cached prompt tokens since the last call."""
        change = (self._cached or 0) - self._reported
        self._reported += change
        return change

    def finish_reason(self) -> "FinishReason | None":
        """Return the finish reason if there is a single choice and its tokens are complete."""
        if len(self.delivered) > 1:
            return None
        delivered = self.delivered[0]
        if delivered and delivered[-1] in self.stop_token_ids:
            return sampling_pb2.FINISH_REASON_STOP
        if len(delivered) >= self.max_tokens:
            return sampling_pb2.FINISH_REASON_LENGTH
        return None


def _is_valid(token: sampling_pb2.Token, vocab_size: int) -> bool:
    """Return whether a token and its alternatives have valid ids and finite log probabilities."""
    if token.token >= vocab_size or not math.isfinite(token.logprob):
        return False
    return all(top.token < vocab_size and math.isfinite(top.logprob) for top in token.top)


def _protocol_error(message: str, placement: Placement) -> WorkerFailure:
    worker_id = placement.decode.worker_id
    return WorkerFailure(
        f"worker {worker_id} violated the protocol: {message}",
        error_pb2.ERROR_CODE_INTERNAL,
        worker_id,
    )
