"""What a gateway is told."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.common.model_source import DEFAULT_MODEL
from services.common.settings import ServiceSettings


class GatewaySettings(ServiceSettings):
    """Settings of the gateway; each is a flag, a ``HEADRACE_GATEWAY_…`` variable or a YAML key."""

    model_config = SettingsConfigDict(env_prefix="HEADRACE_GATEWAY_")

    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 takes a free one")
    grpc_port: int = Field(8001, ge=0, le=65535, description="gRPC port; 0 takes a free one")
    routers: list[str] = Field(
        default_factory=lambda: ["http://127.0.0.1:8002"],
        min_length=1,
        max_length=16,
        description="base URLs of the routers; any of them can place",
    )
    model: str = Field(
        DEFAULT_MODEL, description="name or path of the model; its tokenizer alone is read"
    )
    served_model_name: str | None = Field(
        None, min_length=1, max_length=256, description="name that clients use; default: model's"
    )
    context_length: int | None = Field(
        None, ge=1, le=1 << 24, description="tokens; default: what the model's files say"
    )
    api_keys_file: Path | None = Field(
        None,
        description="one 'sha256-of-key name' a line; without it no key is asked for",
    )

    max_connections: int = Field(
        4096, ge=1, le=1 << 20, description="HTTP connections at a time; more are refused"
    )
    max_header_bytes: int = Field(
        1 << 16, ge=1024, le=1 << 20, description="request line and headers, bytes"
    )
    header_timeout_s: float = Field(
        10.0, gt=0, le=3600, description="the headers must have arrived within, seconds"
    )
    keep_alive_s: int = Field(
        75, ge=1, le=3600, description="an idle connection is kept, seconds; above a proxy's own"
    )
    write_timeout_s: float = Field(
        60.0, ge=1, le=3600, description="a client that takes in nothing is given up, seconds"
    )
    max_body_bytes: int = Field(
        1 << 20, ge=1024, le=1 << 30, description="largest request body, bytes"
    )
    body_timeout_s: float = Field(
        30.0, gt=0, le=3600, description="a body must have arrived within, seconds"
    )
    max_json_depth: int = Field(16, ge=4, le=512, description="nesting of a JSON body")
    max_prompts: int = Field(32, ge=1, le=1024, description="prompts in one request")
    max_choices: int = Field(8, ge=1, le=128, description="n, the choices for one prompt")
    max_logprobs: int = Field(20, ge=0, le=100, description="alternatives shown for each token")
    max_stops: int = Field(4, ge=0, le=64, description="stop strings of one request")
    max_stop_chars: int = Field(256, ge=1, le=4096, description="characters of a stop string")
    max_logit_bias: int = Field(1024, ge=0, le=65536, description="entries of a logit_bias")
    default_max_tokens: int = Field(
        16,
        ge=1,
        le=1 << 20,
        description="of a completion that names none; a chat fills the context",
    )

    max_concurrent: int = Field(
        1024, ge=1, le=1 << 20, description="prompts in the gateway's hands; more are refused"
    )
    deadline_s: float = Field(
        600.0, gt=0, le=86400, description="from arrival to the last token, seconds"
    )
    queue_wait_s: float = Field(
        60.0, ge=0, le=3600, description="longest wait for a place in a router's queue, seconds"
    )
    max_attempts: int = Field(
        5, ge=1, le=64, description="placements of one request, the first counted in"
    )
    max_lost_workers: int = Field(
        2, ge=1, le=64, description="workers that may end under one request before it ends too"
    )
    connect_timeout_s: float = Field(
        5.0, gt=0, le=60, description="to reach a router or a worker, seconds"
    )
    stream_buffer_tokens: int = Field(
        8192, ge=64, le=1 << 20, description="tokens held for a client that reads slowly"
    )
