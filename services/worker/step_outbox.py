"""Output of a session's streams that is not sent yet, and its division into messages."""

from headrace.v1 import decode_pb2 as pb
from headrace.v1 import sampling_pb2
from runtime.core.request import MAX_LOGPROBS
from services.common.grpc_server import MAX_BATCH_BYTES

_FEW_TOKENS = MAX_BATCH_BYTES // (48 + 16 * MAX_LOGPROBS)
"""Number of tokens that fit into one message, each with all alternatives and its own delta.

The size of a message with at most this many tokens need not be computed.
"""


class StepOutbox:
    """Unsent output.

    Attributes:
        deltas: one delta for each stream with output, in the order of the first output.
    """

    def __init__(self) -> None:
        self.deltas: dict[int, pb.StreamDelta] = {}
        self._tokens = self._pieces = 0

    def delta(self, stream_id: int) -> pb.StreamDelta:
        """Return the unsent delta of a stream. Use `add` for tokens, and `add_scored`."""
        delta = self.deltas.get(stream_id)
        if delta is None:
            delta = self.deltas[stream_id] = pb.StreamDelta(stream=stream_id)
        return delta

    def add(self, stream_id: int, token: sampling_pb2.Token) -> None:
        """Add a token of a stream."""
        self.delta(stream_id).tokens.append(token)
        self._tokens += 1

    def add_scored(self, stream_id: int, piece: sampling_pb2.PromptLogprobs) -> None:
        """Add log probabilities of prompt tokens of a stream, which has no tokens yet."""
        self.delta(stream_id).prompt_logprobs.append(piece)
        self._pieces += 1

    def take(self) -> pb.DecodeStep:
        """Remove output from the outbox, in order, and return it as a message of bounded size.

        A delta that is too long is split. The rest of it and later deltas remain in the outbox.
        """
        if self._tokens <= _FEW_TOKENS and not self._pieces:
            step = pb.DecodeStep(deltas=self.deltas.values())
            self.deltas.clear()
            self._tokens = 0
            return step
        step = pb.DecodeStep()
        left = MAX_BATCH_BYTES
        while self.deltas and left > 0:
            number = next(iter(self.deltas))
            delta = self.deltas[number]
            if delta.prompt_logprobs:
                left -= self._take_piece(step, number, delta)
                continue
            size = delta.ByteSize()
            count = len(delta.tokens)
            if size > left and count > 1:
                count = max(1, count * left // size)
                first = step.deltas.add(stream=number, tokens=delta.tokens[:count])
                if delta.HasField("cached_tokens"):
                    first.cached_tokens = delta.cached_tokens
                    delta.ClearField("cached_tokens")
                del delta.tokens[:count]
                left = 0
            else:
                step.deltas.append(self.deltas.pop(number))
                left -= size
            self._tokens -= count
        return step

    def _take_piece(self, step: pb.DecodeStep, number: int, delta: pb.StreamDelta) -> int:
        """Move the first log probabilities of a delta to ``step``, and return their size, bytes."""
        piece = delta.prompt_logprobs.pop(0)
        step.deltas.add(stream=number, prompt_logprobs=[piece])
        self._pieces -= 1
        if delta == pb.StreamDelta(stream=number):
            del self.deltas[number]
        return piece.ByteSize()
