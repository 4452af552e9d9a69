"""The prefill worker: computes prompts, returns first tokens, serves encoded KV.

With `PrefillSettings.decodes` it also serves whole requests, as a colocated worker does. With
`PrefillSettings.read_history` it reads KV from decode workers, too.
"""

import uvloop

from headrace.v1 import decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from runtime.engine import StepOutput
from services.common.grpc_server import GrpcServer
from services.common.placement import Role
from services.prefill.history import HistoryReader
from services.prefill.history_policy import HistoryPolicy
from services.prefill.settings import PrefillSettings
from services.transfer.known_peers import KnownPeers
from services.transfer.local_endpoint import Endpoints
from services.transfer.policy import LinkPolicy
from services.transfer.prefill_client import PrefillClients
from services.transfer.receiver import Receiver
from services.transfer.sender import Sender
from services.worker.device import torch_device
from services.worker.endpoints import open_endpoints
from services.worker.lifecycle import Worker, run_worker
from services.worker.loading import Loaded, running_ranks
from services.worker.prefill_service import SERVICE, PrefillService
from services.worker.stream_service import SERVICE as DECODE_SERVICE
from services.worker.stream_service import StreamService

loop_factory = uvloop.new_event_loop

_CREDITS = 4
"""Maximum number of segments of the history of one prompt in flight."""
_READ_TIMEOUT_S = 10.0
"""Time without a completed READ from a decode worker after which its READs are overdue, seconds."""
_HANDSHAKE_S = 5.0
"""Deadline for opening a session with a decode worker, in seconds."""


class PrefillWorker(Worker):
    """A prefill worker: engine thread, sender, and the sessions of decode workers.

    Attributes:
        history: reads history from decode workers; None if this worker does not.
        prefills: the service for decode workers.
        service: the service for gateways.
    """

    def __init__(self, settings: PrefillSettings, loaded: Loaded, endpoints: Endpoints) -> None:
        super().__init__(loaded, endpoints)
        peers = KnownPeers(endpoints)
        self.sender = Sender(
            endpoints,
            LinkPolicy.of(settings.codec, has_codebooks=endpoints[0].codecs.has_codebooks),
            epoch=loaded.identity.epoch,
            lease_s=settings.lease_s,
            metrics=self.transfers,
            slots=self.sizes.of_prompts,
        )
        self.history = self._new_history(settings, peers) if self.sizes.history_slots else None
        self.prefills = PrefillService(
            self,
            self.sender,
            peers,
            lease_s=settings.lease_s,
            history=self.history,
            kv_digest=settings.kv_digest,
        )
        self.jobs = self.prefills.jobs
        self.service = StreamService(self)

    @property
    def idle(self) -> bool:
        """Whether no sequence is being computed or transferred, and no stream is open."""
        return not self.jobs and not self.service.streams

    def end_requests(self) -> None:
        """End every sequence and every stream with DRAINING."""
        self.service.end_all()
        self.prefills.end_all()

    def _new_history(self, settings: PrefillSettings, peers: KnownPeers) -> HistoryReader:
        endpoints = self.endpoints
        hello = prefill_pb2.Hello(
            worker_id=self.identity.worker_id,
            epoch=self.identity.epoch,
            compatibility=self.identity.compatibility_message(),
            slot_bytes=endpoints[0].slot_bytes,
            endpoints=[endpoint.readable for endpoint in endpoints],
        )
        clients = PrefillClients(
            endpoints,
            peers,
            hello,
            token=settings.token,
            tls=settings.tls,
            handshake_s=_HANDSHAKE_S,
        )
        receiver = Receiver(
            endpoints,
            clients,
            credits_per_sequence=_CREDITS,
            read_timeout_s=_READ_TIMEOUT_S,
            metrics=self.transfers,
            slots=self.sizes.of_history,
        )
        return HistoryReader(self, clients, receiver, HistoryPolicy())

    def _deliver(self, output: StepOutput) -> None:
        self.service.deliver(output)
        self.prefills.deliver(output)

    def observe(self) -> None:
        """Set the gauges and end expired leases."""
        super().observe()
        self.prefills.observe()
        if self.history is not None:
            self.history.set_gauges()

    async def close(self) -> None:
        """End the sessions with decode workers and the engine's thread."""
        if self.history is not None:
            await self.history.close()
        await super().close()


async def serve(settings: PrefillSettings) -> None:
    """Run one prefill worker until SIGTERM or SIGINT, then drain.

    Raises:
        SettingsError: the worker cannot start with these settings.
    """
    tls = settings.tls  # invalid files are reported before the model is loaded
    decodes = settings.decodes
    if decodes == "auto":
        decodes = torch_device(settings.device).type == "cuda"
    async with (
        running_ranks(settings, "prefill", decodes=decodes) as loaded,
        open_endpoints(loaded, "prefill", settings.transfer_network) as endpoints,
    ):
        worker = PrefillWorker(settings, loaded, endpoints)
        worker.decodes = decodes
        services = [SERVICE, DECODE_SERVICE] if decodes else [SERVICE]
        server = GrpcServer(settings.endpoint, services, token_check=settings.token_check, tls=tls)
        prefill_pb2_grpc.add_PrefillServicer_to_server(worker.prefills, server.server)
        if decodes:
            decode_pb2_grpc.add_DecodeServicer_to_server(worker.service, server.server)
        await run_worker(worker, server, settings, Role.PREFILL)
