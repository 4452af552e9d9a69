"""Validated access to numbers and token ids in a checkpoint's config or metadata."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from runtime.config import RopeConfig
from runtime.errors import CheckpointError

_DIVISORS = ("frequency_divisors", "short_factor", "long_factor")
"""Attributes of `RopeConfig` that are empty or hold one divisor for each pair of dimensions."""


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


def flag(values: Mapping[str, Any], key: str) -> bool:
    """Return the boolean under ``key``; False if it is absent or null.

    Raises:
        CheckpointError: the value is not a boolean.
    """
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"the config has {key} = {value!r}, expected true or false")
    return bool(value)


def refuse_unsupported(
    values: Mapping[str, Any], neutral: Mapping[str, Collection[Any]], known: Collection[str] = ()
) -> None:
    """Raise if a value changes the computation in a way that is not supported.

    Args:
        neutral: keys that may change the computation, with their values that have no effect. Null
            never has an effect.
        known: other supported keys. If there are any, keys that are in neither argument are refused
            unless they are null.

    Raises:
        CheckpointError: there is such a value. The message names its key.
    """
    for key, value in values.items():
        if value is None or key in known or not (known or key in neutral):
            continue
        if value not in neutral.get(key, ()):
            raise CheckpointError(f"the config has {key} = {value!r}, which is not supported")


def checked_rope(rope: RopeConfig, head_dim: int) -> RopeConfig:
    """Return ``rope`` if its frequencies are finite numbers.

    Raises:
        CheckpointError: a value is out of range, or the divisors do not fit ``head_dim``.
    """
    positive = [
        ("rope_theta", rope.theta),
        ("factor", rope.factor),
        ("beta_fast", rope.beta_fast),
        ("beta_slow", rope.beta_slow),
        ("attention_factor", rope.attention_factor),
        *((name, divisor) for name in _DIVISORS for divisor in getattr(rope, name)),
    ]
    for name, value in positive:
        if not 0 < value < math.inf:
            raise CheckpointError(f"the config has {name} = {value}, expected a positive number")
    if rope.scaling == "yarn" and rope.theta == 1.0:
        raise CheckpointError("the config has rope_theta = 1, which yarn does not support")
    if rope.scaling == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise CheckpointError("the config has low_freq_factor at or above high_freq_factor")
    for name in _DIVISORS:
        if (found := len(getattr(rope, name))) not in (0, head_dim // 2):
            raise CheckpointError(f"the config has {found} {name}, expected {head_dim // 2}")
    return rope


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
