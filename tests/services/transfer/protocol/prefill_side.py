"""A prefill worker in the search: real sessions and a real `Sender`, one input at a time."""

import asyncio
import zlib
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch

import codec
from headrace.v1 import prefill_pb2 as pb
from runtime.core.request import SampledToken
from runtime.engine import Add, Cancel, Computed
from runtime.pages.sent import SentTokens
from services.transfer.extent import Extent
from services.transfer.frame import HEADER_BYTES
from services.transfer.local_endpoint import LocalEndpoint
from services.transfer.routes import Route
from services.transfer.sender import Sender
from services.worker.prefill_session import Job, PrefillSession
from tests.services.transfer.protocol.agent import Agent, Stream
from tests.services.transfer.protocol.fingerprint import fingerprint
from tests.services.transfer.protocol.loop import StepLoop
from tests.services.transfer.protocol.parts import (
    CLOCK,
    IGNORE,
    LEASE_S,
    NONCES,
    PAGES,
    PAYLOAD_BYTES,
    SLOT_BYTES,
    Bounds,
    Call,
    Codecs,
    Content,
    Memory,
    Violation,
    kv_name,
    slab_of,
)


class PrefillView(NamedTuple):
    """State of a prefill worker that the search compares and checks.

    Attributes:
        epoch: number of its epoch, from 1.
        agent: name of its transfer agent.
        inputs: inputs of its own that are possible, such as the end of an encode.
        contents: contents of its slots.
        open: keys of the sequences that have not ended.
        held: what it still holds: sequences, slots, leases and encodes; empty at the end.
    """

    epoch: int
    agent: str
    inputs: tuple[tuple[Any, ...], ...]
    contents: tuple[Content, ...]
    open: frozenset[str]
    held: str


class _Slots(Memory):
    """The slab, into which segments are encoded."""

    def __init__(self, worker: "PrefillSide", slots: int) -> None:
        super().__init__(slots)
        self._worker = worker

    def encode(self, extent: Extent, segment: codec.EncodeSegment, slab: torch.Tensor) -> Call:
        slot = segment.offset // SLOT_BYTES
        header = slab[slot * SLOT_BYTES : slot * SLOT_BYTES + HEADER_BYTES].numpy().tobytes()
        kv = kv_name(cast(tuple[int, ...], segment.page_ids)[0], extent.first_layer)
        written = Content(header, kv, self._worker.owner_of(slot))
        self.contents[slot] = written._replace(kv="")
        self._worker.written.append(slot)

        def finish() -> codec.Encoded:
            self.contents[slot] = written
            return codec.Encoded(PAYLOAD_BYTES, PAYLOAD_BYTES, 0, zlib.crc32(kv.encode()))

        return Call(finish)


class _Engine:
    """Ids of the prompts to compute, oldest first."""

    def __init__(self) -> None:
        self.waiting: list[str] = []

    def submit(self, command: object) -> None:
        if isinstance(command, Add):
            self.waiting.append(command.request.id)
        elif isinstance(command, Cancel) and command.id in self.waiting:
            self.waiting.remove(command.id)


