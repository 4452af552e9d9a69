"""Arguments of tool calls as objects. Models write them, so that they may be cut or invalid."""

from typing import Any

import orjson
from pydantic_core import from_json


def parse_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call: if they are cut, the complete part; if invalid, no argument.

    An empty text is an empty object.
    """
    try:
        parsed = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        try:
            parsed = from_json(text, allow_partial=True, allow_inf_nan=False)
        except ValueError:
            return {}
    return parsed if isinstance(parsed, dict) else {}
