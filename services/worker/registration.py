"""Registration and heartbeats of prefill and decode workers."""

from typing import Any

from services.common.placement import Heartbeat, Registration
from services.common.tls import MutualTls
from services.transfer.metrics import TransferMetrics
from services.worker.engine_thread import EngineLoad, EngineThread
from services.worker.registrar import BaseRegistrar, Report


class Registrar(BaseRegistrar[EngineLoad]):
    """Keeps a worker with an engine registered; see `BaseRegistrar`."""

    def __init__(
        self,
        registration: Registration,
        engine: EngineThread,
        routers: list[str],
        transfers: TransferMetrics,
        *,
        token: str | None,
        tls: MutualTls | None = None,
    ) -> None:
        super().__init__(registration, routers, token=token, tls=tls)
        self._known = registration
        self._engine = engine
        self._transfers = transfers

    @property
    def submitted(self) -> int:
        return self._engine.submitted

    def _load(self) -> tuple[int, EngineLoad]:
        load = self._engine.load
        return load.commands, load

    def _introduction(self) -> dict[str, Any]:
        return self._known.model_dump(mode="json")

    def _heartbeat(self, report: Report, load: EngineLoad) -> dict[str, Any]:
        beat = Heartbeat(
            worker_id=self._known.worker_id,
            epoch=self._known.epoch,
            state=report.state,
            reason=report.reason,
            queue_tokens=load.queue_tokens,
            pending_prompt_tokens=load.pending_prompt_tokens,
            prompt_tokens_per_s=load.prompt_tokens_per_s,
            inter_token_s=self._engine.inter_token_s,
            pace=self._engine.pace,
            pages_free=self._engine.page_plan.by_name(load.pages_free),
            running=load.running,
            waiting=load.waiting,
            kv_raw_bytes=self._transfers.total.raw,
            kv_wire_bytes=self._transfers.total.wire,
            kv_faster_raw_bytes=self._transfers.total.faster_raw,
            admitted=report.admitted,
            computed_here=report.computed_here,
            postponed=report.postponed,
            ended=report.ended,
        )
        return beat.model_dump(mode="json")
