"""Options of `headrace up`."""

from dataclasses import dataclass
from pathlib import Path

from runtime.kv.names import check_name
from services.common.errors import SettingsError

MAX_PORT = 65535
NO_MODEL = "none"
"""Value of ``model`` of a deployment that serves only an encoder."""


@dataclass(frozen=True)
class WorkerOptions:
    """Options of one worker.

    Attributes:
        name: unique name within the deployment.
        role: prefill, decode or encoder.
        ranks: number of its ranks; on GPUs, each has one of its own.
    """

    name: str
    role: str
    ranks: int


@dataclass(frozen=True)
class UpOptions:
    """Options of a deployment on one machine.

    Attributes:
        host: address on which all processes listen.
        port: HTTP port of the gateway.
        grpc_port: gRPC port of the gateway.
        router_port: HTTP port of the first router; further ones use the following ports.
        gateways: number of gateways, which share their ports.
        routers: number of routers.
        prefill: number of prefill workers.
        decode: number of decode workers.
        prefill_tp: number of ranks of each prefill worker (tensor parallelism).
        decode_tp: number of ranks of each decode worker.
        colocated: whether decode workers also prefill; then there are no prefill workers.
        model: name or path of a checkpoint; none: no text is generated, only the encoder is served.
        encoder: name or path of an encoder, for embeddings and scores; None for none.
        encoders: number of encoder workers.
        keep: fraction of the parameters to keep in a factorized model; None serves the model
            unchanged.
        dense_meanwhile: whether to serve the unchanged model while the factorized one is made. The
            next start serves the factorized one. On a GPU, the factorized model is made before
            anything is served.
        codec: encoding of KV transfers: auto, raw or splitzip.
        device: device of the workers: auto, cpu or cuda.
        kv_format: KV format of the workers, see `runtime.kv.registry`.
        kv_eviction: fraction of a prompt's tokens whose KV is evicted.
        tls_dir: folder with tls.crt, tls.key and ca.crt, for mutual TLS between the services; None
            for a cluster token, which `up` generates.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 8001
    router_port: int = 8002
    gateways: int = 1
    routers: int = 1
    prefill: int = 1
    decode: int = 1
    prefill_tp: int = 1
    decode_tp: int = 1
    colocated: bool = False
    model: str = "smollm2-135m"
    encoder: str | None = None
    encoders: int = 1
    keep: float | None = None
    dense_meanwhile: bool = False
    codec: str = "auto"
    device: str = "auto"
    kv_format: str = "dense"
    kv_eviction: float = 0.0
    tls_dir: Path | None = None

    @property
    def router_ports(self) -> list[int]:
        """HTTP port of each router."""
        return [self.router_port + number for number in range(self.routers)]

    @property
    def generates(self) -> bool:
        """Whether a model that generates text is served."""
        return self.model != NO_MODEL

    @property
    def workers(self) -> list[WorkerOptions]:
        """Options of each worker: prefill, decode, then encoder workers."""
        prefill = 0 if self.colocated or not self.generates else self.prefill
        return [
            WorkerOptions(f"{role}-{number}", role, ranks)
            for role, count, ranks in (
                ("prefill", prefill, self.prefill_tp),
                ("decode", self.decode if self.generates else 0, self.decode_tp),
                ("encoder", self.encoders if self.encoder else 0, 1),
            )
            for number in range(count)
        ]

    @property
    def wire_codec(self) -> str:
        """Encoding of KV transfers: ``codec``, but raw if there are no transfers."""
        return "raw" if self.colocated or not self.generates else self.codec

    @property
    def ports(self) -> list[tuple[str, int]]:
        """Pairs of a flag and a fixed port that it sets."""
        routers = [("--router-port", port) for port in self.router_ports]
        return [("--port", self.port), ("--grpc-port", self.grpc_port), *routers]

    def check(self) -> None:
        """Validate the options.

        Raises:
            SettingsError: if an option is invalid or contradicts another one.
            KVFormatError: if the KV format is unknown, or its calibration is missing.
        """
        if self.codec not in ("auto", "raw", "splitzip"):
            raise SettingsError(f"--codec {self.codec}: must be auto, raw or splitzip")
        if self.device not in ("auto", "cpu", "cuda"):
            raise SettingsError(f"--device {self.device}: must be auto, cpu or cuda")
        if not self.generates and self.encoder is None:
            raise SettingsError(f"--model {NO_MODEL} needs --encoder: nothing would be served")
        if not self.generates and self.keep is not None:
            raise SettingsError(f"--keep needs a model, not --model {NO_MODEL}")
        if not self.colocated and self.prefill < 1:
            raise SettingsError("--prefill 0 needs --colocated: no worker would compute prompts")
        for flag, port in self.ports:
            if not 1 <= port <= MAX_PORT:
                raise SettingsError(f"{flag} {port}: must be from 1 to {MAX_PORT}")
        if len({port for _, port in self.ports}) < len(self.ports):
            given = ", ".join(f"{flag} {port}" for flag, port in self.ports)
            raise SettingsError(f"the ports must differ: {given}")
        check_name(self.kv_format)
