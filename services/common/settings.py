"""Settings of a service: defaults, a YAML file, ``HEADRACE_…`` variables and flags.

Later sources override earlier ones.
"""

import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import (
    AliasChoices,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)
from pydantic_settings import (
    SettingsError as PydanticSettingsError,
)

from services.common.addresses import is_loopback
from services.common.cluster_token import TokenCheck
from services.common.errors import SettingsError
from services.common.hosts import HostCheck
from services.common.secret_files import SecretFiles
from services.common.settings_text import bounds_text, error_text
from services.common.tls import MutualTls, TlsFiles

_URL = r"^(https?://\S+)?$"
_TOKEN = re.compile(r"[\x21-\x7e]*")


class ServiceSettings(BaseSettings):
    """Settings that every service has.

    A subclass adds its own fields and its own ``env_prefix``. All services read the cluster token
    and the TLS settings from the same variables, ``HEADRACE_CLUSTER_TOKEN`` and ``HEADRACE_TLS_…``.
    """

    model_config = SettingsConfigDict(
        env_prefix="HEADRACE_", extra="forbid", frozen=True, populate_by_name=True
    )

    host: str = Field("127.0.0.1", description="address to listen on")
    allowed_hosts: list[str] = Field(
        [],
        max_length=64,
        description="host names that HTTP ports without authentication accept in the `Host` "
        "header besides IP addresses and local names, such as ai.example.com or *.example.com; "
        "* accepts all; default: no other names on a loopback address (against DNS rebinding), all "
        "names on others; repeat the flag",
    )
    log_format: str = Field(
        "auto",
        pattern="^(auto|json|human)$",
        description="auto, json or human; auto is human on a terminal and json elsewhere",
    )
    log_level: str = Field(
        "info",
        pattern="^(debug|info|warning|error)$",
        description="lowest level that is logged: debug, info, warning or error",
    )
    cluster_token: SecretStr | None = Field(
        None,
        validation_alias=AliasChoices("cluster_token", "HEADRACE_CLUSTER_TOKEN"),
        description="secret that the services share, needed for their calls and metrics",
    )
    second_cluster_token: SecretStr | None = Field(
        None,
        validation_alias=AliasChoices("second_cluster_token", "HEADRACE_SECOND_CLUSTER_TOKEN"),
        description="further secret that this service accepts and never sends, while one "
        "`cluster_token` replaces another",
    )
    tls_cert_file: Path | None = Field(
        None,
        validation_alias=AliasChoices("tls_cert_file", "HEADRACE_TLS_CERT_FILE"),
        description="PEM file with the certificate of this service, for its servers and clients; "
        "with `tls_key_file` and `tls_ca_file` all connections between services use mutual TLS; "
        "the files are read again when they change",
    )
    tls_key_file: Path | None = Field(
        None,
        validation_alias=AliasChoices("tls_key_file", "HEADRACE_TLS_KEY_FILE"),
        description="PEM file with the key of the certificate",
    )
    tls_ca_file: Path | None = Field(
        None,
        validation_alias=AliasChoices("tls_ca_file", "HEADRACE_TLS_CA_FILE"),
        description="PEM file with the CAs that sign the certificates of all services",
    )
    tls_server_name: str | None = Field(
        None,
        validation_alias=AliasChoices("tls_server_name", "HEADRACE_TLS_SERVER_NAME"),
        min_length=1,
        max_length=253,
        description="DNS name that the certificate of every service has; default: the host or IP "
        "address under which it is called",
    )
    health_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="separate port for /health and /ready over plain HTTP without authentication, "
        "for kubelets, which have no client certificate; 0: a free one; default: none",
    )
    otlp_endpoint: str | None = Field(
        None,
        validation_alias=AliasChoices(
            "otlp_endpoint", "HEADRACE_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
        ),
        pattern=_URL,
        description="base URL of the OpenTelemetry collector that receives the traces of requests, "
        "such as http://127.0.0.1:4318; default: no tracing",
    )
    otlp_traces_endpoint: str | None = Field(
        None,
        validation_alias=AliasChoices(
            "otlp_traces_endpoint",
            "HEADRACE_OTLP_TRACES_ENDPOINT",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        ),
        pattern=_URL,
        description="complete URL for traces; default: `otlp_endpoint`, with /v1/traces over HTTP",
    )
    otlp_protocol: Literal["http/protobuf", "grpc"] = Field(
        "http/protobuf",
        validation_alias=AliasChoices(
            "otlp_protocol",
            "HEADRACE_OTLP_PROTOCOL",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
            "OTEL_EXPORTER_OTLP_PROTOCOL",
        ),
        description="protocol of the collector: http/protobuf or grpc",
    )
    trace_ratio: float | None = Field(
        None,
        ge=0,
        le=1,
        validation_alias=AliasChoices("trace_ratio", "HEADRACE_TRACE_RATIO"),
        description="fraction of the traces to record, of those that begin at the gateway; for a "
        "request with a trace context, the client's decision applies; default: "
        "OTEL_TRACES_SAMPLER, or all",
    )
    insecure: bool = Field(
        False,
        description="serve on a host that is not a loopback address with neither a cluster token "
        "nor mutual TLS",
    )
    drain_s: float = Field(
        30.0,
        ge=0,
        le=3600,
        description="time that running requests have to finish after SIGTERM, seconds",
    )

    @property
    def token(self) -> str | None:
        """Cluster token in plain text, or None if it is unset or empty."""
        return _plain(self.cluster_token)

    @cached_property
    def token_check(self) -> TokenCheck | None:
        """Check of the cluster token for servers of this process, or None without a token."""
        token = self.token
        return TokenCheck(token, _plain(self.second_cluster_token)) if token else None

    @property
    def authenticates_services(self) -> bool:
        """Whether calls between services need the cluster token or a certificate."""
        return self.token is not None or self.tls is not None

    @property
    def secret_files(self) -> list[SecretFiles]:
        """Files that every service reads again while it runs."""
        return [self.tls] if self.tls else []

    @property
    def traces_url(self) -> str | None:
        """URL to export traces to, or None without tracing.

        ``OTEL_SDK_DISABLED=true`` and ``OTEL_TRACES_EXPORTER=none`` disable tracing.
        """
        if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
            return None
        if os.environ.get("OTEL_TRACES_EXPORTER", "") == "none":
            return None
        if self.otlp_traces_endpoint or not self.otlp_endpoint:
            return self.otlp_traces_endpoint or None
        path = "" if self.otlp_protocol == "grpc" else "/v1/traces"
        return self.otlp_endpoint.rstrip("/") + path

    def host_check(self, *, authenticated: bool) -> HostCheck | None:
        """Return the check of ``Host`` for an HTTP port, or None for a port that accepts all names.

        Args:
            authenticated: whether calls need a credential, which a web page does not have.
        """
        if authenticated or "*" in self.allowed_hosts:
            return None
        if not self.allowed_hosts and not is_loopback(self.host):
            return None
        return HostCheck((self.host, *self.allowed_hosts))

    @cached_property
    def tls(self) -> MutualTls | None:
        """Certificates for connections between services, or None without mutual TLS.

        Raises:
            SettingsError: if a file cannot be used.
        """
        certificate, key, ca = self.tls_cert_file, self.tls_key_file, self.tls_ca_file
        if certificate is None or key is None or ca is None:
            return None
        return MutualTls(TlsFiles(certificate, key, ca), self.tls_server_name)

    @field_validator("cluster_token", "second_cluster_token")
    @classmethod
    def _check_token(cls, token: SecretStr | None) -> SecretStr | None:
        if not _TOKEN.fullmatch(_plain(token) or ""):
            raise ValueError("must consist of printable ASCII characters without spaces")
        return token

    @model_validator(mode="after")
    def _check_authentication(self) -> Self:
        if _plain(self.second_cluster_token) and self.token is None:
            raise ValueError("second_cluster_token is set, but cluster_token is not")
        names = ("tls_cert_file", "tls_key_file", "tls_ca_file")
        missing = [name for name in names if getattr(self, name) is None]
        if 0 < len(missing) < len(names):
            raise ValueError(f"mutual TLS also needs {' and '.join(missing)}")
        if missing:
            if self.token is None and not self.insecure and not is_loopback(self.host):
                raise ValueError(
                    f"host {self.host!r} is not a loopback address and there is no cluster token: "
                    "set HEADRACE_CLUSTER_TOKEN or HEADRACE_TLS_CERT_FILE, _KEY_FILE and _CA_FILE, "
                    "or pass --insecure to serve without authentication"
                )
            return self
        for url in getattr(self, "routers", ()):
            if not url.lower().startswith("https://"):
                raise ValueError(f"with mutual TLS, the router {url} must have an https:// URL")
        return self

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Append the bounds of each setting to its description, for ``--help``."""
        super().__pydantic_init_subclass__(**kwargs)
        for setting in cls.model_fields.values():
            bounds = bounds_text(setting)
            description = setting.description or ""
            if not description.endswith(bounds):  # inherited descriptions already have their bounds
                setting.description = description + bounds

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        sources = (init_settings, env_settings)
        path = settings_cls.model_config.get("yaml_file")
        return (*sources, YamlConfigSettingsSource(settings_cls)) if path else sources

    @classmethod
    def load(cls, arguments: Sequence[str] = (), *, program: str = "headrace") -> Self:
        """Return the effective settings from ``--config FILE``, the environment and the flags.

        Args:
            arguments: command-line flags: ``--kebab-case value`` for any field, and ``--config``.
                ``--help`` prints the flags and exits.
            program: command name in the help text.

        Raises:
            SettingsError: if a value is invalid or the file cannot be read.
        """
        config, flags = _split_config(list(arguments))
        command_line: dict[str, Any] = {
            "_cli_parse_args": flags,
            "_cli_kebab_case": True,
            "_cli_prog_name": program,
            "_cli_implicit_flags": True,
        }
        settings_class = cls
        if config is not None:
            if not config.is_file():
                raise SettingsError(f"no settings file at {config}")
            settings_class = type(cls.__name__, (cls,), {"model_config": {"yaml_file": config}})
        try:
            loaded = settings_class(**command_line)
        except (ValidationError, PydanticSettingsError) as error:
            raise SettingsError(error_text(error)) from None
        except yaml.YAMLError as error:
            raise SettingsError(f"{config} is not valid YAML: {error}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{config} cannot be read: {error}") from None
        except (TypeError, ValueError) as error:
            if config is None:
                raise
            raise SettingsError(f"{config} must be a YAML mapping of settings: {error}") from None
        # An instance of this class can be pickled.
        return cls.model_construct(loaded.model_fields_set, **vars(loaded))

    def __getstate__(self) -> dict[Any, Any]:
        """Return the values for a pickle, without cached properties."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {**super().__getstate__(), "__dict__": values}


def _plain(secret: SecretStr | None) -> str | None:
    """Return a secret without the white space around it, such as the line end of a file."""
    return (secret.get_secret_value().strip() if secret else "") or None


def _split_config(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """Split ``--config FILE`` from the other flags."""
    for at, argument in enumerate(arguments):
        if argument.startswith("--config="):
            return Path(argument.partition("=")[2]), arguments[:at] + arguments[at + 1 :]
        if argument == "--config":
            if at + 1 == len(arguments):
                raise SettingsError("--config needs a file name")
            return Path(arguments[at + 1]), arguments[:at] + arguments[at + 2 :]
    return None, arguments
