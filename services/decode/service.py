"""The decode worker: fetches prompts' KV from prefill workers and decodes them in one batch."""

import uvloop

from headrace.v1 import decode_pb2_grpc, prefill_pb2
from runtime.engine import StepOutput
from runtime.pages.sizes import token_bytes
from services.common.grpc_server import GrpcServer
from services.common.placement import Role
from services.decode.fetched_streams import FetchedStreams
from services.decode.settings import DecodeSettings
from services.transfer.local_endpoint import Endpoints
from services.transfer.prefill_client import PrefillClients
from services.transfer.receiver import Receiver
from services.worker.endpoints import open_endpoints
from services.worker.lifecycle import Worker, run_worker
from services.worker.loading import Loaded, running_ranks
from services.worker.settings import MAX_KV_TOKENS
from services.worker.stream_service import SERVICE

loop_factory = uvloop.new_event_loop


class DecodeWorker(Worker):
    """A decode worker: engine thread, receiver, and the streams of gateways."""

    def __init__(self, settings: DecodeSettings, loaded: Loaded, endpoints: Endpoints) -> None:
        super().__init__(loaded, endpoints)
        self.overflow_tokens = _overflow_tokens(settings, loaded)
        hello = prefill_pb2.Hello(
            worker_id=loaded.identity.worker_id,
            epoch=loaded.identity.epoch,
            compatibility=loaded.identity.compatibility_message(),
            slot_bytes=endpoints[0].slot_bytes,
            endpoints=[endpoint.connection for endpoint in endpoints],
        )
        self._clients = PrefillClients(
            endpoints,
            hello,
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

    def end_requests(self) -> None:
        """End every stream with DRAINING."""
        self.service.end_all()

    def _deliver(self, output: StepOutput) -> None:
        self.service.deliver(output)

    def observe(self) -> None:
        """Set the gauges of the worker and the landing slots."""
        super().observe()
        self.receiver.set_gauges()

    async def close(self) -> None:
        """End the sessions with prefill workers and the engine's thread."""
        await self._clients.close()
        await super().close()


def _overflow_tokens(settings: DecodeSettings, loaded: Loaded) -> int | None:
    """Return the tokens above which prefill workers decode further requests; None for never.

    A step reads the weights and the KV of all sequences. By default, the KV of this many tokens
    has two thirds of the bytes of the weights. Evicted tokens and windows do not count.
    """
    if settings.overflow_tokens == "auto" and loaded.rank.device != "cpu":
        stored = token_bytes(loaded.rank.executor.cache.layout.page_bytes)
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
        server = GrpcServer(settings.endpoint, [SERVICE], token_check=settings.token_check, tls=tls)
        decode_pb2_grpc.add_DecodeServicer_to_server(worker.service, server.server)
        await run_worker(
            worker, server, settings, Role.COLOCATED if settings.colocated else Role.DECODE
        )
