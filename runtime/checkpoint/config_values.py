"""Validated access to numbers and token ids in a checkpoint's config or metadata."""

import math
from collections.abc import Mapping
from typing import Any

from runtime.errors import CheckpointError


def number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return the finite number under ``key``, or ``default`` if it is absent or null.

    Raises:
        CheckpointError: the value is not a finite number, or is absent without a default.
    """
    value = values.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"the config has {key} = {value!r}, expected a number")
    return float(value)


def count(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return the positive integer under ``key``; default and errors are as in `number`."""
    value = number(values, key, default)
    if not value.is_integer() or value < 1:
        raise CheckpointError(f"the config has {key} = {value}, expected a positive integer")
    return int(value)


def token_ids(values: Mapping[str, Any], key: str) -> set[int]:
    """Return the token ids under ``key``, which holds one id, a list of ids or null.

    Raises:
        CheckpointError: the value is anything else.
    """
    value = values.get(key)
    tokens = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in tokens):
        raise CheckpointError(f"the config has {key} = {value!r}, expected token ids")
    return set(tokens)
