"""Settings of the router."""

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from services.common.settings import ServiceSettings
from services.router.fleet import FleetLimits
from services.router.policy import PolicyName


class RouterSettings(ServiceSettings):
    """Settings with the prefix ``HEADRACE_ROUTER_``; see `ServiceSettings` for the others."""

    model_config = SettingsConfigDict(env_prefix="HEADRACE_ROUTER_")

    port: int = Field(8002, ge=0, le=65535, description="HTTP port; 0 takes a free one")
    policy: PolicyName = Field(PolicyName.SHORTEST_QUEUE, description="placement policy")
    seed: int | None = Field(
        None,
        ge=0,
        lt=1 << 63,
        description="seed of the policy's random choices; default: random",
    )
    output_reserve: int = Field(
        256, ge=0, le=1 << 20, description="largest number of output tokens counted per choice"
    )
    backlog: float = Field(
        2.0, ge=1, le=64, description="sequences on a worker, as a multiple of its batch size"
    )
    max_waiting: int = Field(
        512, ge=0, le=65_536, description="place calls in the queue; more are refused with 429"
    )
    max_wait_s: float = Field(
        120.0, ge=0, le=3600, description="longest wait of a place call in the queue, seconds"
    )
    retry_after_s: int = Field(1, ge=1, le=3600, description="Retry-After of a 429 or 503, seconds")
    suspect_after_s: float = Field(
        2.0, gt=0, le=600, description="time without heartbeat until a worker is suspect, seconds"
    )
    gone_after_s: float = Field(
        10.0, gt=0, le=3600, description="time without heartbeat until a worker is removed, seconds"
    )
    probation_s: float = Field(
        0.5,
        ge=0,
        le=600,
        description="first pause of a worker that failed; doubles each time, seconds",
    )
    probation_max_s: float = Field(
        30.0, ge=0, le=3600, description="longest pause of a worker that failed, seconds"
    )
    placement_ttl_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="time until an unconfirmed placement no longer counts, seconds",
    )
    max_placements: int = Field(
        65_536, ge=1, le=1 << 22, description="placements tracked; the oldest is dropped"
    )
    max_workers: int = Field(
        256, ge=1, le=4096, description="registered workers; more are refused with 429"
    )
    max_body_bytes: int = Field(
        1 << 20, ge=1024, le=1 << 26, description="largest body of a call, bytes"
    )
    tick_s: float = Field(
        0.02, gt=0, le=1, description="period of checks for deadlines and silent workers, seconds"
    )

    @model_validator(mode="after")
    def _suspect_before_gone(self) -> "RouterSettings":
        if self.gone_after_s <= self.suspect_after_s:
            raise ValueError("gone_after_s must be longer than suspect_after_s")
        return self

    @property
    def fleet(self) -> FleetLimits:
        return FleetLimits(
            suspect_after_s=self.suspect_after_s,
            gone_after_s=self.gone_after_s,
            probation_s=self.probation_s,
            probation_max_s=self.probation_max_s,
            placement_ttl_s=self.placement_ttl_s,
            max_placements=self.max_placements,
            max_workers=self.max_workers,
            backlog=self.backlog,
        )
