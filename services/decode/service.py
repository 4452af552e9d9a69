"""The decode worker: fetches prompts' KV from prefill workers and decodes them in one batch.

It also sends KV of earlier turns of a chat to prefill workers that lack it.
"""

import uvloop

from headrace.v1 import decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from runtime.engine import StepOutput
from runtime.pages.sizes import token_bytes
from services.common.grpc_server import GrpcServer
from services.common.placement import Role
from services.decode.fetched_streams import FetchedStreams
from services.decode.settings import DecodeSettings
from services.transfer.known_peers import KnownPeers
from services.transfer.local_endpoint import Endpoints
from services.transfer.policy import LinkPolicy
from services.transfer.prefill_client import PrefillClients
from services.transfer.receiver import Receiver
from services.transfer.sender import Sender
from services.worker.endpoints import open_endpoints
from services.worker.lifecycle import Worker, run_worker
from services.worker.loading import Loaded, running_ranks
from services.worker.prefill_service import SERVICE as HISTORY_SERVICE
from services.worker.prefill_service import PrefillService
from services.worker.settings import MAX_KV_TOKENS
from services.worker.stream_service import SERVICE

loop_factory = uvloop.new_event_loop

_HISTORY_LEASE_S = 30.0
"""Time without an acknowledgement or a credit from a prefill worker after which its leases on
history expire, in seconds."""


class DecodeWorker(Worker):
    """A decode worker: engine thread, receiver, and the streams of gateways.

    Attributes:
        history: sends KV that is cached here to prefill workers; None if this worker does not.
    """

    def __init__(self, settings: DecodeSettings, loaded: Loaded, endpoints: Endpoints) -> None:
        super().__init__(loaded, endpoints)
        self.overflow_tokens = _overflow_tokens(settings, loaded, endpoints)
        peers = KnownPeers(endpoints)
        self.history = self._new_history(settings, peers) if self.sizes.history_slots else None
        self._hello = prefill_pb2.Hello(
            worker_id=loaded.identity.worker_id,
            epoch=loaded.identity.epoch,
            compatibility=loaded.identity.compatibility_message(),
            slot_bytes=endpoints[0].slot_bytes,
            endpoints=[each.readable if self.history else each.connection for each in endpoints],
        )
        self._clients = PrefillClients(
            endpoints,
            peers,
            self._hello,
            token=settings.token,
            tls=settings.tls,
            handshake_s=settings.handshake_s,
            ping_timeout_s=settings.ping_timeout_s,
        )
        self.receiver = Receiver(
            endpoints,
            self._clients,
            credits_per_sequence=settings.credits_per_sequence,
            read_timeout_s=settings.read_timeout_s,
            metrics=self.transfers,
            slots=self.sizes.of_prompts,
        )
        self.service = FetchedStreams(self, self.receiver, settings)

    @property
    def idle(self) -> bool:
        """Whether no stream is open."""
        return not self.service.streams

    @property
    def not_ready(self) -> str | None:
        """Reason to send this worker no more requests, or None."""
        return super().not_ready or self.receiver.blocked

    def serve_at(self, address: str) -> None:
        super().serve_at(address)
        if self.history is not None:
            self._hello.address = address

    def end_requests(self) -> None:
        """End every stream with DRAINING."""
        self.service.end_all()
        if self.history is not None:
            self.history.end_all()

    def _new_history(self, settings: DecodeSettings, peers: KnownPeers) -> PrefillService:
        sender = Sender(
            self.endpoints,
            LinkPolicy.of(settings.codec, has_codebooks=self.endpoints[0].codecs.has_codebooks),
            epoch=self.identity.epoch,
            lease_s=_HISTORY_LEASE_S,
            metrics=self.transfers,
            slots=self.sizes.of_history,
        )
        return PrefillService(self, sender, peers, lease_s=_HISTORY_LEASE_S, computes=False)

    def _deliver(self, output: StepOutput) -> None:
        self.service.deliver(output)
        if self.history is not None:
            self.history.deliver(output)

    def observe(self) -> None:
        """Set the gauges of the worker and the landing slots, and end expired leases."""
        super().observe()
        self.receiver.set_gauges()
        if self.history is not None:
            self.history.observe()

    async def close(self) -> None:
        """End the sessions with prefill workers and the engine's thread."""
        await self._clients.close()
        await super().close()


def _overflow_tokens(settings: DecodeSettings, loaded: Loaded, endpoints: Endpoints) -> int | None:
    """Return the tokens above which prefill workers decode further requests; None for never.

    A step reads the weights and the KV of all sequences. By default, the KV of this many tokens
    has two thirds of the bytes of the weights, on the rank with the most KV. Evicted tokens and
    windows do not count.
    """
    if settings.overflow_tokens == "auto" and loaded.rank.device != "cpu":
        stored = max(token_bytes(each.layout.page_bytes) for each in endpoints)
        per_token = (1 - loaded.identity.compatibility.kv_eviction) * stored
        read = loaded.rank.executor.model.step_weight_bytes
        most = 2 * read / (3 * per_token) if per_token else MAX_KV_TOKENS
        return min(int(most), MAX_KV_TOKENS)
    return settings.overflow_tokens if isinstance(settings.overflow_tokens, int) else None


async def serve(settings: DecodeSettings) -> None:
    """Run one decode worker until SIGTERM or SIGINT, then drain.

    Raises:
        SettingsError: the worker cannot start with these settings.
    """
    tls = settings.tls  # invalid files are reported before the model is loaded
    async with (
        running_ranks(settings, "decode", decodes=True) as loaded,
        open_endpoints(loaded, "decode", settings.transfer_network) as endpoints,
    ):
        worker = DecodeWorker(settings, loaded, endpoints)
        services = [SERVICE, HISTORY_SERVICE] if worker.history else [SERVICE]
        server = GrpcServer(settings.endpoint, services, token_check=settings.token_check, tls=tls)
        decode_pb2_grpc.add_DecodeServicer_to_server(worker.service, server.server)
        if worker.history is not None:
            prefill_pb2_grpc.add_PrefillServicer_to_server(worker.history, server.server)
        await run_worker(
            worker, server, settings, Role.COLOCATED if settings.colocated else Role.DECODE
        )
