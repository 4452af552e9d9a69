"""Settings of the gateway."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from runtime.grammar.spec import MAX_BYTES, MAX_DEPTH
from services.common.clients import ClientAddresses
from services.common.grpc_server import PING_TIMEOUT_S
from services.common.messages import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_DEADLINE_S,
    MAX_WAIT_S,
)
from services.common.model_source import DEFAULT_MODEL
from services.common.settings import ServiceSettings
from services.gateway.output.formats import ReasoningParserName, ToolParserName

NO_MODEL = "none"
"""Value of ``model`` of a gateway that serves only an encoder."""
_ORIGIN = r"^(\*|[a-z][a-z0-9+.-]*://(\*|[^/*\s]+))$"


class GatewaySettings(ServiceSettings):
    """Settings of the gateway. A flag ``--name`` overrides the environment variable
    HEADRACE_GATEWAY_NAME, which overrides ``name`` in the YAML file of ``--config FILE``.
    """

    model_config = SettingsConfigDict(env_prefix="HEADRACE_GATEWAY_")

    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 selects a free port")
    grpc_port: int = Field(8001, ge=0, le=65535, description="gRPC port; 0 selects a free port")
    reuse_port: bool = Field(
        False,
        description="share both ports with other gateways of this user on this host (Linux): the "
        "kernel distributes the connections",
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="separate port for /metrics, which then requires a client certificate or the "
        "cluster token; default: /metrics is on `port`, without authentication",
    )
    routers: list[str] = Field(
        ["http://127.0.0.1:8002"],
        min_length=1,
        max_length=16,
        description="base URLs of the routers, any of which can place a request; repeat the flag",
    )
    model: str = Field(
        DEFAULT_MODEL,
        description="smollm2-135m, or path of a model; only its tokenizer is read; none: text is "
        "not generated, only `encoder_model` is served",
    )
    served_model_name: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="model name that clients use; default: derived from the model's path",
    )
    encoder_model: str | None = Field(
        None,
        description="all-minilm-l6-v2, or path of an encoder, for embeddings and scores; only its "
        "tokenizer is read; default and empty: none is served",
    )
    served_encoder_name: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="name of the encoder that clients use; default: derived from its path",
    )
    context_length: int | None = Field(
        None,
        ge=1,
        le=1 << 24,
        description="upper limit on the context length, tokens; default: that of the workers",
    )
    api_keys_file: Path | None = Field(
        None,
        description="file with one 'sha256-of-key name weight=N' per line, name and weight being "
        "optional; it is read again when it changes; without it no key is required",
    )

    tool_parser: ToolParserName = Field(
        "auto",
        description="format in which the model writes tool calls; auto: by its chat template; "
        "none: requests with tools are refused",
    )
    reasoning_parser: ReasoningParserName = Field(
        "auto",
        description="format of the model's reasoning blocks, which become reasoning_content; auto: "
        "by its chat template; none: they remain in the content",
    )

    page: bool = Field(
        True,
        description="serve the live page at `/`: load of the deployment, recent requests and a "
        "chat; if there are API keys, its data needs one",
    )

    allowed_origins: list[Annotated[str, Field(pattern=_ORIGIN)]] = Field(
        [],
        max_length=64,
        description="origins of web pages that may call the HTTP API (CORS), such as "
        "https://chat.example.com, or all origins of a scheme, such as moz-extension://*; * allows "
        "all pages; default: only the live page; repeat the flag",
    )
    trusted_proxies: list[str] = Field(
        [],
        max_length=256,
        description="addresses or networks (CIDR) of proxies whose X-Forwarded-For names the "
        "client; default: the client is the peer of the connection; repeat the flag",
    )

    max_connections: int = Field(
        4096,
        ge=1,
        le=1 << 20,
        description="maximum connections of each port; further ones are refused (over HTTP with "
        "429); also the maximum concurrent gRPC calls",
    )
    max_client_connections: int = Field(
        2048,
        ge=1,
        le=1 << 20,
        description="maximum HTTP connections and gRPC calls of one client address (IPv6: of one "
        "/64 network); for a client behind a trusted proxy, maximum concurrent requests",
    )
    max_header_bytes: int = Field(
        1 << 16,
        ge=1024,
        le=1 << 20,
        description="maximum size of the request line and headers, bytes",
    )
    header_timeout_s: float = Field(
        10.0, gt=0, le=3600, description="maximum time until the headers have arrived, seconds"
    )
    keep_alive_s: int = Field(
        75,
        ge=1,
        le=3600,
        description="time after which an idle connection is closed, seconds; must be longer than "
        "the idle timeout of a proxy in front of the gateway",
    )
    write_timeout_s: float = Field(
        60.0,
        ge=1,
        le=3600,
        description="time after which a client that reads nothing is disconnected, seconds",
    )
    max_body_bytes: int = Field(
        1 << 20,
        ge=1024,
        le=1 << 30,
        description="maximum size of a request body, bytes; a warning says if it excludes prompts "
        "that fit the context of the workers",
    )
    max_encoder_body_bytes: int = Field(
        1 << 22,
        ge=1024,
        le=1 << 30,
        description="maximum size of a request body with texts for the encoder, bytes; each text "
        "or pair may have at most max_body_bytes",
    )
    max_buffered_bytes: int = Field(
        1 << 27,
        ge=1 << 16,
        le=1 << 40,
        description="maximum size of all request bodies in memory, bytes; further requests are "
        "refused with 429; one tenant (without API keys, one client address) may use at most as "
        "many bytes as are free, hence at most half",
    )
    body_timeout_s: float = Field(
        30.0, gt=0, le=3600, description="maximum time until a request body has arrived, seconds"
    )
    max_json_depth: int = Field(
        32, ge=4, le=512, description="maximum nesting depth of a JSON body"
    )
    max_prompts: int = Field(32, ge=1, le=1024, description="maximum prompts in one request")
    max_inputs: int = Field(
        2048,
        ge=1,
        le=1 << 16,
        description="maximum texts or pairs in one request for embeddings or scores",
    )
    truncate_inputs: bool = Field(
        False,
        description="cut off the end of texts that are too long for the encoder, if a request does "
        "not set truncate_prompt_tokens; by default, they are refused, as token ids always are",
    )
    encode_part_tokens: int = Field(
        4096,
        ge=1,
        le=1 << 20,
        description="maximum tokens of the inputs that are sent to an encoder worker together; "
        "larger requests are cut, and spread over several workers; a part has at most one batch of "
        "the workers",
    )
    max_choices: int = Field(8, ge=1, le=128, description="maximum n, the choices for one prompt")
    max_logprobs: int = Field(
        20,
        ge=0,
        le=100,
        description="maximum alternatives for each token in log probabilities; workers may limit "
        "it further",
    )
    max_prompt_logprobs: int = Field(
        1 << 18,
        ge=0,
        le=1 << 24,
        description="maximum log probabilities of prompt tokens in one response, alternatives and "
        "choices included",
    )
    max_stops: int = Field(4, ge=0, le=64, description="maximum stop strings of one request")
    max_stop_chars: int = Field(
        256, ge=1, le=4096, description="maximum characters of a stop string"
    )
    max_logit_bias: int = Field(1024, ge=0, le=65536, description="maximum entries of a logit_bias")
    max_tools: int = Field(128, ge=0, le=4096, description="maximum tools of one request")
    max_tool_bytes: int = Field(
        1 << 18,
        ge=0,
        le=1 << 30,
        description="maximum size of the tools of one request with their schemas as JSON, bytes",
    )
    max_template_bytes: int = Field(
        1 << 14,
        ge=0,
        le=1 << 30,
        description="maximum size of the chat_template_kwargs of one request as JSON, bytes",
    )
    max_stop_token_ids: int = Field(
        64, ge=0, le=4096, description="maximum entries of a request's stop_token_ids"
    )
    max_allowed_token_ids: int = Field(
        16384, ge=0, le=1 << 20, description="maximum entries of allowed_token_ids"
    )
    max_bad_words: int = Field(
        32,
        ge=0,
        le=MAX_BAD_WORDS // 2,
        description=f"maximum bad_words of one request, each of up to {MAX_BAD_WORD_TOKENS} tokens",
    )
    default_max_tokens: int = Field(
        16,
        ge=1,
        le=1 << 20,
        description="default of max_tokens for completions; a chat by default may fill the "
        "context; both get fewer tokens if fewer fit on the workers",
    )

    max_grammar_bytes: int = Field(
        MAX_BYTES,
        ge=64,
        le=MAX_BYTES,
        description="maximum size of a JSON schema, regular expression or grammar that constrains "
        "the output, bytes",
    )
    max_grammar_depth: int = Field(
        MAX_DEPTH,
        ge=1,
        le=MAX_DEPTH,
        description="maximum nesting of a JSON schema, regular expression or grammar",
    )
    grammar_timeout_s: float = Field(
        5.0,
        gt=0,
        le=60,
        description="maximum time in which a JSON schema, regular expression or grammar is "
        "compiled, in a process of its own, seconds; those that take longer get a 400",
    )

    max_concurrent: int = Field(
        1024,
        ge=1,
        le=1 << 20,
        description="maximum prompts in progress; further requests are refused with 429",
    )
    deadline_s: float = Field(
        600.0,
        gt=0,
        le=MAX_DEADLINE_S,
        description="maximum time from arrival to the last token, seconds",
    )
    queue_wait_s: float = Field(
        60.0,
        ge=0,
        le=MAX_WAIT_S,
        description="maximum time in a router's queue, seconds; `max_wait_s` of the routers also "
        "limits it",
    )
    max_attempts: int = Field(
        5,
        ge=1,
        le=64,
        description="maximum placements of one request, including the first; those that a "
        "draining worker ended after it had delivered tokens do not count",
    )
    max_lost_workers: int = Field(
        2,
        ge=1,
        le=64,
        description="number of lost workers after which a request is not retried, because it may "
        "be the cause; a worker is lost if its process ends while it has the request",
    )
    connect_timeout_s: float = Field(
        5.0, gt=0, le=60, description="maximum time to connect to a router or worker, seconds"
    )
    ping_timeout_s: float = Field(
        PING_TIMEOUT_S,
        gt=0,
        le=60,
        description="time that a worker has to answer a gRPC ping before it counts as lost, "
        "seconds",
    )
    stream_buffer_tokens: int = Field(
        8192,
        ge=64,
        le=1 << 20,
        description="maximum tokens buffered for a client that reads slowly",
    )

    @field_validator("trusted_proxies")
    @classmethod
    def _check_proxies(cls, proxies: list[str]) -> list[str]:
        ClientAddresses(proxies)
        return proxies

    @field_validator("encoder_model")
    @classmethod
    def _drop_empty(cls, model: str | None) -> str | None:
        return model or None

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        if self.model == NO_MODEL and self.encoder_model is None:
            raise ValueError("without a model, encoder_model must be set")
        return self

    @model_validator(mode="after")
    def _check_buffers(self) -> Self:
        if self.max_buffered_bytes < 4 * self.max_body_bytes:
            raise ValueError("max_buffered_bytes must be at least four times max_body_bytes")
        if self.max_buffered_bytes < 4 * self.largest_body_bytes:
            raise ValueError(
                "max_buffered_bytes must be at least four times max_encoder_body_bytes"
            )
        return self

    @property
    def encoder_body_bytes(self) -> int:
        """Maximum size of a request body on the encoder's routes, bytes.

        Without an encoder, it is that of other routes.
        """
        return self.max_body_bytes if self.encoder_model is None else self.max_encoder_body_bytes

    @property
    def largest_body_bytes(self) -> int:
        """Maximum size of a request body on any route, bytes."""
        return max(self.max_body_bytes, self.encoder_body_bytes)
