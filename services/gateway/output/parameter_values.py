"""Values of parameters that models write as text, as JSON text for the client.

The format of such calls does not say whether ``5`` is a number or a string: the schema of the tool
decides. A value that may be a string only is sent while it arrives, any other when it is complete.
"""

import ast
import json
from collections.abc import Callable, Mapping
from json.encoder import encode_basestring
from typing import Any, Final

ANY: Final[frozenset[str]] = frozenset()
"""Types of a schema that allows all of them, or of which none is known."""
_STRING = frozenset(("string",))
_SPACE = " \t\r\n"
_WORDS = {"null": ("null", "None"), "boolean": ("true", "false", "True", "False")}
_FIRST = {"object": "{", "array": "[", "number": "-0123456789"}
"""First characters of JSON texts of a type."""
_BRANCHES = ("anyOf", "oneOf")
_MAX_DEPTH = 16
"""Maximum number of nested references and branches that are followed."""
_MAX_LITERAL_CHARS = 1 << 16


def resolved(schema: Any, root: Any) -> Mapping[str, Any]:
    """Return a schema, or the one that its ``$ref`` within ``root`` names; empty if it has none."""
    for _ in range(_MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        schema = root
        for part in reference[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema if isinstance(schema, dict) else {}


def types_of(schema: Any, root: Any, depth: int = 0) -> frozenset[str]:
    """Return the JSON types that a schema allows, ``number`` also for integers; `ANY` for all."""
    schema = resolved(schema, root)
    if depth > _MAX_DEPTH:
        return ANY
    kinds = schema.get("type")
    if isinstance(kinds, str):
        kinds = [kinds]
    if isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds):
        return frozenset("number" if kind == "integer" else kind for kind in kinds)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(map(_type, values))
    for name in _BRANCHES:
        if isinstance(branches := schema.get(name), list) and branches:
            found = [types_of(branch, root, depth + 1) for branch in branches]
            return frozenset().union(*found) if all(found) else ANY
    if isinstance(branches := schema.get("allOf"), list):
        found = [types for branch in branches if (types := types_of(branch, root, depth + 1))]
        return found[0].intersection(*found[1:]) if found else ANY
    if "properties" in schema:
        return frozenset(("object",))
    return frozenset(("array",)) if "items" in schema else ANY


def parameter_types(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the types of one property of an object; `ANY` if the schema does not declare it.

    Args:
        parameters: schema of the object.
    """
    schema = resolved(parameters, parameters)
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return types_of(properties[name], parameters)
    return types_of(schema.get("additionalProperties"), parameters)


class ParameterValue:
    """A value while it arrives.

    Args:
        types: types that its schema allows.
        send: receives the JSON text of the value in pieces; nothing if the value is left out.

    Attributes:
        in_string: whether the text ends within a JSON string, which has no line breaks.
    """

    def __init__(self, types: frozenset[str], send: Callable[[str], None]) -> None:
        self.in_string = False
        self._types = types
        self._send = send
        self._text: list[str] = []
        self._begun = ""  # the first characters after white space
        self._is_escaped = False
        # Whether the value is a string; None if the rest of the text decides.
        self._is_string: bool | None = None
        if types == _STRING:
            self._open()

    def write(self, text: str) -> None:
        """Continue the text of the value."""
        if self._is_string:
            self._send(_escaped(text))
            return
        self._text.append(text)
        if not self._begun:
            self._begun = text.lstrip(_SPACE)
        elif self._is_string is None:
            self._begun += text
        if self._begun[:1] in ("{", "["):
            self._scan(text)
        if self._is_string is None and self._begun:
            self._decide()

    def close(self) -> None:
        """End the value."""
        if self._is_string:
            self._send('"')
        elif (value := _converted("".join(self._text), self._types)) is not None:
            self._send(value)

    def _open(self) -> None:
        self._is_string = True
        self.in_string = False
        self._send('"')

    def _decide(self) -> None:
        """Find out whether the value can only be a string, from its first characters."""
        if not _may_be_string(self._types):
            self._is_string = False
            return
        begun, others = self._begun.rstrip(_SPACE), _others(self._types)
        if any(begun[0] in _FIRST.get(kind, "") for kind in others):
            self._is_string = False
        elif not any(word.startswith(begun) for kind in others for word in _WORDS.get(kind, ())):
            self._open()
            self._send(_escaped("".join(self._text)))
            self._text.clear()

    def _scan(self, text: str) -> None:
        for char in text:
            if char == '"' and not self._is_escaped:
                self.in_string = not self.in_string
            elif char == "\n":
                self.in_string = False
            self._is_escaped = self.in_string and char == "\\" and not self._is_escaped


def _converted(text: str, types: frozenset[str]) -> str | None:
    """Return the JSON text of a value, or None if it is empty and cannot be a string.

    A text that is not of the types remains a string, so that the call still reaches the client.
    """
    stripped = text.strip(_SPACE)
    if not _may_be_string(types):
        if not stripped:
            return None
        if stripped.lower() in ("null", "none"):
            return "null"
        return _json(stripped) or _quoted(text)
    value = _json(stripped)
    if value is not None and _type(json.loads(value)) in _others(types):
        return value
    return _quoted(text)


def _may_be_string(types: frozenset[str]) -> bool:
    return types == ANY or "string" in types


def _others(types: frozenset[str]) -> frozenset[str]:
    """Return the types that a text may have instead of being a string."""
    return frozenset(("object", "array")) if types == ANY else types - _STRING


def _json(text: str) -> str | None:
    """Return a JSON value as it was written, or what Python's spelling of it means, as JSON."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    else:
        return text
    if text.lower() in ("true", "false"):
        return text.lower()
    for read in (_with_line_breaks, _literal):
        try:
            return json.dumps(read(text), ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    return None


def _with_line_breaks(text: str) -> Any:
    return json.loads(text, strict=False, parse_constant=_refuse)


def _literal(text: str) -> Any:
    if len(text) > _MAX_LITERAL_CHARS:
        raise ValueError("too long")
    return ast.literal_eval(text)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _type(value: Any) -> str:
    """Return the JSON type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _escaped(text: str) -> str:
    return encode_basestring(text)[1:-1]


def _quoted(text: str) -> str:
    return encode_basestring(text)
