"""The prefill and the decode worker of the search of cached pages."""

from typing import Any, cast

from headrace.v1 import decode_pb2, request_pb2, sampling_pb2
from runtime.engine import StepOutput
from services.common.token_ids import pack_tokens
from services.decode.fetched_streams import FetchedStreams
from services.prefill.history import HistoryReader
from services.prefill.history_policy import HistoryPolicy
from services.worker.prefill_service import PrefillService
from services.worker.streams import StreamSession
from tests.services.transfer.protocol.cached_kv import CacheBounds
from tests.services.transfer.protocol.cached_side import CachedSide
from tests.services.transfer.protocol.machine import Given
from tests.services.transfer.protocol.parts import DEADLINE_S, LEASE_S, Ignore, Violation


class CachedPrefill(CachedSide):
    """A prefill worker, which reads history from the decode worker."""

    def __init__(self, bounds: CacheBounds, epoch: int) -> None:
        super().__init__(bounds, "prefill", epoch, bounds.prefill_pages)
        self.sender = self.new_sender(self.of_prompts)
        self.receiver = self.new_receiver(self.of_history)
        self.history = HistoryReader(self.worker, self.clients, self.receiver, HistoryPolicy())
        self.service = PrefillService(
            self.worker, self.sender, self.peers, lease_s=LEASE_S, history=self.history
        )

    def roots(self) -> tuple[object, ...]:
        return (self.history._policy,)


class _Streams(FetchedStreams):
    """Streams for which the search decides whether they ask for KV before they have pages."""

    how = ""

    def _has_room(self) -> bool:
        return self.how == "early"


class _NotHere(Ignore):
    """Computes no prompts on the decode worker."""

    def tokens_of(self, *_: object) -> int:
        return 0


class CachedDecode(CachedSide):
    """A decode worker, which sends history to the prefill worker.

    Args:
        number: number of the worker, from 0.
    """

    def __init__(self, bounds: CacheBounds, number: int, epoch: int) -> None:
        super().__init__(bounds, f"decode{number}", epoch, bounds.decode_pages)
        self.sender = self.new_sender(self.of_history)
        self.receiver = self.new_receiver(self.of_prompts)
        self.service = PrefillService(
            self.worker, self.sender, self.peers, lease_s=LEASE_S, computes=False
        )
        settings: Any = Ignore()
        settings.colocated = settings.kv_digest = False
        settings.compute_tokens = 0
        self._streams = _Streams(self.worker, self.receiver, settings)
        self._streams._here = cast(Any, _NotHere())
        self._sessions: dict[int, StreamSession] = {}
        self._started = 0
        here = (prompt.decode == number for prompt in bounds.requests)
        self._results = [("" if is_here else "elsewhere", 0) for is_here in here]
        if bounds.cached is not None:
            self.thread.answer(bounds.cached)

    def take(self, given: Given) -> None:
        match given:
            case "request", number, how, prefill_epoch:
                self._start(number, how, prefill_epoch)
            case "cancel", number:
                session = self._sessions.pop(number)
                self._results[number] = "cancelled", 0
                session.end(session.streams[1])
            case _:
                super().take(given)

    def deliver(self, output: StepOutput) -> None:
        self._streams.deliver(output)
        super().deliver(output)

    def apply(self, given: Given) -> tuple[Given, ...]:
        outputs = super().apply(given)
        self._streams.how = ""
        self._end_sessions()
        return outputs

    def _start(self, number: int, how: str, prefill_epoch: int) -> None:
        """Start a request. A client that repeats one uses its id again."""
        prompt, service = self.bounds.requests[number], self._streams
        service.how = how
        self._started += 1
        name = f"gateway-{self._started}"
        session = StreamSession(name, service.open, service.drop, service.cancel_choice)
        self._sessions[number] = session
        self._results[number] = "running", prefill_epoch
        session._start(
            decode_pb2.StartStream(
                stream=1,
                epoch=self.worker.identity.epoch,
                prefill=decode_pb2.WorkerAddress(
                    worker_id="prefill", epoch=f"{prefill_epoch:032x}", address="prefill"
                ),
                deadline_s=DEADLINE_S,
                request=request_pb2.Request(
                    request_id=f"request-{number}",
                    placement_id="p",
                    tokens=pack_tokens(prompt.tokens),
                    prompt_tokens=len(prompt.tokens),
                    sampling=sampling_pb2.Sampling(top_p=1.0, repetition_penalty=1.0),
                    max_tokens=prompt.outputs,
                    choices=prompt.choices,
                ),
            )
        )

    def _end_sessions(self) -> None:
        """Check the output of the streams that have ended, and forget them."""
        for number, session in list(self._sessions.items()):
            if session.streams:
                continue
            del self._sessions[number]
            prompt, delta = self.bounds.requests[number], session.outbox.deltas[1]
            epoch = self._results[number][1]
            if delta.HasField("error"):
                self._results[number] = f"failed: {delta.error.message}", epoch
                continue
            self._results[number] = "done", epoch
            found = sorted((token.choice, token.index) for token in delta.tokens)
            choices, outputs = range(prompt.choices), range(prompt.outputs)
            if found != [(choice, index) for choice in choices for index in outputs]:
                raise Violation(f"request {number} has the tokens {delta.tokens}")

    def inputs(self) -> list[Given]:
        return [*super().inputs(), *(("cancel", number) for number in self._sessions)]

    def results(self) -> tuple[tuple[str, int], ...]:
        return tuple(self._results)

    def held(self) -> dict[str, int]:
        return {**super().held(), "streams": len(self._streams.streams)}

    def roots(self) -> tuple[object, ...]:
        return self._streams.streams, self._sessions, self._results
