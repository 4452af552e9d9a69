"""Streams with random tokens, computed by one worker or by two."""

from collections.abc import Sequence

from headrace.v1 import decode_pb2, sampling_pb2
from services.common.token_ids import pack_tokens
from services.worker.stream_service import StreamService
from services.worker.streams import StreamSession
from tests.runtime.tiny import prompt_of
from tests.services.workers import LIMIT_S, Decode, Prefill, message_of, output_of, start_stream

SAMPLING = sampling_pb2.Sampling(temperature=0.9, top_p=1.0, repetition_penalty=1.0, seed=11)
ANSWER = 40


def start(
    service: StreamService,
    worker: Prefill | Decode,
    tokens: int,
    prefill: Prefill | None,
    *,
    choices: int = 1,
    delivered: Sequence[int] = (),
    answer: int = ANSWER,
) -> StreamSession:
    """Start a stream; without ``prefill``, the worker computes the prompt itself."""
    start = decode_pb2.StartStream(
        stream=tokens, epoch=worker.worker.identity.epoch, deadline_s=LIMIT_S
    )
    start.request.CopyFrom(message_of(tokens, answer))
    start.request.sampling.CopyFrom(SAMPLING)
    start.request.choices = choices
    start.request.tokens = pack_tokens((*prompt_of(tokens), *delivered))
    if prefill is not None:
        start.prefill.CopyFrom(prefill.address)
    return start_stream(service, start)


def tokens_of(session: StreamSession, choice: int = 0) -> list[int]:
    return [token.token for token in output_of(session).tokens if token.choice == choice]


def idle(*workers: Prefill | Decode) -> bool:
    loads = [worker.worker.engine for worker in workers]
    free = all(engine.load.pages_free == engine.pages_total for engine in loads)
    return free and all(worker.worker.idle for worker in workers)
