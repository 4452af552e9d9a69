"""Grammar of tool calls in JSON, as coroutines that receive one character at a time.

Each function is a generator. The parser sends it the next character of the output at each
``yield``. The result is thus a function of the text, however it was split. Most functions read one
character more than they need and return it, because JSON has no end marks for numbers.

The arguments of a call are scanned for strings and brackets only: models may write arguments that
are not valid JSON, and clients get them as they were written, as in OpenAI's API.
"""

import json
from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol, TypeAlias

Reading: TypeAlias = Generator[None, str, str]
"""Receives characters. Returns the first one that it does not need."""

_SPACE = " \t\r\n"
_CLOSING = {"{": "}", "[": "]"}
_NAME_KEY = "name"
_ARGUMENTS_KEYS = ("arguments", "parameters")


class NotACall(Exception):
    """The text that was read since the last call is not a call."""


class CallSink(Protocol):
    """Receiver of the calls that a grammar recognizes."""

    tools: Mapping[str, Mapping[str, Any]]
    """Schemas of the arguments of the tools that may be called, by name."""

    def begin(self) -> None:
        """An object that may be a call begins."""

    def start(self, name: str) -> None:
        """The object is a call of this tool."""

    def arguments(self, text: str) -> None:
        """The arguments of the call continue."""

    def end(self) -> None:
        """The arguments of the call are complete."""

    def reject(self) -> None:
        """The object is complete, and it is not a call."""

    def close(self) -> None:
        """A mark after the last object is complete."""


def read_space() -> Reading:
    """Skip white space."""
    char = yield
    while char in _SPACE:
        char = yield
    return char


def read_word(word: str, char: str) -> Generator[None, str, None]:
    """Read ``word``, of which ``char`` is the first character. Nothing is read after it."""
    for n, expected in enumerate(word):
        if n:
            char = yield
        if char != expected:
            raise NotACall


def read_call(sink: CallSink) -> Reading:
    """Read an object with a name and arguments; its ``{`` was read.

    Once the name and the start of the arguments are known, the arguments are passed on as they
    arrive. Then an error only ends the object. Arguments may precede the name, be missing (a tool
    without parameters) or be a string that contains their JSON.

    Raises:
        NotACall: if the text is not such an object.
    """
    sink.begin()
    call = _Object(sink)
    char = yield from read_space()
    while char == '"':
        written = ['"']
        yield from _read_string(written.append)
        char = yield from read_space()
        if char != ":":
            raise NotACall
        char = yield from call.read_value(_loaded("".join(written)))
        if char == ",":
            char = yield from read_space()
            continue
        break
    if char == "}":
        call.close()
        return (yield from read_space())
    if not call.started:
        raise NotACall
    return char


def read_calls(sink: CallSink, char: str) -> Reading:
    """Read a call, several calls, or a list of calls, of which ``char`` is the first character."""
    listed = char == "["
    if listed:
        char = yield from read_space()
    if char != "{":
        raise NotACall
    while char == "{":
        char = yield from read_call(sink)
        if char == "," or (char == ";" and not listed):
            char = yield from read_space()
    if listed:
        if char != "]":
            raise NotACall
        sink.close()
        char = yield from read_space()
    return char


def read_arguments(sink: CallSink, name: str, char: str) -> Reading:
    """Read the arguments of a call whose name was read; ``char`` is their first character."""
    if char != "{" or name not in sink.tools:
        raise NotACall
    sink.begin()
    sink.start(name)
    yield from _read_brackets(char, sink.arguments)
    sink.end()
    return (yield from read_space())


class _Object:
    """The object of a call while it is read."""

    def __init__(self, sink: CallSink) -> None:
        self.started = False
        self._sink = sink
        self._keys: set[str | None] = set()
        self._name: str | None = None
        self._arguments = "{}"
        self._is_call = True

    def read_value(self, key: str | None) -> Reading:
        """Read the value of a key; None if the key is not a valid string."""
        key = _ARGUMENTS_KEYS[0] if key in _ARGUMENTS_KEYS else key
        self._is_call &= key not in self._keys
        self._keys.add(key)
        char = yield from read_space()
        if key == _ARGUMENTS_KEYS[0] and char == "{" and self._is_callable and not self.started:
            self._start()
            yield from _read_brackets(char, self._sink.arguments)
            self._sink.end()
            return (yield from read_space())
        written: list[str] = []
        char = yield from _read_value(char, written.append)
        if not self.started:
            self._set(key, "".join(written))
        return char

    def close(self) -> None:
        """Report the object at its end, if that was not done before."""
        if self.started:
            self._sink.close()
            return
        if not self._is_callable:
            self._sink.reject()
            return
        self._start()
        self._sink.arguments(self._arguments)
        self._sink.end()

    @property
    def _is_callable(self) -> bool:
        return self._is_call and self._name in self._sink.tools

    def _start(self) -> None:
        self.started = True
        self._sink.start(self._name or "")

    def _set(self, key: str | None, value: str) -> None:
        if key == _NAME_KEY:
            name = _loaded(value)
            self._is_call &= isinstance(name, str)
            self._name = name if isinstance(name, str) else None
        elif key == _ARGUMENTS_KEYS[0]:
            arguments = _arguments(value)
            self._is_call &= arguments is not None
            self._arguments = arguments or ""


def _read_value(char: str, write: Callable[[str], object]) -> Reading:
    if char in _CLOSING:
        yield from _read_brackets(char, write)
    elif char == '"':
        write(char)
        yield from _read_string(write)
    else:
        while char not in ',}]"{[:' and char not in _SPACE:
            write(char)
            char = yield
        if char not in _SPACE:
            return char
    return (yield from read_space())


def _read_brackets(char: str, write: Callable[[str], object]) -> Generator[None, str, None]:
    """Read an object or a list up to its closing bracket.

    Raises:
        NotACall: if a bracket closes another one than the last; it is not written.
    """
    write(char)
    open_ = [_CLOSING[char]]
    while open_:
        char = yield
        if char in "}]" and char != open_[-1]:
            raise NotACall
        write(char)
        if char in _CLOSING:
            open_.append(_CLOSING[char])
        elif char in "}]":
            open_.pop()
        elif char == '"':
            yield from _read_string(write)


def _read_string(write: Callable[[str], object]) -> Generator[None, str, None]:
    """Read a string up to its closing quote; the opening one was read and written."""
    escaped = False
    while True:
        char = yield
        write(char)
        if char == '"' and not escaped:
            return
        escaped = char == "\\" and not escaped


def _loaded(text: str) -> Any:
    """Return a JSON value, or None if it is not valid."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _arguments(value: str) -> str | None:
    """Return arguments that were read at once as JSON text, or None if they are not an object."""
    if value == "null":
        return "{}"
    if value.startswith("{"):
        return value
    text = _loaded(value)
    if not isinstance(text, str):
        return None
    if not text.strip():
        return "{}"
    return text if isinstance(_loaded(text), dict) else None
