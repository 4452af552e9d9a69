"""What of a request has been passed on, across its attempts, and what an attempt must be told."""

from collections.abc import Iterable, Sequence

from headrace.v1 import decode_pb2, error_pb2, request_pb2, sampling_pb2
from services.common.placement import PlaceRequest
from services.gateway.requests import GenerationRequest
from services.gateway.router_client import Placed
from services.gateway.sessions import WorkerFailure
from services.gateway.text import FINISH_REASONS, FinishReason


class Progress:
    """The tokens that a client has, choice by choice; an attempt starts where they end."""

    def __init__(self, request: GenerationRequest, stop_token_ids: tuple[int, ...]) -> None:
        self._request = request
        self._stop_token_ids = stop_token_ids
        self.delivered: list[list[int]] = [[] for _ in range(request.choices)]
        self.unended = set(range(request.choices))  # by the worker

    @property
    def started(self) -> bool:
        return any(self.delivered)

    def accept(self, deltas: Sequence[decode_pb2.StreamDelta], worker_id: str) -> None:
        """Notes tokens that are about to be passed on: all of them, or none.

        Raises:
            WorkerFailure: a token that is not its choice's next one, or an end that is none.
        """
        next_index = [len(tokens) for tokens in self.delivered]
        for delta in deltas:
            for token in delta.tokens:
                if token.choice >= len(next_index) or token.index != next_index[token.choice]:
                    raise _broken(f"token {token.index} is out of order", worker_id)
                next_index[token.choice] += 1
            for end in delta.ended:
                if end.choice >= len(next_index) or end.reason not in FINISH_REASONS:
                    raise _broken(f"choice {end.choice} ended for reason {end.reason}", worker_id)
        for delta in deltas:
            for token in delta.tokens:
                self.delivered[token.choice].append(token.token)
            self.unended.difference_update(end.choice for end in delta.ended)

    def end(self) -> "FinishReason | None":
        """How a single choice ended, where the tokens passed on say that it has."""
        if self._request.choices > 1:
            return None
        delivered = self.delivered[0]
        if delivered and delivered[-1] in self._stop_token_ids:
            return sampling_pb2.FINISH_REASON_STOP
        if len(delivered) >= self._request.max_tokens:
            return sampling_pb2.FINISH_REASON_LENGTH
        return None

    def place(
        self, model: str, attempt: int, excluded: Iterable[str], wait_s: float
    ) -> PlaceRequest:
        request, replayed = self._request, len(self.delivered[0])
        return PlaceRequest(
            request_id=request.request_id,
            attempt=attempt,
            model=model,
            prompt_tokens=len(request.prompt) + replayed,
            max_tokens=request.max_tokens - replayed,
            choices=request.choices,
            tenant=request.tenant,
            exclude=sorted(excluded),
            wait_s=wait_s,
        )

    def start(self, placed: Placed, attempt: int, deadline_s: float) -> decode_pb2.StartStream:
        request, placement = self._request, placed.placement
        message = decode_pb2.StartStream(
            epoch=placement.decode.epoch,
            deadline_s=deadline_s,
            request=request_pb2.Request(
                request_id=request.request_id,
                attempt=attempt,
                placement_id=placement.placement_id,
                tokens=(*request.prompt, *self.delivered[0]),
                prompt_tokens=len(request.prompt),
                sampling=request.sampling,
                max_tokens=request.max_tokens,
                stop_token_ids=self._stop_token_ids,
                choices=request.choices,
            ),
        )
        if placement.prefill is not None:
            message.prefill.worker_id = placement.prefill.worker_id
            message.prefill.epoch = placement.prefill.epoch
            message.prefill.address = placement.prefill.address
        return message


def _broken(what: str, worker_id: str) -> WorkerFailure:
    return WorkerFailure(
        f"worker {worker_id} broke the protocol: {what}", error_pb2.ERROR_CODE_INTERNAL, worker_id
    )
