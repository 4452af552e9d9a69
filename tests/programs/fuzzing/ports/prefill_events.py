"""A decode worker's session with a prefill worker: mutated manifests, notifications and frames."""

from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import Self

import torch
from google.protobuf.message import DecodeError

from headrace.v1 import prefill_pb2 as pb
from services.transfer.prefill_client import PrefillClient
from tests.programs.fuzzing.messages import mutated, mutated_bytes
from tests.programs.fuzzing.ports.base import Port
from tests.programs.fuzzing.ports.transfers import Replay, Step, record


class _ReplayPort(Port):
    def __init__(self, replay: Replay) -> None:
        super().__init__()
        self._replay = replay

    @classmethod
    @asynccontextmanager
    async def opened(cls) -> AsyncIterator[Self]:
        port = cls(Replay(await record()))
        await port.check()
        yield port

    async def send(self, rng: Random, count: int) -> None:
        for _ in range(count):
            outcome = await self._replay.run(
                lambda client, sequence: self._steps(client, sequence, rng)
            )
            self._replay.agent.slab.copy_(self._replay.recorded.slab)
            self.outcomes[outcome] += 1

    async def check(self) -> None:
        outcome = await self._replay.run(
            lambda client, sequence: [_send(client, e) for e in self._events(sequence)]
        )
        assert outcome == "right"

    def _events(self, sequence: int) -> list[pb.PrefillEvent]:
        """Return the recorded events, as of another sequence, whose nonces are other ones."""
        events = []
        for recorded in self._replay.recorded.events:
            event = pb.PrefillEvent()
            event.CopyFrom(recorded)
            content = getattr(event, event.WhichOneof("event") or "")
            content.sequence = sequence
            if hasattr(content, "nonce"):
                content.nonce ^= sequence
            events.append(event)
        return events

    @abstractmethod
    def _steps(self, client: PrefillClient, sequence: int, rng: Random) -> list[Step]:
        """Return the steps of a fetch, with one message mutated."""


class ManifestPort(_ReplayPort):
    """Events of the session: a mutated, lost, repeated or early one in each fetch."""

    def _steps(self, client: PrefillClient, sequence: int, rng: Random) -> list[Step]:
        events = self._events(sequence)
        at = rng.randrange(len(events))
        match rng.randrange(8):
            case 0:
                del events[at]
            case 1:
                events.insert(rng.randrange(len(events) + 1), events[at])
            case 2:
                events.insert(rng.randrange(len(events)), events.pop(at))
            case _:
                try:
                    events[at] = pb.PrefillEvent.FromString(mutated(events[at], rng))
                except DecodeError:  # the session would end
                    del events[at:]
        return [_send(client, event) for event in events]


class NotificationPort(_ReplayPort):
    """NIXL notifications: forged and mutated ones before and between the events of a session."""

    def _steps(self, client: PrefillClient, sequence: int, rng: Random) -> list[Step]:
        events = self._events(sequence)
        peer = client.welcome.endpoints[0].agent_name
        genuine = [event.ready for event in events if event.HasField("ready")]
        listener = self._replay.agent.listener
        assert listener is not None
        steps: list[Step] = []
        for event in events:
            ready = rng.choice(genuine)
            data = ready.SerializeToString() if rng.random() < 0.3 else mutated(ready, rng)
            sender = peer if rng.random() < 0.9 else "another agent"
            steps.append(partial(listener.notified, sender, data))
            steps.append(_send(client, event))
        return steps


class FramePort(_ReplayPort):
    """Frames in the sender's slab: a part of one is changed, or another frame is in its place."""

    def _steps(self, client: PrefillClient, sequence: int, rng: Random) -> list[Step]:
        events = self._events(sequence)
        slots = [event.segment.slot for event in events if event.HasField("segment")]
        lengths = [event.ready.length for event in events if event.HasField("ready")]
        slot_bytes, slab = client.welcome.slot_bytes, self._replay.agent.slab
        at = rng.randrange(len(slots))
        frame = slab[slots[at] * slot_bytes :][: lengths[at]]
        if rng.random() < 0.1:  # the frame of another segment
            other = slab[slots[at - 1] * slot_bytes :][: lengths[at]]
            frame.copy_(other.clone())
        elif rng.random() < 0.5:  # anywhere
            changed = mutated_bytes(bytes(frame.numpy()), rng).ljust(len(frame), b"\0")[
                : len(frame)
            ]
            frame.copy_(torch.frombuffer(bytearray(changed), dtype=torch.uint8))
        else:  # in the headers of frame and payload
            first = rng.randrange(160)
            frame[first] = (int(frame[first]) + rng.randrange(1, 256)) % 256
        return [_send(client, event) for event in events]


def _send(client: PrefillClient, event: pb.PrefillEvent) -> Step:
    return lambda: client._dispatch(event)
