"""Reads numbers out of configs that strangers wrote."""

import math
from collections.abc import Mapping
from typing import Any

from runtime.errors import CheckpointError


def number(facts: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A finite number; ``default`` where the key is absent or null.

    Raises `CheckpointError` if there is neither, or something else.
    """
    value = facts.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"the config has {key} = {value!r} where a number is needed")
    return float(value)


def count(facts: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number of at least 1; otherwise as `number`."""
    value = number(facts, key, default)
    if not value.is_integer() or value < 1:
        raise CheckpointError(f"the config has {key} = {value} where a count is needed")
    return int(value)


def token_ids(facts: Mapping[str, Any], key: str) -> set[int]:
    """The token ids under a key that holds one, several or none.

    Raises `CheckpointError` if it holds something else.
    """
    value = facts.get(key)
    tokens = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in tokens):
        raise CheckpointError(f"the config has {key} = {value!r} where token ids are needed")
    return set(tokens)
