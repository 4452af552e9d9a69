"""Settings of the gateway."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.common.model_source import DEFAULT_MODEL
from services.common.settings import ServiceSettings


class GatewaySettings(ServiceSettings):
    """Settings with the prefix ``HEADRACE_GATEWAY_``; see `ServiceSettings` for the others."""

    model_config = SettingsConfigDict(env_prefix="HEADRACE_GATEWAY_")

    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 takes a free one")
    grpc_port: int = Field(8001, ge=0, le=65535, description="gRPC port; 0 takes a free one")
    routers: list[str] = Field(
        default_factory=lambda: ["http://127.0.0.1:8002"],
        min_length=1,
        max_length=16,
        description="base URLs of the routers; any of them can place a request",
    )
    model: str = Field(
        DEFAULT_MODEL, description="name or path of the model; only its tokenizer is read"
    )
    served_model_name: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="model name for clients; default: the model's",
    )
    context_length: int | None = Field(
        None, ge=1, le=1 << 24, description="tokens; default: from the model's files"
    )
    api_keys_file: Path | None = Field(
        None,
        description="one 'sha256-of-key name' per line; without it no key is required",
    )

    max_connections: int = Field(
        4096, ge=1, le=1 << 20, description="concurrent HTTP connections; more are refused"
    )
    max_header_bytes: int = Field(
        1 << 16, ge=1024, le=1 << 20, description="size of the request line and headers, bytes"
    )
    header_timeout_s: float = Field(
        10.0, gt=0, le=3600, description="time for the headers to arrive, seconds"
    )
    keep_alive_s: int = Field(
        75, ge=1, le=3600, description="idle time of a connection, seconds; more than a proxy's"
    )
    write_timeout_s: float = Field(
        60.0,
        ge=1,
        le=3600,
        description="time until a client that reads nothing is dropped, seconds",
    )
    max_body_bytes: int = Field(
        1 << 20, ge=1024, le=1 << 30, description="largest request body, bytes"
    )
    body_timeout_s: float = Field(
        30.0, gt=0, le=3600, description="time for a request body to arrive, seconds"
    )
    max_json_depth: int = Field(16, ge=4, le=512, description="nesting depth of a JSON body")
    max_prompts: int = Field(32, ge=1, le=1024, description="prompts in one request")
    max_choices: int = Field(8, ge=1, le=128, description="largest n, the choices for one prompt")
    max_logprobs: int = Field(
        20, ge=0, le=100, description="largest number of alternatives for each token"
    )
    max_stops: int = Field(4, ge=0, le=64, description="stop strings of one request")
    max_stop_chars: int = Field(256, ge=1, le=4096, description="characters of a stop string")
    max_logit_bias: int = Field(1024, ge=0, le=65536, description="entries of a logit_bias")
    default_max_tokens: int = Field(
        16,
        ge=1,
        le=1 << 20,
        description="max_tokens of a completion without one; a chat may fill the context",
    )

    max_concurrent: int = Field(
        1024, ge=1, le=1 << 20, description="prompts in progress; more are refused"
    )
    deadline_s: float = Field(
        600.0, gt=0, le=86400, description="time from arrival to the last token, seconds"
    )
    queue_wait_s: float = Field(
        60.0, ge=0, le=3600, description="longest wait in a router's queue, seconds"
    )
    max_attempts: int = Field(
        5, ge=1, le=64, description="placements of one request, including the first"
    )
    max_lost_workers: int = Field(
        2, ge=1, le=64, description="lost workers after which a request is not retried"
    )
    connect_timeout_s: float = Field(
        5.0, gt=0, le=60, description="time to connect to a router or worker, seconds"
    )
    stream_buffer_tokens: int = Field(
        8192, ge=64, le=1 << 20, description="tokens buffered for a client that reads slowly"
    )
