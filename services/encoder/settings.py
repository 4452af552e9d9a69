"""Settings of the encoder worker."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.common.model_source import DEFAULT_ENCODER
from services.worker.process_settings import ProcessSettings


class EncoderSettings(ProcessSettings):
    """Settings of an encoder worker; environment prefix ``HEADRACE_ENCODER_``."""

    model_config = SettingsConfigDict(env_prefix="HEADRACE_ENCODER_")

    model: str = Field(DEFAULT_ENCODER, description="name or path of an encoder's checkpoint")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="dtype of weights and activations; auto: float32 on the CPU, bfloat16 on a GPU",
    )
    backend: str = Field(
        "auto",
        pattern=r"^[a-z0-9_-]{1,32}$",
        description="kernels of the encoder; auto: the fastest for the model and the device",
    )
    max_tokens: Annotated[int, Field(ge=2, le=1 << 24)] | None = Field(
        None,
        description="maximum tokens of an input, special tokens included; default: that of the "
        "model's files",
    )
    batch_tokens: Annotated[int, Field(ge=16, le=1 << 22)] | Literal["auto"] = Field(
        "auto",
        description="maximum tokens of a batch; a longer input is a batch of its own; auto: 16,384 "
        "on a GPU, otherwise 512",
    )
    max_queue_tokens: Annotated[int, Field(ge=16, le=1 << 30)] | Literal["auto"] = Field(
        "auto",
        description="maximum tokens that this worker accepts while it has others; further calls "
        "are refused, and placed again; auto: those of 64 batches",
    )
