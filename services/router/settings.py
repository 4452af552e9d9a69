"""Settings of the router."""

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from services.common.messages import MAX_WAIT_S
from services.common.settings import ServiceSettings
from services.router.admission import AdmissionLimits
from services.router.choice import PolicyName
from services.router.fleet import FleetLimits


class RouterSettings(ServiceSettings):
    """Settings of the router. A flag ``--name`` overrides the environment variable
    HEADRACE_ROUTER_NAME, which overrides ``name`` in the YAML file of ``--config FILE``.
    """

    model_config = SettingsConfigDict(env_prefix="HEADRACE_ROUTER_")

    port: int = Field(8002, ge=0, le=65535, description="HTTP port; 0 selects a free port")
    policy: PolicyName = Field(PolicyName.SHORTEST_QUEUE, description="placement policy")
    seed: int | None = Field(
        None,
        ge=0,
        lt=1 << 63,
        description="seed of the policy's random choices; default: random",
    )
    output_reserve: int = Field(
        256, ge=0, le=1 << 20, description="maximum output tokens per choice that placement counts"
    )
    backlog: float = Field(
        1.25,
        ge=1,
        le=64,
        description="maximum sequences on a worker, as a multiple of its batch slots, within its "
        "`max_waiting`; further ones wait in the router's fair queue",
    )
    prompt_backlog_s: float = Field(
        0.25,
        gt=0,
        le=600,
        description="a worker gets no further prompt while its outstanding ones take this long at "
        "its measured rate, seconds; the delay until it reports a placement is added",
    )
    max_waiting: int = Field(
        512,
        ge=0,
        le=65_536,
        description="maximum placement requests in the queue; further ones get 429",
    )
    max_wait_s: float = Field(
        120.0, ge=0, le=MAX_WAIT_S, description="maximum time of a request in the queue, seconds"
    )
    shed_after_s: float = Field(
        2.0,
        ge=0,
        le=3600,
        description="predicted time in the queue above which a call gets 429 at once, seconds",
    )
    shed_ratio: float = Field(
        0.5,
        ge=0,
        le=100,
        description="like `shed_after_s`, as a multiple of the mean time from placement to the "
        "last token; the larger limit applies",
    )
    retry_after_s: int = Field(
        1,
        ge=1,
        le=3600,
        description="Retry-After of 503, and of 429 if no wait can be predicted, seconds",
    )
    suspect_after_s: float = Field(
        2.0,
        gt=0,
        le=600,
        description="time without heartbeat after which a worker gets no requests, seconds; at "
        "least twice the `heartbeat_s` of the workers",
    )
    gone_after_s: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="time without heartbeat after which a worker is removed, seconds; for as long "
        "after its start, a router that has no worker for a request lets gateways try again",
    )
    probation_s: float = Field(
        0.5,
        ge=0,
        le=600,
        description="time for which a worker gets no requests after its first failure, seconds; "
        "doubles with each further failure",
    )
    probation_max_s: float = Field(
        30.0,
        ge=0,
        le=3600,
        description="maximum time for which a worker gets no requests after a failure, seconds",
    )
    placement_ttl_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="time for which a placement counts until its worker reports it, seconds",
    )
    max_placements: int = Field(
        65_536,
        ge=1,
        le=1 << 22,
        description="maximum placements to track; beyond this number, the oldest is dropped",
    )
    remembered_blocks: int = Field(
        4096,
        ge=0,
        le=1 << 20,
        description="maximum number of blocks of prompts that the router remembers for each "
        "worker, to place prompts where their beginning is cached; 0 turns this off; a prompt of "
        "4,000 tokens has 28 blocks",
    )
    max_workers: int = Field(
        256, ge=1, le=4096, description="maximum registered workers; further ones get 429"
    )
    max_body_bytes: int = Field(
        1 << 20, ge=1024, le=1 << 26, description="maximum size of a request body, bytes"
    )
    tick_s: float = Field(
        0.02, gt=0, le=1, description="time between checks of deadlines and heartbeats, seconds"
    )

    @model_validator(mode="after")
    def _suspect_before_gone(self) -> "RouterSettings":
        if self.gone_after_s <= self.suspect_after_s:
            raise ValueError("gone_after_s must be longer than suspect_after_s")
        return self

    @property
    def admission(self) -> AdmissionLimits:
        return AdmissionLimits(self.shed_after_s, self.shed_ratio)

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
            prompt_backlog_s=self.prompt_backlog_s,
            remembered_blocks=self.remembered_blocks,
        )
