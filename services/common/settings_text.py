"""Texts about settings: bounds for ``--help``, and validation errors."""

from pydantic import ValidationError
from pydantic.fields import FieldInfo

_SIGNS = {"ge": "<=", "gt": "<", "le": "<=", "lt": "<"}


def bounds_text(setting: FieldInfo) -> str:
    """Return the valid range of a numeric setting as help text; empty if it has no bounds."""
    found = {
        name: getattr(item, name)
        for item in setting.metadata
        for name in _SIGNS
        if hasattr(item, name)
    }
    low = "".join(f"{found[name]}{_SIGNS[name]}" for name in ("ge", "gt") if name in found)
    high = "".join(f"{_SIGNS[name]}{found[name]}" for name in ("le", "lt") if name in found)
    return f" [{low}x{high}]" if found else ""


def error_text(error: Exception) -> str:
    """Return an error of pydantic in one line that names the settings."""
    if not isinstance(error, ValidationError):
        return str(error)
    described = []
    for detail in error.errors(include_url=False):
        field = ".".join(map(str, detail["loc"]))
        message = detail["msg"].removeprefix("Value error, ")
        described.append(f"{field}: {message}" if field else message)
    return "; ".join(described)
