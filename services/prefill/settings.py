"""Settings of the prefill worker."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.worker.settings import WorkerSettings


class PrefillSettings(WorkerSettings):
    """``HEADRACE_PREFILL_…``; see `WorkerSettings` for the rest."""

    model_config = SettingsConfigDict(env_prefix="HEADRACE_PREFILL_")

    lease_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="a lease ends so long after its reader was last heard of, seconds",
    )
