"""Where settings come from: defaults, a YAML file, ``HEADRACE_…`` variables, flags, rising."""

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

from services.common.errors import SettingsError


class ServiceSettings(BaseSettings):
    """What every service is told. Each subclass documents its own fields and sets its own
    ``env_prefix``; the cluster token is one for all of them."""

    model_config = SettingsConfigDict(
        env_prefix="HEADRACE_", extra="ignore", frozen=True, populate_by_name=True
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
    def load(cls, config: Path | None = None, **flags: Any) -> Self:
        """The effective settings. A flag that is None was not given.

        Raises:
            SettingsError: a value is out of bounds, or the file cannot be read.
        """
        given = {name: value for name, value in flags.items() if value is not None}
        try:
            if config is None:
                return cls(**given)
            with_file = type(cls.__name__, (cls,), {"model_config": {"yaml_file": config}})
            if not config.is_file():
                raise SettingsError(f"no settings file at {config}")
            return with_file(**given)  # type: ignore[no-any-return]
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, e['loc']))}: {e['msg']}"
                for e in error.errors(include_url=False)
            )
            raise SettingsError(f"{cls.__name__}: {faults}") from None
        except yaml.YAMLError as error:
            raise SettingsError(f"{config} is not YAML: {error}") from None
