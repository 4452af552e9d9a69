"""Registration and heartbeats of encoder workers."""

from typing import Any

from services.common.encoder_placement import EncoderHeartbeat, EncoderRegistration
from services.common.tls import MutualTls
from services.encoder.encoding_thread import EncodingLoad, EncodingThread
from services.worker.registrar import BaseRegistrar, Report


class EncoderRegistrar(BaseRegistrar[EncodingLoad]):
    """Keeps an encoder worker registered; see `BaseRegistrar`."""

    def __init__(
        self,
        registration: EncoderRegistration,
        thread: EncodingThread,
        routers: list[str],
        *,
        token: str | None,
        tls: MutualTls | None = None,
    ) -> None:
        super().__init__(registration, routers, path="/v1/encoders", token=token, tls=tls)
        self._known = registration
        self._thread = thread

    @property
    def submitted(self) -> int:
        return self._thread.submitted

    def _load(self) -> tuple[int, EncodingLoad]:
        load = self._thread.load
        return load.calls, load

    def _introduction(self) -> dict[str, Any]:
        return self._known.model_dump(mode="json")

    def _heartbeat(self, report: Report, load: EncodingLoad) -> dict[str, Any]:
        beat = EncoderHeartbeat(
            worker_id=self._known.worker_id,
            epoch=self._known.epoch,
            state=report.state,
            reason=report.reason,
            queue_tokens=load.queue_tokens,
            running=load.running,
            waiting=load.waiting,
            tokens_per_s=load.tokens_per_s,
            admitted=report.admitted,
            ended=report.ended,
        )
        return beat.model_dump(mode="json")
