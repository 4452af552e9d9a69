"""A decode worker in the search: a real `Receiver` and real sessions, one input at a time."""

import asyncio
import zlib
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import codec
from headrace.v1 import decode_pb2, request_pb2, sampling_pb2
from headrace.v1 import prefill_pb2 as pb
from runtime.engine import Reserved
from runtime.pages.sent import SentTokens
from services.common.token_ids import pack_tokens
from services.transfer.extent import Extent
from services.transfer.fetch import Fetch, FetchFailed, FetchTimes
from services.transfer.local_endpoint import LocalEndpoint
from services.transfer.receiver import Receiver
from tests.services.transfer.protocol.agent import Agent
from tests.services.transfer.protocol.clients import Clients
from tests.services.transfer.protocol.fingerprint import fingerprint
from tests.services.transfer.protocol.loop import StepLoop
from tests.services.transfer.protocol.parts import (
    DEADLINE_S,
    EMPTY,
    IGNORE,
    PAGES,
    SLOT_BYTES,
    Bounds,
    Call,
    Codecs,
    Memory,
    Violation,
    kv_name,
    slab_of,
)


class DecodeView(NamedTuple):
    """State of a decode worker that the search compares and checks.

    Attributes:
        epoch: number of its epoch, from 1.
        agent: name of its transfer agent.
        inputs: inputs of its own that are possible, such as the end of a decode.
        reads: READs that have not ended: landing slot, peer, remote slot, whether it is overdue.
        results: for each sequence "" before its fetch, "running", or how the fetch has ended, and
            the prefill worker's epoch.
        polls: whether notifications are received.
        held: what it still holds; empty at the end.
    """

    epoch: int
    agent: str
    inputs: tuple[tuple[Any, ...], ...]
    reads: tuple[tuple[int, str, int, bool], ...]
    results: tuple[tuple[str, int], ...]
    polls: bool
    held: str


class _Landing(Memory):
    """The landing slab, from which segments are decoded into pages.

    Attributes:
        pages: the KV in the pages, by (page, layer).
        decoding: (landing slot, page) of each decode that runs.
    """

    def __init__(self, worker: "DecodeSide", slots: int) -> None:
        super().__init__(slots)
        self._worker = worker
        self.pages: dict[tuple[int, int], str] = {}
        self.decoding: list[tuple[int, int]] = []

    def decode(self, extent: Extent, segment: codec.DecodeSegment) -> Call:
        slot, page = segment.offset // SLOT_BYTES, cast(tuple[int, ...], segment.page_ids)[0]
        self._worker.check_open(page)
        if slot in self._worker.agent.reads:
            raise Violation(f"landing slot {slot} is decoded while a READ may write to it")
        content = self.contents[slot]
        self.decoding.append((slot, page))

        def finish() -> None:
            self.decoding.remove((slot, page))
            self.contents[slot] = EMPTY  # nothing may read it again
            self._worker.check_open(page)
            self.pages[page, extent.first_layer] = content.kv
            if zlib.crc32(content.kv.encode()) != segment.checksum:
                raise codec.ChecksumMismatch("the checksum differs")

        return Call(finish, content)


