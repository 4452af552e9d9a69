"""Settings of the prefill worker."""

from typing import ClassVar, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.worker.settings import WorkerSettings


class PrefillSettings(WorkerSettings):
    """Settings of a prefill worker; environment prefix ``HEADRACE_PREFILL_``."""

    model_config = SettingsConfigDict(env_prefix="HEADRACE_PREFILL_")
    holds_prompts: ClassVar[bool] = True

    @property
    def exchanges_history(self) -> bool:
        return self.read_history

    read_history: bool = Field(
        True,
        description="read the KV of earlier turns of a chat from the decode worker that has it in "
        "its prefix cache, if this is predicted to be faster than computing it; requires "
        "`prefix_cache`, no `kv_eviction`, and a KV format that encodes no pages",
    )
    lease_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="time without an acknowledgement or a credit from a decode worker after which "
        "its leases on encoded segments expire, seconds; decode workers give up READs earlier",
    )
    decodes: bool | Literal["auto"] = Field(
        "auto",
        description="whether this worker also decodes requests, which the router sends to it while "
        "the queues of decode workers are long (their `overflow_tokens`); auto: on a GPU",
    )
