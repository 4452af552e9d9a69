"""Workers of the search of pages: real engines without a model, and real streams.

What the decode worker runs is the product's `FetchedStreams`. Engines are the product's, with its
scheduler and page pools, but each token is 1. The transfer between two workers is reduced to its
start and its end, because `world.py` explores it.
"""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest.mock import patch

from headrace.v1 import decode_pb2, prefill_pb2, request_pb2, sampling_pb2
from runtime.core.request import Request, SampledToken, SamplingParams
from runtime.engine import Add, Cancel, StepOutput
from runtime.pages.plan import PagePlan
from runtime.pages.sent import SentTokens
from services.common.token_ids import pack_tokens
from services.decode import fetched_streams
from services.decode.fetched_streams import FetchedStreams
from services.transfer.fetch import Fetch, FetchTimes
from services.worker import stream_service
from services.worker.streams import StreamSession
from services.worker.wire import token_to_message
from tests.runtime.engine.fake_executor import PAGE_SIZE
from tests.runtime.tiny import CONFIG
from tests.services.transfer.protocol.fingerprint import fingerprint
from tests.services.transfer.protocol.loop import StepLoop
from tests.services.transfer.protocol.paged_engine import SLOTS, PageBounds, Thread, engine_of
from tests.services.transfer.protocol.parts import DEADLINE_S, IGNORE, Violation


class WorkerView(NamedTuple):
    """State of a worker that the search sees.

    Attributes:
        inputs: inputs of its own that are possible.
        open: names of streams that have not ended.
        held: pages in use.
        failed: error of a stream, or "".
    """

    inputs: tuple[tuple[str, ...], ...]
    open: tuple[str, ...]
    held: int
    failed: str = ""


class PagedPrefill:
    """A prefill worker: computes prompts for decode workers, and serves whole requests."""

    def __init__(self, bounds: PageBounds) -> None:
        self._bounds = bounds
        self._thread = Thread(engine_of(bounds.prefill_pages))
        self._wholes: list[str] = []

    def apply(self, given: tuple[Any, ...]) -> tuple[tuple[Any, ...], ...]:
        """Process an input; return the messages to decode workers."""
        match given:
            case "start", name:
                self._thread.submit(Add(_request(name, self._bounds), hold=True))
            case "release", name:
                self._thread.submit(Cancel(name))
            case "whole", name:
                self._wholes.append(name)
                self._thread.submit(Add(_request(name, self._bounds)))
            case ("step",):
                return (*self._outputs(self._thread.plan()), *self._outputs(self._thread.compute()))
        return ()

    def _outputs(self, output: StepOutput) -> tuple[tuple[Any, ...], ...]:
        if output.refused:
            raise Violation(f"the prefill worker refuses {output.refused}")
        for name in output.ended:
            if name in self._wholes:
                self._wholes.remove(name)
        return tuple(("computed", name) for name, _ in output.tokens if name[0] != "w")

    def view(self) -> WorkerView:
        """Return what the search sees."""
        inputs = (("step",),) if self._thread.inputs else ()
        return WorkerView(inputs, tuple(self._wholes), self._thread.held)

    def fingerprint(self) -> bytes:
        """Return a digest of the whole state."""
        return fingerprint(self._thread.state, self._wholes)

    def discard(self) -> None:
        """Nothing needs to be ended."""


def _request(name: str, bounds: PageBounds) -> Request:
    return Request(name, (2,) * bounds.prompt, bounds.prompt, SamplingParams(), bounds.outputs)


@dataclass
class _Fetching:
    """One prompt that is requested: what has happened, and what the fetch waits for."""

    fetch: Fetch
    computed: asyncio.Future[None]
    ended: asyncio.Future[None]


@dataclass
class _Receiver:
    """A receiver whose transfers are not divided into segments."""

    worker: int
    sent: list[tuple[str, str]] = field(default_factory=list)
    fetching: dict[str, _Fetching] = field(default_factory=dict)
    numbers: int = 0

    async def fetch(self, fetch: Fetch) -> FetchTimes:
        self.numbers += 1
        name = f"{self.worker}.{self.numbers}"
        loop = asyncio.get_running_loop()
        state = _Fetching(fetch, loop.create_future(), loop.create_future())
        self.fetching[name] = state
        self.sent.append(("start", name))
        try:
            await state.computed
            token = token_to_message(SampledToken(0, 0, 1, None, ()))
            if not fetch.on_first(prefill_pb2.FirstTokens(tokens=[token])):
                await state.ended
                fetch.on_verified(FetchTimes())
            return FetchTimes()
        finally:
            fetch.closed = True
            del self.fetching[name]
            self.sent.append(("release", name))


