"""Base of the prefill and decode workers in the search of cached pages.

It has the engine, the transfer and the sessions that both send and receive KV. A worker is the
product's, from its services to its page pool. `Worker` itself, the engine's thread,
its model, NIXL, gRPC and the codec are replaced. Codec calls and pauses end within the input that
starts them: `world.py` explores these.
"""

import asyncio
import zlib
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import codec
from headrace.v1 import prefill_pb2 as pb
from runtime.core.request import Request
from runtime.engine import StepOutput
from services.transfer.extent import Extent
from services.transfer.frame import HEADER_BYTES
from services.transfer.known_peers import KnownPeers
from services.transfer.local_endpoint import LocalEndpoint
from services.transfer.prefill_client import PrefillClients
from services.transfer.receiver import Receiver
from services.transfer.sender import Sender
from services.worker.lifecycle import Worker
from services.worker.prefill_service import PrefillService
from tests.runtime.tiny import CONFIG
from tests.services.transfer.protocol.agent import Agent
from tests.services.transfer.protocol.cached_calls import NETWORK, Aborted, Call
from tests.services.transfer.protocol.cached_kv import (
    LIMITS,
    PAGE_SIZE,
    CacheBounds,
    CachedThread,
    kv_names,
)
from tests.services.transfer.protocol.fingerprint import fingerprint
from tests.services.transfer.protocol.loop import StepLoop
from tests.services.transfer.protocol.machine import Given
from tests.services.transfer.protocol.parts import (
    CLOCK,
    EMPTY,
    IGNORE,
    LEASE_S,
    NONCES,
    PAYLOAD_BYTES,
    SLOT_BYTES,
    Codecs,
    Content,
    Memory,
    Violation,
    slab_of,
)
from tests.services.transfer.protocol.parts import Call as CodecCall

_PAUSE_S = 1.0  # shorter timers are pauses, longer ones deadlines


class SideView(NamedTuple):
    """State of a worker that the search sees.

    Attributes:
        epoch: number of its epoch, from 1.
        agent: name of its transfer agent.
        inputs: inputs of its own that are possible.
        contents: contents of the slots of its slab.
        reads: READs that have not ended: landing slot, peer, remote slot.
        results: for each request "" before its start, "running", or how it has ended, and the
            prefill worker's epoch.
        held: what it holds; empty if it has nothing to do.
    """

    epoch: int
    agent: str
    inputs: tuple[Given, ...]
    contents: tuple[Content, ...]
    reads: tuple[tuple[int, str, int], ...]
    results: tuple[tuple[str, int], ...]
    held: str


class _Slots(Memory):
    """The slab of a worker: segments are encoded from its pages, and decoded into them.

    Attributes:
        peers: agent from which each landing slot was read.
    """

    def __init__(self, side: "CachedSide", slots: int) -> None:
        super().__init__(slots)
        self._side = side
        self.peers = [""] * slots

    def encode(self, extent: Extent, segment: codec.EncodeSegment, slab: Any) -> CodecCall:
        slot = segment.offset // SLOT_BYTES
        header = slab[slot * SLOT_BYTES : slot * SLOT_BYTES + HEADER_BYTES].numpy().tobytes()
        end = extent.first_token + extent.num_tokens
        request = self._side.request_in(slot)
        names = self._side.thread.read(cast(Any, segment.page_ids), extent.num_tokens)
        if names != list(kv_names(request.tokens)[extent.first_token : end]):
            self._side.loop.errors.append(f"{names} are sent as the KV of {request.tokens[:end]}")
        kv = " ".join(names)
        self.contents[slot] = Content(header, kv, self._side.agent.name)
        checksum = zlib.crc32(kv.encode())
        return CodecCall(
            lambda: codec.Encoded(PAYLOAD_BYTES, PAYLOAD_BYTES, 0, checksum), done=True
        )

    def decode(self, extent: Extent, segment: codec.DecodeSegment) -> CodecCall:
        slot = segment.offset // SLOT_BYTES
        content, errors = self.contents[slot], self._side.loop.errors
        self.contents[slot] = EMPTY  # nothing may read it again
        try:
            self._side.thread.write(cast(Any, segment.page_ids), content.kv.split(" "))
        except Violation as violation:  # one that is raised here would be an error of the codec
            errors.append(str(violation))

        def verify() -> None:  # after the header was
            if zlib.crc32(content.kv.encode()) != segment.checksum:
                raise codec.ChecksumMismatch("the checksum differs")
            if content.owner != self.peers[slot]:
                errors.append(f"KV of {content.owner} is taken for that of {self.peers[slot]}")

        return CodecCall(verify, content, done=True)


