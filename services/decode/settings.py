"""Settings of the decode worker."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.common.grpc_server import PING_TIMEOUT_S
from services.worker.settings import WorkerSettings


class DecodeSettings(WorkerSettings):
    """Settings of a decode worker; environment prefix ``HEADRACE_DECODE_``.

    ``slots`` and ``slot_bytes`` are the sizes of the landing slab.
    """

    model_config = SettingsConfigDict(env_prefix="HEADRACE_DECODE_")
    gpu_batch: ClassVar[int] = 256

    @property
    def computes_prompts(self) -> bool:
        return self.colocated

    @property
    def exchanges_history(self) -> bool:
        return not self.colocated

    colocated: bool = Field(False, description="this worker also computes prompts")
    credits_per_sequence: int = Field(
        4, ge=1, le=1024, description="maximum number of segments of one sequence in flight"
    )
    read_timeout_s: float = Field(
        10.0,
        gt=0,
        le=600,
        description="time without a completed READ from a prefill worker after which its pending "
        "READs are overdue, seconds; at most three quarters of the `lease_s` of that worker count",
    )
    handshake_s: float = Field(
        5.0,
        gt=0,
        le=60,
        description="deadline for opening a session with a prefill worker, seconds",
    )
    ping_timeout_s: float = Field(
        PING_TIMEOUT_S,
        gt=0,
        le=60,
        description="time that a prefill worker has to answer a gRPC ping before it counts as "
        "lost, seconds",
    )
    compute_tokens: int = Field(
        512,
        ge=0,
        le=1 << 20,
        description="maximum number of prompt tokens, over all streams, that this worker computes "
        "at a time instead of the assigned prefill workers; it does so if the KV of all earlier "
        "tokens is cached and this is predicted to be faster; these tokens delay running streams; "
        "0: none",
    )
    overflow_tokens: Annotated[int, Field(ge=0)] | Literal["auto", "never"] = Field(
        "auto",
        description="tokens on this worker above which the router sends whole requests to prefill "
        "workers with `decodes`; auto: never on the CPU; on a GPU, the number of tokens whose KV, "
        "stored with `kv_format` and `kv_eviction`, has two thirds of the size of the weights",
    )
