"""Compressed KV formats by name."""

from functools import partial
from importlib import import_module
from typing import Any, Protocol

from runtime.config import ModelConfig
from runtime.errors import KVFormatError
from runtime.kv.compressed import CompressedFormat
from runtime.kv.names import is_calibrated
from runtime.kv.registry import CALIBRATED, COMPRESSED, calibrated_format

EXACT = "exact"
"""Name that stands for no compression."""


class FormatFactory(Protocol):
    """Creates a format for a model, or None for `EXACT`.

    A calibrated format compares ``model_hash`` with that of its calibration, unless it is empty.
    The others ignore it.
    """

    def __call__(self, config: ModelConfig, model_hash: str = "") -> CompressedFormat | None: ...


def format_factory(spec: str) -> FormatFactory:
    """Return the function that creates a format for a model.

    Args:
        spec: ``exact``; a key of `COMPRESSED`; ``name:PATH`` for a key of `CALIBRATED` and its
            calibration; ``module:Class``, a class with a classmethod ``create(config)``; or
            ``module:function``, a function of the config.

    Raises:
        KVFormatError: the name is unknown, or the module has no such class or function. The
            returned function raises it if the format does not support the model, or does not
            implement the interface.
    """
    if spec == EXACT:
        return _exact
    if is_calibrated(spec):
        return partial(calibrated_format, spec)
    factory: Any = COMPRESSED.get(spec) or _plug_in(spec)

    def create(config: ModelConfig, model_hash: str = "") -> CompressedFormat:  # noqa: ARG001
        try:
            made = factory(config)
        except (ValueError, TypeError) as error:
            raise KVFormatError(f"KV format {spec} cannot be created: {error}") from error
        if not isinstance(made, CompressedFormat):
            raise KVFormatError(f"{spec} does not extend runtime.kv.compressed.CompressedFormat")
        return made

    return create


def _exact(config: ModelConfig, model_hash: str = "") -> None:  # noqa: ARG001
    return None


def _plug_in(spec: str) -> Any:
    module_name, colon, name = spec.partition(":")
    if not colon:
        known = ", ".join((EXACT, *COMPRESSED, *(f"{name}:PATH" for name in CALIBRATED)))
        raise KVFormatError(
            f"unknown KV format {spec!r}: expected {known}, module:Class or module:function"
        )
    try:
        module = import_module(module_name)
    except (ImportError, ValueError) as error:
        raise KVFormatError(f"KV format {spec}: cannot import {module_name!r}: {error}") from error
    found: Any = getattr(module, name, None)
    if found is None:
        raise KVFormatError(f"KV format {spec}: {module_name} has no {name!r}")
    factory: Any = getattr(found, "create", None if isinstance(found, type) else found)
    if not callable(factory):
        raise KVFormatError(f"{spec} is neither a class with create() nor a function")
    return factory