class CachedSide:
    """One epoch of a worker.

    Args:
        name: address and id of the worker.
    """

    def __init__(self, bounds: CacheBounds, name: str, epoch: int, pages: int) -> None:
        self.bounds = bounds
        self.epoch = epoch
        self.loop = StepLoop()  # type: ignore[abstract]
        self.thread = CachedThread(pages)
        self._memory = _Slots(self, 2 * bounds.slots)
        self.agent = Agent(f"{name}-{epoch}", slab_of(2 * bounds.slots))
        self.endpoint = LocalEndpoint(
            cast(Any, SimpleNamespace(sendable=(), events=IGNORE)),
            Codecs(1, self._memory, PAGE_SIZE),
            slab_of(2 * bounds.slots),
            self.agent,
        )
        self.endpoint.readable.slab_address = 0  # slots are counted from there
        self.of_prompts = range(bounds.slots)
        self.of_history = range(bounds.slots, 2 * bounds.slots)
        self.peers = KnownPeers((self.endpoint,))
        self.worker: Any = SimpleNamespace(
            engine=self.thread,
            endpoints=(self.endpoint,),
            identity=SimpleNamespace(
                worker_id=name,
                epoch=f"{epoch:032x}",
                model=CONFIG,
                compatibility=SimpleNamespace(kv_eviction=0.0),
                compatibility_message=pb.Compatibility,
            ),
            sizes=SimpleNamespace(limits=LIMITS),
            page_bytes={group.name: PAYLOAD_BYTES for group in self.thread.page_plan.groups},
            metrics=IGNORE,
            draining=False,
            report_admitted=IGNORE,
            report_computed_here=IGNORE,
            report_postponed=IGNORE,
            report_ended=IGNORE,
            count_saved=IGNORE,
        )
        self.worker.sent_tokens = partial(Worker.sent_tokens, cast(Any, self.worker))
        self._calls: dict[str, Call] = {}
        self._opened: list[tuple[str, str]] = []
        self._served: dict[str, tuple[Call, asyncio.Task[None]]] = {}
        self._ended: list[Given] = []
        self._numbers = 0
        self._nonces = 1000 * epoch
        self.hello = pb.Hello(
            worker_id=name,
            epoch=self.worker.identity.epoch,
            slot_bytes=SLOT_BYTES,
            endpoints=[self.endpoint.readable],
            address=name,
        )
        self.clients = PrefillClients(
            (self.endpoint,), self.peers, self.hello, token=None, handshake_s=5.0
        )
        self.sender: Sender
        self.receiver: Receiver
        self.service: PrefillService

    def new_sender(self, slots: range) -> Sender:
        """Return a sender that uses some slots of the slab."""
        epoch = self.worker.identity.epoch
        return Sender(
            (self.endpoint,), IGNORE, epoch=epoch, lease_s=LEASE_S, metrics=IGNORE, slots=slots
        )

    def new_receiver(self, slots: range) -> Receiver:
        """Return a receiver that uses some slots of the slab."""
        return Receiver(
            (self.endpoint,),
            self.clients,
            credits_per_sequence=2,
            read_timeout_s=1.0,
            metrics=IGNORE,
            slots=slots,
        )

    def open_call(self, address: str) -> Call:
        """Open a session with another worker."""
        self._numbers += 1
        name = f"{self.agent.name}.{self._numbers}"
        self._opened.append((name, address))
        call = self._calls[name] = Call()
        return call

    def request_in(self, slot: int) -> Request:
        """Return the request whose segment is encoded into a slot."""
        outgoing = self.sender._outgoing.items()
        key = next(
            key
            for key, each in outgoing
            for sent in each.unacknowledged.values()
            if sent.ref.slot == slot and sent.ready is None
        )
        return self.service.jobs[key].request

    def apply(self, given: Given) -> tuple[Given, ...]:
        """Process an input; return the outputs.

        Raises:
            Violation: an error that nothing handles, or a property that does not hold.
        """
        NONCES.last = self._nonces
        NETWORK.caller = self
        self._run(partial(self.take, given))
        if given == ("step",):
            self._run(lambda: self.deliver(self._engine_step(self.thread.plan)))
            self._run(lambda: self.deliver(self._engine_step(self.thread.compute)))
        self._nonces = NONCES.last
        self.thread.check_pages()
        return self._outputs()

    def _engine_step(self, step: Any) -> StepOutput:
        try:
            output: StepOutput = step()
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"the engine of {self.agent.name} fails: {error!r}") from error
        return output

    def _run(self, call: Any) -> None:
        """Process a call, and all callbacks, pauses and codec calls that follow from it."""
        asyncio._set_running_loop(self.loop)
        try:
            call()
        finally:
            asyncio._set_running_loop(None)
        while True:
            self.loop.run_until_idle()
            codec_calls = self.agent.calls
            if codec_calls._queued or codec_calls._running:
                self.agent.start_codec()
            elif pauses := [timer for timer in self.loop.timers if timer.when() < _PAUSE_S]:
                self.loop.fire(pauses[0])
            else:
                break
        if self.loop.errors:
            raise Violation(f"{self.agent.name}: {self.loop.errors[0]}")

    def take(self, given: Given) -> None:
        """Process an input of either worker."""
        match given:
            case "command", name, message:
                if name not in self._served:
                    self._serve(name)
                self._served[name][0].deliver(pb.PrefillCommands.FromString(message))
            case "end", name:
                if name in self._served:  # else its first message was lost
                    self._served[name][1].cancel()
            case "event", name, message:
                self._calls[name].deliver(pb.PrefillEvents.FromString(message))
            case "ended", name, status:
                self._calls[name].end_with(status)
            case "read", slot, how, content:
                if content is not None:
                    self._memory.contents[slot] = content
                self._memory.peers[slot] = self.agent.reads[slot].peer
                self.agent.end_read(slot, how)
            case "deadline", position:
                self.loop.fire(self.loop.timers[position])
            case ("lease expiry",):
                CLOCK.now = LEASE_S
                self.sender.expire()
                CLOCK.now = 0.0

    def deliver(self, output: StepOutput) -> None:
        """Pass a step's output to the services."""
        self.service.deliver(output)

    def _serve(self, name: str) -> None:
        """Begin the session of another worker."""
        call = Call()
        task = self.loop.create_task(self.service.Session(None, cast(Any, call)))
        self._served[name] = call, task

        def ended(task: "asyncio.Task[None]") -> None:
            del self._served[name]
            status = "UNAVAILABLE"
            if not task.cancelled() and (error := task.exception()):
                if not isinstance(error, Aborted):
                    raise error
                status = error.status.name
            self._ended.append(("ended", name, status))

        task.add_done_callback(ended)

    def _outputs(self) -> tuple[Given, ...]:
        outputs: list[Given] = [("open", name, address) for name, address in self._opened]
        self._opened.clear()
        served = {name: call for name, (call, _) in self._served.items()}
        for kind, calls in (("command", self._calls), ("event", served)):
            for name, call in calls.items():
                outputs += [
                    (kind, name, message.SerializeToString(deterministic=True))
                    for message in call.written
                ]
                call.written.clear()
        outputs += self._ended
        self._ended.clear()
        for name in [name for name, call in self._calls.items() if call.cancelled]:
            del self._calls[name]
            outputs.append(("end", name))
        outputs += [("read", slot) for slot in self.agent.started]
        self.agent.started.clear()
        self.agent.sent.clear()  # notifications are not explored here
        return tuple(outputs)

    def inputs(self) -> list[Given]:
        """Return the inputs of its own that are possible."""
        inputs: list[Given] = [("step",)] if self.thread.inputs else []
        if any(lease.since is not None for lease in self.sender._leases._leases.values()):
            inputs.append(("lease expiry",))
        inputs += [("deadline", position) for position in range(len(self.loop.timers))]
        return inputs

    def held(self) -> dict[str, int]:
        """Return how many of each thing the worker holds."""
        landing, sender = self.receiver.landing[0], self.sender
        return {
            "sequences to send": len(self.service.jobs) + sender.active,
            "slots": sender.slots_in_use,
            "leases": sender._leases.active,
            "landing slots": landing.held + landing.quarantined,
            "missing credits": landing.slots - landing._credits.free,
            "READs": len(self.agent.reads),
            "requests in the engine": len(self.thread.engine.scheduler._unfinished),
            "pages": self.thread.held,
            "tasks": len(self.loop.tasks) - 2 * (len(self._calls) + len(self._served)),
        }

    def results(self) -> tuple[tuple[str, int], ...]:
        """Return the results of the requests, if the worker has any; see `SideView`."""
        return ()

    def view(self) -> SideView:
        """Return what the search sees."""
        return SideView(
            self.epoch,
            self.agent.name,
            tuple(self.inputs()),
            tuple(self._memory.contents),
            tuple((slot, r.peer, r.remote) for slot, r in sorted(self.agent.reads.items())),
            self.results(),
            ", ".join(f"{number} {name}" for name, number in self.held().items() if number),
        )

    def roots(self) -> tuple[object, ...]:
        """Return what else the state of the worker consists of."""
        return ()

    def fingerprint(self) -> bytes:
        """Return a digest of the whole state."""
        return fingerprint(
            *(self.thread.state, self.agent, self.sender, self.receiver, self.clients, self.peers),
            *(self.service.jobs, self.service._sessions, self._calls, self._served),
            *(self._memory.contents, self._memory.peers, self.loop.tasks, self.loop.timers),
            *(self._numbers, self._nonces, *self.roots()),
        )

    def discard(self) -> None:
        """End all tasks; nothing is checked any more."""
        self.agent.close()
        self.loop.close()
