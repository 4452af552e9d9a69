"""Settings of the decode worker."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.worker.settings import WorkerSettings


class DecodeSettings(WorkerSettings):
    """Settings of a decode worker; environment prefix ``HEADRACE_DECODE_``.

    ``slots`` and ``slot_bytes`` are the sizes of the landing slab.
    """

    model_config = SettingsConfigDict(env_prefix="HEADRACE_DECODE_")

    colocated: bool = Field(False, description="this worker also computes prompts")
    credits_per_sequence: int = Field(
        4, ge=1, le=1024, description="maximum number of segments of one sequence in flight"
    )
    read_timeout_s: float = Field(
        10.0, gt=0, le=600, description="deadline of one segment's READ, seconds"
    )
    handshake_s: float = Field(
        5.0,
        gt=0,
        le=60,
        description="deadline for opening a session with a prefill worker, seconds",
    )
    max_deadline_s: float = Field(
        3600.0, gt=0, description="upper limit on the deadline of a request, seconds"
    )
