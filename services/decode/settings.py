"""Settings of the decode worker."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.worker.settings import WorkerSettings


class DecodeSettings(WorkerSettings):
    """``HEADRACE_DECODE_…``; see `WorkerSettings` for the rest. The slab is the landing slab."""

    model_config = SettingsConfigDict(env_prefix="HEADRACE_DECODE_")

    colocated: bool = Field(False, description="this worker prefills by itself, too")
    credits_per_sequence: int = Field(
        4, ge=1, le=1024, description="segments of one sequence that may be on their way"
    )
    read_timeout_s: float = Field(10.0, gt=0, le=600, description="for one segment's READ, seconds")
    handshake_s: float = Field(
        5.0, gt=0, le=60, description="for opening a session with a prefill worker, seconds"
    )
    max_deadline_s: float = Field(
        3600.0, gt=0, description="longest deadline a request may have, seconds"
    )
