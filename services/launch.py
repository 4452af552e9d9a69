"""Runs one service in this process: settings, logs, traces, event loop."""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from types import ModuleType

from services.common.errors import SettingsError
from services.common.file_limit import raise_file_limit
from services.common.logging import configure_logging
from services.common.memory import limit_arenas
from services.common.settings import ServiceSettings
from services.common.signals import end_on_sigterm_as_first_process, ignore_sighup_during_start

SERVICES = {
    "gateway": "GatewaySettings",
    "router": "RouterSettings",
    "prefill": "PrefillSettings",
    "decode": "DecodeSettings",
    "encoder": "EncoderSettings",
}
"""The services, each with the class of its settings."""


def load_settings(service: str, arguments: Sequence[str]) -> ServiceSettings:
    """Return the effective settings of a service; see `ServiceSettings.load`.

    Raises:
        SettingsError: if a value is invalid or the file cannot be read.
    """
    module = import_module(f"services.{service}.settings")
    settings_class: type[ServiceSettings] = getattr(module, SERVICES[service])
    return settings_class.load(arguments, program=f"headrace {service}")


def run_service(service: str, arguments: Sequence[str]) -> None:
    """Run a service until a signal ends it.

    Raises:
        SettingsError: if it cannot start with these settings or the installed packages.
    """
    ignore_sighup_during_start()
    limit_arenas()
    settings = load_settings(service, arguments)
    configure_logging(service, format=settings.log_format, level=settings.log_level)
    raise_file_limit()
    end_on_sigterm_as_first_process()
    module = _import_service(f"services.{service}.service")
    with (
        _tracing(service, settings),
        asyncio.Runner(loop_factory=getattr(module, "loop_factory", None)) as runner,
    ):
        runner.run(module.serve(settings))


def _import_service(name: str) -> ModuleType:
    """Import a service's module.

    Raises:
        SettingsError: if a package is missing. A restart would fail in the same way.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise SettingsError(
            f"a package is missing or incompatible, install it and start again: {error}"
        ) from error


def _tracing(service: str, settings: ServiceSettings) -> AbstractContextManager[None]:
    """Return a block in which spans are exported, if the settings have an OTLP endpoint.

    Raises:
        SettingsError: if a package is missing.
    """
    if settings.traces_url is None:
        return nullcontext()
    try:
        from services.common.otlp import exporting
    except ImportError as error:
        raise SettingsError(
            "an OTLP endpoint is set, but the tracing packages are not installed: "
            f"run `{sys.executable} -m pip install 'headrace[tracing]'` or unset the endpoint "
            f"({error})"
        ) from error
    return exporting(service, settings)
