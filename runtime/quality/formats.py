"""Compressed KV formats by name."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from runtime.config import ModelConfig
from runtime.errors import KVFormatError
from runtime.kv.compressed import CompressedFormat
from runtime.kv.registry import COMPRESSED

EXACT = "exact"
"""Name that stands for no compression."""
_MEMBERS = ("name", "version", "artifact_hash", "planes", "layer")

FormatFactory = Callable[[ModelConfig], CompressedFormat | None]


def format_factory(spec: str) -> FormatFactory:
    """Return the function that creates a format for a model.

    Args:
        spec: ``exact``; a key of `COMPRESSED`; ``module:Class``, a class with a classmethod
            ``create(config)``; or ``module:function``, a function of the config.

    Raises:
        KVFormatError: the name is unknown, or the module has no such class or function. The
            returned function raises it if the format does not support the model, or does not
            implement the interface.
    """
    if spec == EXACT:
        return lambda _: None
    factory: Any = COMPRESSED.get(spec) or _plug_in(spec)

    def create(config: ModelConfig) -> CompressedFormat:
        try:
            made: CompressedFormat = factory(config)
        except ValueError as error:
            raise KVFormatError(f"KV format {spec} cannot be created: {error}") from error
        missing = [member for member in _MEMBERS if not hasattr(made, member)]
        if missing:
            raise KVFormatError(f"{spec} is not a compressed format: no {', '.join(missing)}")
        return made

    return create


def _plug_in(spec: str) -> Any:
    module_name, colon, name = spec.partition(":")
    if not colon:
        known = ", ".join((EXACT, *COMPRESSED))
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