class PagedDecode:
    """A decode worker: the product's streams over an engine without a model.

    Args:
        number: number of the worker, from 0.
    """

    def __init__(self, bounds: PageBounds, number: int) -> None:
        self._bounds = bounds
        self._failed = ""
        self._loop = StepLoop()  # type: ignore[abstract]
        self._thread = Thread(engine_of(bounds.decode_pages))
        self._receiver = _Receiver(number)
        self._sessions: dict[str, StreamSession] = {}
        worker = SimpleNamespace(
            engine=self._thread,
            identity=SimpleNamespace(worker_id="decode", epoch="e", model=CONFIG),
            metrics=IGNORE,
            draining=False,
            report_admitted=lambda placement_id: None,
            report_computed_here=lambda placement_id: None,
            report_postponed=lambda placement_id: None,
            report_ended=lambda placement_id: None,
            count_saved=lambda sent: None,
            sent_tokens=lambda request: SentTokens.whole(PagePlan(PAGE_SIZE), bounds.prompt),
            sizes=SimpleNamespace(max_running=SLOTS),
        )
        settings = SimpleNamespace(colocated=False, kv_digest=False, compute_tokens=0)
        self._service = FetchedStreams(
            cast(Any, worker), cast(Any, self._receiver), cast(Any, settings)
        )

    def apply(self, given: tuple[Any, ...]) -> tuple[tuple[Any, ...], ...]:
        """Process an input; return the messages to the prefill worker.

        Raises:
            Violation: an error that nothing handles.
        """
        asyncio._set_running_loop(self._loop)
        try:
            self._take(given)
        finally:
            asyncio._set_running_loop(None)
        self._loop.run_until_idle()
        if self._loop.errors:
            raise Violation(f"unhandled error of the decode worker: {self._loop.errors[0]}")
        self._end_sessions()
        sent = tuple(self._receiver.sent)
        self._receiver.sent = []
        return sent

    def _take(self, given: tuple[Any, ...]) -> None:
        match given:
            case "open", name, how:
                service = self._service
                service._has_room = lambda: how == "early"  # type: ignore[method-assign]
                tokens = {"computed": self._bounds.prompt, "evicted": 1}.get(how, 0)
                service._here.tokens_of = lambda *_: tokens  # type: ignore[method-assign]
                session = StreamSession(name, service.open, service.drop, service.cancel_choice)
                self._sessions[name] = session
                session._start(_start(name, self._bounds))
            case "cancel", name:
                session = self._sessions.pop(name)
                session.end(session.streams[1])
            case "computed", name:
                if fetching := self._receiver.fetching.get(name):
                    fetching.computed.set_result(None)
            case "end of a transfer", name:
                self._receiver.fetching[name].ended.set_result(None)
            case ("plan",):
                self._service.deliver(self._thread.plan())
            case ("compute",):
                self._service.deliver(self._thread.compute())

    def _end_sessions(self) -> None:
        """Check the output of the streams that have ended, and forget them."""
        for name, session in list(self._sessions.items()):
            if session.streams:
                continue
            del self._sessions[name]
            delta = session.outbox.deltas[1]
            if delta.HasField("error"):
                self._failed = f"stream {name} fails: {delta.error.message}"
            elif [token.index for token in delta.tokens] != list(range(self._bounds.outputs)):
                raise Violation(f"stream {name} has the tokens {delta.tokens}")

    def view(self) -> WorkerView:
        """Return what the search sees."""
        transfers = [
            ("end of a transfer", name)
            for name, each in self._receiver.fetching.items()
            if each.computed.done() and each.fetch.reserved.done() and not each.ended.done()
        ]
        inputs = (*self._thread.inputs, *transfers)
        held = self._thread.held
        tasks = len(self._loop.tasks)
        return WorkerView(inputs, tuple(self._sessions), held + tasks, self._failed)

    def fingerprint(self) -> bytes:
        """Return a digest of the state; streams are described by what decides their future."""
        streams = [
            (key, s.reserved is not None and s.reserved.done(), s.early is None, s.transfer is None)
            for key, s in self._service.streams.items()
        ]
        decoding = [
            (s.decoding_since > 0, len(s.first), s.may_compute)
            for s in self._service.streams.values()
        ]
        fetching = [
            (name, each.fetch.key, each.computed.done(), each.ended.done())
            for name, each in self._receiver.fetching.items()
        ]
        receiver = self._receiver
        names = list(self._sessions), receiver.worker, receiver.numbers, len(self._loop.tasks)
        return fingerprint(self._thread.state, streams, decoding, fetching, names, self._failed)

    def discard(self) -> None:
        """End all tasks; nothing is checked any more."""
        self._loop.close()


def _start(name: str, bounds: PageBounds) -> decode_pb2.StartStream:
    return decode_pb2.StartStream(
        stream=1,
        epoch="e",
        prefill=decode_pb2.WorkerAddress(worker_id="prefill"),
        deadline_s=DEADLINE_S,
        request=request_pb2.Request(
            request_id=name,
            placement_id="p",
            tokens=pack_tokens([2] * bounds.prompt),
            prompt_tokens=bounds.prompt,
            sampling=sampling_pb2.Sampling(top_p=1.0, repetition_penalty=1.0),
            max_tokens=bounds.outputs,
            choices=1,
        ),
    )


@contextmanager
def without_logs() -> Iterator[None]:
    """Disable the log of the product."""
    with ExitStack() as stack:
        for module in (fetched_streams, stream_service):
            stack.enter_context(patch.object(module, "log", IGNORE))
        yield
