"""Base class of request bodies and of the objects in them."""

from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from services.gateway.http.other_fields import OtherFields

UNSUPPORTED = "unsupported"
"""Type of the validation errors whose context has the field and the reason."""
INVALID = "invalid"
"""Like `UNSUPPORTED`, for a supported field whose value is invalid."""

_MAX_KIND_CHARS = 40
"""Maximum characters of the type of a content part or of a tool in an error message."""


def _document_ignored(schema: dict[str, Any], body: type["Body"]) -> None:
    """Add to the JSON schema what `Body` accepts but ignores.

    That is null for optional fields, and the fields in `others`.
    """
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        if name not in required and {"type": "null"} not in field.get("anyOf", ()):
            described = {k: field.pop(k) for k in ("title", "description", "default") if k in field}
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **described}
    for name, other in body.others.items():
        if name not in body.model_fields:
            schema["properties"][name] = other.schema


class Body(BaseModel):
    """A JSON object. An optional field that is null is treated as absent.

    Attributes:
        others: fields that are not implemented; those with accepted values are ignored.
        messages_field: name of the field that has the messages of a conversation, if any.
        for_encoder: whether the encoder answers the request, not the model that generates text.
    """

    others: ClassVar[OtherFields] = {}
    messages_field: ClassVar[str] = "messages"
    for_encoder: ClassVar[bool] = False
    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        json_schema_extra=_document_ignored,
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        kept = {}
        for name, value in content.items():
            if name in cls.model_fields:
                if value is not None:
                    kept[name] = value
            elif (other := cls.others.get(name)) is None:
                kept[name] = value
            elif not other.accepts(value, content):
                raise unsupported(name, f"is not supported; ignored values: {other.accepted}")
        return kept


def unsupported(field: str, reason: str) -> PydanticCustomError:
    """Return the error for a field of the validated object, or for itself if ``field`` is empty."""
    return PydanticCustomError(UNSUPPORTED, "{reason}", {"field": field, "reason": reason})


def invalid(field: str, reason: str) -> PydanticCustomError:
    """Return the error for an invalid value. ``field`` is as in `unsupported`."""
    return PydanticCustomError(INVALID, "{reason}", {"field": field, "reason": reason})


def check_type(content: Any, supported: str) -> Any:
    """Refuse an object of another type with an error that names the type, not its fields."""
    kind = content.get("type", supported) if isinstance(content, dict) else supported
    if isinstance(kind, str) and kind != supported:
        reason = f"{kind[:_MAX_KIND_CHARS]!r}: only {supported!r} is supported"
        raise unsupported("type", reason)
    return content


def is_deeper(content: Any, raw: bytes, limit: int) -> bool:
    """Return whether a JSON value, parsed from ``raw``, has more than ``limit`` nested levels."""
    if raw.count(b"[") + raw.count(b"{") <= limit:  # the common case
        return False
    level = [content]
    for _ in range(limit):
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
    return any(isinstance(value, dict | list) for value in level)


def check_kind(*supported: str, default: str | None = None) -> Callable[[Any], Any]:
    """Return a validator that refuses what is not an object of one of these types.

    Args:
        default: type of objects without one.
    """
    names = ", ".join(map(repr, supported))

    def check(content: Any) -> Any:
        if not isinstance(content, dict | Body):
            raise invalid("", "must be an object")
        kind = _kind_of(content, default)
        if not isinstance(kind, str):
            raise invalid("type", f"must be one of {names}")
        if kind not in supported:
            raise unsupported("type", f"{kind[:_MAX_KIND_CHARS]!r} is not supported, only {names}")
        return content

    return check


def tag_of_kind(default: str | None = None) -> Callable[[Any], str]:
    """Return a discriminator of objects that `check_kind` has accepted.

    Their tags, such as "a text", are no identifiers, so that they are not part of error paths.
    """
    return lambda content: f"a {_kind_of(content, default)}"


def _kind_of(content: Any, default: str | None) -> Any:
    kind = content.get("type") if isinstance(content, dict) else content.type
    return default if kind is None else kind