class DecodeSide:
    """One epoch of a decode worker."""

    def __init__(self, bounds: Bounds, epoch: int) -> None:
        self._bounds = bounds
        self._epoch = epoch
        self._loop = StepLoop()  # type: ignore[abstract]
        self._memory = _Landing(self, bounds.slots)
        self.agent = Agent(f"decode-{epoch}", slab_of(bounds.slots))
        self._endpoint = LocalEndpoint(
            cast(Any, SimpleNamespace(sendable=(), events=IGNORE)),
            Codecs(bounds.layers, self._memory),
            slab_of(bounds.slots),
            self.agent,
        )
        self._clients = Clients(self._endpoint, epoch, bounds.sender_slots)
        self._receiver = Receiver(
            (self._endpoint,),
            self._clients,
            credits_per_sequence=2,
            read_timeout_s=1.0,
            metrics=IGNORE,
        )
        self._fetches: dict[int, Fetch] = {}
        self._tasks: dict[int, asyncio.Task[FetchTimes]] = {}
        self._results = [("", 0)] * bounds.sequences
        self._wanted: list[int] = []  # sequences whose pages are to be reserved
        self._verified: set[int] = set()

    def apply(self, given: tuple[Any, ...]) -> tuple[tuple[Any, ...], ...]:
        """Process an input; return the outputs.

        Raises:
            Violation: an error that nothing handles, or a property that does not hold.
        """
        asyncio._set_running_loop(self._loop)
        try:
            self._take(given)
        finally:
            asyncio._set_running_loop(None)
        self._loop.run_until_idle()
        if self._loop.errors:
            raise Violation(f"unhandled error of the decode worker: {self._loop.errors[0]}")
        return self._outputs()

    def _take(self, given: tuple[Any, ...]) -> None:
        match given:
            case "fetch", number, attempt, epoch:
                self._fetch(number, attempt, epoch)
            case "pages", number:
                self._wanted.remove(number)
                first = PAGES * number
                pages = tuple(range(first, first + self._bounds.chunks))
                self._fetches[number].reserved.set_result(Reserved(str(number), (pages,)))
            case "cancel", number:
                self._tasks[number].cancel()
            case "event", name, message:
                if stream := self._clients.streams.get(name):
                    event = pb.PrefillEvent.FromString(message)
                    stream.deliver(pb.PrefillEvents(events=[event]))
            case "end session", name:
                if stream := self._clients.streams.get(name):
                    stream.end()
            case "notification", peer, message:
                cast(Any, self.agent.listener).notified(peer, message)
            case "read", slot, how, content:
                if content is not None:
                    self._memory.contents[slot] = content
                self.agent.end_read(slot, how)
            case ("start of decodes",):
                self.agent.start_codec()
            case ("end of a decode",):
                self.agent.end_codec()
            case ("end of a pause",):
                self._loop.fire(self._timers(of_pauses=True)[0])
            case "deadline", position:
                self._loop.fire(self._timers(of_pauses=False)[position])

    def _timers(self, *, of_pauses: bool) -> list[asyncio.TimerHandle]:
        return [timer for timer in self._loop.timers if (timer.when() < 1.0) == of_pauses]

    def _fetch(self, number: int, attempt: int, epoch: str) -> None:
        first = PAGES * number
        request = request_pb2.Request(
            request_id=f"request-{number}",
            attempt=attempt,
            placement_id="p",
            tokens=pack_tokens([number] * self._bounds.chunks),
            prompt_tokens=self._bounds.chunks,
            sampling=sampling_pb2.Sampling(top_p=1.0, repetition_penalty=1.0),
            max_tokens=8,
            choices=1,
        )
        for page in range(first, first + self._bounds.chunks):
            for layer in range(self._bounds.layers):
                self._memory.pages[page, layer] = ""
        fetch = self._fetches[number] = Fetch(
            key=f"{number}.{attempt}",
            prefill=decode_pb2.WorkerAddress(worker_id="prefill", epoch=epoch, address=""),
            request=request,
            reserved=self._loop.create_future(),
            sent=SentTokens.whole(self._endpoint.layout.plan, self._bounds.chunks),
            on_first=_goes_on,
            on_verified=partial(self._check_verified, number),
            deadline_s=DEADLINE_S,
        )
        self._results[number] = "running", int(epoch)
        self._wanted.append(number)
        task = self._loop.create_task(self._receiver.fetch(fetch))
        self._tasks[number] = task
        task.add_done_callback(partial(self._ended, number))

    def _check_verified(self, number: int, times: FetchTimes) -> None:
        """The sequence joins the batch: its KV must be complete and right."""
        self._verified.add(number)
        for (page, layer), kv in self._memory.pages.items():
            if page // PAGES == number and kv != kv_name(page, layer):
                self._loop.errors.append(
                    f"sequence {number} attends {kv or 'nothing'!r} as {kv_name(page, layer)!r}"
                )

    def check_open(self, page: int) -> None:
        """Check that a page is not written to before or after the fetch of its sequence."""
        number = page // PAGES
        if self._results[number][0] != "running":
            raise Violation(f"page {page} is written to, but its sequence is not fetched")

    def _ended(self, number: int, task: "asyncio.Task[FetchTimes]") -> None:
        del self._tasks[number], self._fetches[number]
        if any(page // PAGES == number for _, page in self._memory.decoding):
            self._loop.errors.append(f"the fetch of sequence {number} ended during a decode")
        if number in self._wanted:
            self._wanted.remove(number)
        epoch = self._results[number][1]
        if task.cancelled():
            self._results[number] = "cancelled", epoch
        elif (error := task.exception()) is None:
            self._results[number] = "done", epoch
            if number not in self._verified:
                self._loop.errors.append(f"sequence {number} ended unverified")
        elif isinstance(error, FetchFailed):
            self._results[number] = f"failed: {error.message}", epoch
        else:
            self._loop.errors.append(f"the fetch of sequence {number} failed: {error!r}")

    def _outputs(self) -> tuple[tuple[Any, ...], ...]:
        outputs: list[tuple[Any, ...]] = []
        outputs += [("open", name, peer, self.agent.name) for name, peer in self._clients.opened]
        self._clients.opened.clear()
        for name, stream in self._clients.streams.items():
            for message in stream.written:
                for command in message.commands:
                    written = command.SerializeToString(deterministic=True)
                    outputs.append(("command", name, written))
            stream.written.clear()
        outputs += [("read", slot) for slot in self.agent.started]
        for slot, page in self._memory.decoding:
            if slot in self.agent.started:
                raise Violation(f"landing slot {slot} is read into while page {page} is decoded")
        self.agent.started.clear()
        outputs += [("closed", name) for name in self._clients.closed]
        self._clients.closed.clear()
        return tuple(outputs)

    def view(self) -> DecodeView:
        """Return what the search sees."""
        calls, landing = self.agent.calls, self._receiver.landing[0]
        inputs: list[tuple[Any, ...]] = [("pages", number) for number in self._wanted[:1]]
        if calls._queued:
            inputs.append(("start of decodes",))
        if calls._running:
            inputs.append(("end of a decode",))
        if self._timers(of_pauses=True):
            inputs.append(("end of a pause",))
        deadlines = self._timers(of_pauses=False)
        inputs += [("deadline", position) for position in range(len(deadlines))]
        inputs += [("cancel", number) for number in self._tasks]
        held = {
            "fetches": len(self._tasks),
            "held slots": landing.held,
            "quarantined slots": landing.quarantined,
            "overdue slots": landing.overdue,
            "missing credits": landing.slots - landing._credits.free,
            "decodes": len(calls),
            "READs": len(self.agent.reads),
            "announced segments": int(self._polls),
            "tasks": len(self._loop.tasks) - 2 * len(self._clients.streams),
        }
        return DecodeView(
            self._epoch,
            self.agent.name,
            tuple(inputs),
            tuple(
                (slot, read.peer, read.remote, read.drained is not None)
                for slot, read in sorted(self.agent.reads.items())
            ),
            tuple(self._results),
            self._polls,
            ", ".join(f"{number} {name}" for name, number in held.items() if number),
        )

    @property
    def _polls(self) -> bool:
        return self.agent.listener is not None and self.agent.listener.waiting

    def fingerprint(self) -> bytes:
        """Return a digest of the whole state."""
        return fingerprint(
            *(self._receiver, self._clients, self.agent, self._fetches, self._results),
            *(self._wanted, sorted(self._verified), self._memory.pages, self._memory.contents),
            *(self._memory.decoding, self._loop.tasks, self._loop.timers),
        )

    def discard(self) -> None:
        """End all tasks; nothing is checked any more."""
        self.agent.close()
        self._loop.close()


def _goes_on(first: pb.FirstTokens) -> bool:
    """The sequence never ends with its first tokens."""
    return False
