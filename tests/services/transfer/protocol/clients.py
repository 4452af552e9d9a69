"""The decode worker's sessions in the search."""

import asyncio
from functools import partial
from itertools import count
from typing import Any

from headrace.v1 import decode_pb2
from headrace.v1 import prefill_pb2 as pb
from services.transfer.known_peers import KnownPeers
from services.transfer.local_endpoint import LocalEndpoint
from services.transfer.prefill_client import PrefillClient, PrefillClients, routes_from
from tests.services.transfer.protocol.agent import Stream
from tests.services.transfer.protocol.parts import LEASE_S, SLOT_BYTES


class Clients(PrefillClients):
    """Sessions over streams of the search; only the handshake is omitted.

    Attributes:
        streams: streams of the sessions that have not ended, by session.
    """

    def __init__(self, endpoint: LocalEndpoint, epoch: int, slots: int) -> None:
        peers = KnownPeers((endpoint,))
        super().__init__((endpoint,), peers, pb.Hello(), token=None, handshake_s=1.0)
        self._epoch = epoch
        self._slots = slots
        self._names = count(1)
        self.streams: dict[str, Stream] = {}
        self.opened: list[tuple[str, str]] = []
        self.closed: list[str] = []

    async def _open(self, worker: decode_pb2.WorkerAddress) -> PrefillClient:
        peer = f"prefill-{worker.epoch}"
        sender = pb.Endpoint(agent_name=peer, num_kv_heads=1, slots=self._slots, memory_kind="DRAM")
        welcome = pb.Welcome(
            epoch=f"{int(worker.epoch):032x}",
            slot_bytes=SLOT_BYTES,
            lease_s=LEASE_S,
            endpoints=[sender],
        )
        routes = routes_from(welcome, self._endpoints)
        client = PrefillClient(worker, welcome, routes, self._sequences)
        name = f"{self._epoch}.{next(self._names)}"
        stream = self.streams[name] = Stream()
        self._peers.add(0, sender, stream)
        self.opened.append((name, peer))
        run = asyncio.get_running_loop().create_task(self._run(client, stream, _CHANNEL))
        run.add_done_callback(partial(self._ended, name))
        self._runs.add(run)
        run.add_done_callback(self._runs.discard)
        return client

    def _ended(self, name: str, run: "asyncio.Task[None]") -> None:
        del self.streams[name]
        self.closed.append(name)


class _Channel:
    async def close(self, grace: object) -> None:
        pass


_CHANNEL: Any = _Channel()
