"""Settings of the process of a worker, whatever it computes."""

import socket
import uuid
from typing import Literal

from pydantic import Field

from services.common.addresses import address_towards, bracketed, is_unspecified
from services.common.settings import ServiceSettings


class ProcessSettings(ServiceSettings):
    """Settings of a worker of any role: its name, ports, and the routers that know it."""

    worker_id: str = Field(
        default_factory=lambda: f"worker-{uuid.uuid4().hex[:8]}",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="stable name of this worker; the epoch changes with every start",
    )
    port: int = Field(0, ge=0, le=65535, description="gRPC port; 0: a free one")
    advertise: str | None = Field(
        None,
        description="host under which other services reach this worker; default: `host`, or if "
        "that is all interfaces, the address from which this machine reaches a router",
    )
    metrics_port: int = Field(
        0, ge=0, le=65535, description="HTTP port of /metrics, /health and /ready; 0: a free one"
    )
    stall_s: float = Field(
        120.0,
        gt=0,
        le=3600,
        description="duration of one step or batch, or of one round of calls of the transfer "
        "thread, above which /health reports a failure, seconds; on the CPU, time in which the "
        "step uses the processor does not count",
    )
    routers: list[str] = Field(
        default_factory=list, description="base URLs of all routers to register with"
    )
    heartbeat_s: float = Field(
        0.25,
        gt=0,
        le=60,
        description="seconds between heartbeats, at most half of the routers' `suspect_after_s`",
    )

    served_model_name: str | None = Field(
        None, description="model name for clients; default: the checkpoint's name"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda if there is a GPU"
    )

    @property
    def endpoint(self) -> str:
        """Listen address of the gRPC server."""
        return f"{bracketed(self.host)}:{self.port}"

    @property
    def advertised_host(self) -> str:
        """Host under which other services reach this worker; see ``advertise``."""
        if self.advertise or not is_unspecified(self.host):
            return self.advertise or self.host
        found = filter(None, map(address_towards, self.routers))
        return next(found, None) or socket.gethostname()
