"""Where settings come from: defaults, a YAML file, ``HEADRACE_…`` variables, flags, rising."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import AliasChoices, Field, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)
from pydantic_settings import (
    SettingsError as PydanticSettingsError,
)

from services.common.errors import SettingsError


class ServiceSettings(BaseSettings):
    """What every service is told. Each subclass documents its own fields and sets its own
    ``env_prefix``; the cluster token is one for all of them."""

    model_config = SettingsConfigDict(
        env_prefix="HEADRACE_", extra="forbid", frozen=True, populate_by_name=True
    )

    host: str = Field("127.0.0.1", description="address to listen on")
    log_format: str = Field(
        "auto", pattern="^(auto|json|human)$", description="auto: human on a terminal"
    )
    log_level: str = Field(
        "info", pattern="^(debug|info|warning|error)$", description="least severe level"
    )
    cluster_token: SecretStr | None = Field(
        None,
        validation_alias=AliasChoices("cluster_token", "HEADRACE_CLUSTER_TOKEN"),
        description="shared secret of our own services; without it their ports are open",
    )
    drain_s: float = Field(
        30.0, ge=0, le=3600, description="grace for running work after SIGTERM, seconds"
    )

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
        """The effective settings, from ``--config FILE``, the environment and the other flags.

        Args:
            arguments: ``--kebab-case value`` for any field; ``--help`` prints them and exits.

        Raises:
            SettingsError: a value is out of bounds, or the file cannot be read.
        """
        config, flags = _take_config(list(arguments))
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
            return settings_class(**command_line)
        except (ValidationError, PydanticSettingsError) as error:
            raise SettingsError(f"{program}: {_faults(error)}") from None
        except yaml.YAMLError as error:
            raise SettingsError(f"{config} is not YAML: {error}") from None


def _take_config(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """Splits ``--config FILE`` off the flags."""
    for at, argument in enumerate(arguments):
        if argument.startswith("--config="):
            return Path(argument.partition("=")[2]), arguments[:at] + arguments[at + 1 :]
        if argument == "--config":
            if at + 1 == len(arguments):
                raise SettingsError("--config needs a file")
            return Path(arguments[at + 1]), arguments[:at] + arguments[at + 2 :]
    return None, arguments


def _faults(error: Exception) -> str:
    if isinstance(error, ValidationError):
        details = error.errors(include_url=False)
        return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in details)
    return str(error)
