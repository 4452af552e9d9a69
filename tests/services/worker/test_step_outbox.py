"""Division of a session's output into messages of bounded size."""

from headrace.v1 import decode_pb2 as pb
from headrace.v1 import sampling_pb2
from runtime.core.request import MAX_LOGPROBS
from services.common.grpc_server import MAX_BATCH_BYTES
from services.common.messages import MAX_CHOICES
from services.worker import step_outbox
from services.worker.step_outbox import StepOutbox

LARGEST = (1 << 32) - 1
TOP = [sampling_pb2.TopLogprob(token=LARGEST, logprob=-0.1)] * MAX_LOGPROBS


def test_tokens_that_are_sent_without_computing_their_size_fit_into_a_message() -> None:
    """Each has a stream of its own, all alternatives and the largest numbers."""
    outbox = StepOutbox()
    for number in range(step_outbox._FEW_TOKENS):
        token = sampling_pb2.Token(
            choice=MAX_CHOICES - 1, index=LARGEST, token=LARGEST, logprob=-0.1, top=TOP
        )
        outbox.add((1 << 64) - 1 - number, token)
    step = outbox.take()
    assert not outbox.deltas
    assert len(step.deltas) == step_outbox._FEW_TOKENS
    assert MAX_BATCH_BYTES / 2 < step.ByteSize() <= MAX_BATCH_BYTES


def test_longer_output_is_divided() -> None:
    outbox = StepOutbox()
    for index in range(8 * step_outbox._FEW_TOKENS):
        outbox.add(1, sampling_pb2.Token(index=index, token=LARGEST, logprob=-0.1, top=TOP))
    found: list[int] = []
    while outbox.deltas:
        step = outbox.take()
        assert isinstance(step, pb.DecodeStep)
        assert step.ByteSize() <= 2 * MAX_BATCH_BYTES
        found += [token.index for delta in step.deltas for token in delta.tokens]
    assert found == list(range(8 * step_outbox._FEW_TOKENS))


def test_log_probabilities_of_prompts_are_divided_and_precede_tokens() -> None:
    outbox = StepOutbox()
    for first in range(1, 41):
        piece = sampling_pb2.PromptLogprobs(first=first, top_logprobs=[-0.1] * 20_000)
        outbox.add_scored(1 + first % 2, piece)
    for stream in (1, 2):
        outbox.add(stream, sampling_pb2.Token(index=0, token=7))
        outbox.delta(stream).cached_tokens = 0
    found: dict[int, list[int]] = {1: [], 2: []}
    while outbox.deltas:
        step = outbox.take()
        assert step.ByteSize() <= 2 * MAX_BATCH_BYTES
        for delta in step.deltas:
            found[delta.stream] += [piece.first for piece in delta.prompt_logprobs]
            found[delta.stream] += [-token.token for token in delta.tokens]
    assert found == {1: [*range(2, 41, 2), -7], 2: [*range(1, 41, 2), -7]}
    outbox.add(3, sampling_pb2.Token(index=0, token=7))
    assert outbox.take().deltas[0].stream == 3