class PrefillSide:
    """One epoch of a prefill worker.

    Attributes:
        written: slots into which encodes were started since the last input.
    """

    def __init__(self, bounds: Bounds, epoch: int) -> None:
        self._chunks = bounds.chunks
        self._epoch = epoch
        self._loop = StepLoop()  # type: ignore[abstract]
        self._memory = _Slots(self, bounds.sender_slots)
        self._agent = Agent(f"prefill-{epoch}", slab_of(bounds.sender_slots))
        self._engine = _Engine()
        self._jobs: dict[str, Job] = {}
        self._sessions: dict[str, PrefillSession] = {}
        self._streams: dict[str, Stream] = {}
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._chunks_done: dict[str, int] = {}
        self._nonces = 1000 * epoch
        self.written: list[int] = []
        endpoint = LocalEndpoint(
            cast(Any, SimpleNamespace(sendable=(), events=IGNORE)),
            Codecs(bounds.layers, self._memory),
            slab_of(bounds.sender_slots),
            self._agent,
        )
        plan = endpoint.layout.plan
        self._worker: Any = SimpleNamespace(
            engine=self._engine,
            identity=SimpleNamespace(model=SimpleNamespace(context_length=1 << 20)),
            sizes=SimpleNamespace(limits=SimpleNamespace(max_running=100, max_waiting=0)),
            draining=False,
            sent_tokens=lambda request, first: SentTokens.whole(plan, request.prompt_tokens),
            report_admitted=IGNORE,
        )
        self._sender = Sender(
            (endpoint,),
            IGNORE,
            epoch=f"{epoch:032x}",
            lease_s=LEASE_S,
            metrics=IGNORE,
        )

    def apply(self, given: tuple[Any, ...]) -> tuple[tuple[Any, ...], ...]:
        """Process an input; return the outputs.

        Raises:
            Violation: an error that nothing handles.
        """
        NONCES.last = self._nonces
        asyncio._set_running_loop(self._loop)
        try:
            self._take(given)
        finally:
            asyncio._set_running_loop(None)
        self._loop.run_until_idle()
        self._nonces = NONCES.last
        if self._loop.errors:
            raise Violation(f"unhandled error of the prefill worker: {self._loop.errors[0]}")
        return self._outputs()

    def _take(self, given: tuple[Any, ...]) -> None:
        match given:
            case "open", name, agent:
                self._open(name, agent)
            case "command", name, message:
                command = pb.PrefillCommand.FromString(message)
                self._streams[name].deliver(pb.PrefillCommands(commands=[command]))
            case "end session", name:
                if run := self._runs.get(name):  # else its first message was lost
                    run.cancel()
            case "start of a prompt", key:
                self._jobs[key].session.computing(self._jobs[key])
                self._chunks_done[key] = 0
            case "chunk", key:
                self._compute(key)
            case ("start of encodes",):
                self._agent.start_codec()
            case ("end of an encode",):
                self._agent.end_codec()
            case ("end of a pause",):
                self._loop.fire(self._pauses[0])
            case "sender deadline", key:
                self._loop.fire(self._jobs[key].expiry)
            case ("lease expiry",):
                CLOCK.now = LEASE_S
                self._sender.expire()
                CLOCK.now = 0.0

    def _open(self, name: str, agent: str) -> None:
        """Begin the session of a decode worker, as `PrefillWorker.Session` does."""
        hello = pb.Hello(
            worker_id="decode", slot_bytes=SLOT_BYTES, endpoints=[pb.Endpoint(agent_name=agent)]
        )
        routes = (Route(0, 0, range(1)),)
        self._sessions[name] = PrefillSession(
            name, hello, routes, self._worker, self._sender, self._jobs
        )
        stream = self._streams[name] = Stream()
        run = self._loop.create_task(self._sessions[name].run(stream))
        self._runs[name] = run

        def ended(task: "asyncio.Task[None]") -> None:
            del self._sessions[name], self._streams[name], self._runs[name]
            if not task.cancelled() and (error := task.exception()):
                self._loop.errors.append(f"a session failed: {error!r}")

        run.add_done_callback(ended)

    def _compute(self, key: str) -> None:
        """Deliver a chunk of a prompt, as `PrefillWorker` does with a step's output."""
        chunk = self._chunks_done[key]
        self._chunks_done[key] += 1
        is_last = chunk + 1 == self._chunks
        if is_last:
            self._jobs[key].session.sampled(self._jobs[key], SampledToken(0, 0, 7))
            self._engine.waiting.remove(key)
            del self._chunks_done[key]
        page = PAGES * int(self._jobs[key].request.tokens[0]) + chunk
        self._sender.add_computed(Computed(key, chunk, 1, ((page,),)))
        if is_last:
            self._sender.finish_computing(key)

    def owner_of(self, slot: int) -> str:
        """Return the key of the sequence that encodes into a slot."""
        return next(
            key
            for key, outgoing in self._sender._outgoing.items()
            for sent in outgoing.unacknowledged.values()
            if sent.ref.slot == slot and sent.ready is None
        )

    @property
    def _pauses(self) -> list[asyncio.TimerHandle]:
        return [timer for timer in self._loop.timers if timer.when() < LEASE_S]

    def _outputs(self) -> tuple[tuple[Any, ...], ...]:
        outputs: list[tuple[Any, ...]] = []
        for name, stream in self._streams.items():
            outputs += [
                ("event", name, event.SerializeToString(deterministic=True))
                for message in stream.written
                for event in message.events
            ]
            stream.written.clear()
        outputs += [
            ("notify", peer, self._agent.name, message) for peer, message in self._agent.sent
        ]
        outputs += [("write", slot) for slot in self.written]
        self._agent.sent.clear()
        self.written.clear()
        return tuple(outputs)

    def view(self) -> PrefillView:
        """Return what the search sees."""
        calls, sender = self._agent.calls, self._sender
        inputs: list[tuple[Any, ...]] = []
        if waiting := self._engine.waiting:
            name = "chunk" if waiting[0] in self._chunks_done else "start of a prompt"
            inputs.append((name, waiting[0]))
        if calls._queued:
            inputs.append(("start of encodes",))
        if calls._running:
            inputs.append(("end of an encode",))
        if self._pauses:
            inputs.append(("end of a pause",))
        if any(lease.since is not None for lease in sender._leases._leases.values()):
            inputs.append(("lease expiry",))
        inputs += [("sender deadline", key) for key in self._jobs]
        held = {
            "sequences": len(self._jobs) + sender.active,
            "slots": sender.slots_in_use,
            "leases": sender._leases.active,
            "encodes": len(calls),
            "tasks": len(self._loop.tasks) - 2 * len(self._sessions),
        }
        return PrefillView(
            self._epoch,
            self._agent.name,
            tuple(inputs),
            tuple(self._memory.contents),
            frozenset(self._jobs) & frozenset(sender._outgoing),
            ", ".join(f"{number} {name}" for name, number in held.items() if number),
        )

    def fingerprint(self) -> bytes:
        """Return a digest of the whole state."""
        return fingerprint(
            *(self._sender, self._agent, self._engine, self._jobs, self._sessions, self._streams),
            *(self._chunks_done, self._memory.contents, self._loop.tasks, self._loop.timers),
            self._nonces,
        )

    def discard(self) -> None:
        """End all tasks; nothing is checked any more."""
        self._agent.close()
        self._loop.close()
