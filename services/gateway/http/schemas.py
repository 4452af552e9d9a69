"""Request bodies of the HTTP API: JSON within bounds, fields by name, OpenAI's error shape."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from services.common.errors import InvalidRequest
from services.gateway.requests import UnsupportedField, Wanted

# Fields of OpenAI's API that are not served. Clients send them as null: that is no request.
_UNSUPPORTED = frozenset(
    (
        *("audio", "best_of", "echo", "function_call", "functions", "metadata", "modalities"),
        *("parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention"),
        *("reasoning_effort", "response_format", "safety_identifier", "service_tier", "store"),
        *("suffix", "tool_choice", "tools", "verbosity", "web_search_options"),
    )
)
_UNSUPPORTED_IN_MESSAGE = frozenset(
    (
        *("annotations", "audio", "function_call", "name", "reasoning", "refusal"),
        *("tool_call_id", "tool_calls"),
    )
)


# Values that ask for nothing of the above: clients that spell out defaults send them.
_NEUTRAL: dict[str, Any] = {
    "echo": False,
    "metadata": {},
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "service_tier": "auto",
    "store": False,
    "suffix": "",
    "tool_choice": "none",
}
_LONGEST_NAME = 128  # of a field, in an error
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


class UnknownField(InvalidRequest):
    """A field that OpenAI's API does not have either."""

    code = "unknown_parameter"


# The first wrong element ends a list: a million errors would hold up the event loop for seconds.
_Ids = Annotated[list[int], Field(fail_fast=True)]
_Texts = Annotated[list[str], Field(fail_fast=True)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Body):
    """``include_usage`` adds a last event that holds the usage."""

    include_usage: bool | None = None


class _Generation(_Body):
    """What completions and chats have in common. Bounds are checked later, in one place."""

    model: Annotated[str | None, Field(description="absent: the only one served")] = None
    max_tokens: int | None = None
    n: int | None = None
    stop: str | _Texts | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int | None, Field(description="0 or -1 keeps all")] = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: Annotated[bool | None, Field(description="go on to max_tokens, as vLLM has it")] = (
        None
    )
    user: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def wanted(self) -> Wanted:
        """What was asked for, in the words that gRPC uses as well.

        Raises:
            InvalidRequest: fields that contradict each other, or a token id that is none.
        """
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream", param="stream_options")
        return Wanted(
            max_tokens=self._limit(),
            n=self.n,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop or (),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=_token_ids(self.logit_bias or {}),
            logprobs=self._alternatives(),
            ignore_eos=bool(self.ignore_eos),
            names=self._names(),
        )

    def _names(self) -> dict[str, str]:
        return {}

    def _limit(self) -> int | None:
        return self.max_tokens

    def _alternatives(self) -> int | None:
        raise NotImplementedError


class CompletionBody(_Generation):
    """``POST /v1/completions``."""

    prompt: str | _Texts | _Ids | Annotated[list[_Ids], Field(fail_fast=True)]
    logprobs: Annotated[int | None, Field(description="alternatives for each token")] = None

    def _alternatives(self) -> int | None:
        return self.logprobs


class TextPart(_Body):
    """A part of a message; text alone is served."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    def as_template_input(self) -> dict[str, Any]:
        """As chat templates know it: parts become one text."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": self.role, "content": text}


class ChatBody(_Generation):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int | None, Field(description="is max_tokens")] = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def _limit(self) -> int | None:
        newer, older = self.max_completion_tokens, self.max_tokens
        if newer is not None and older is not None and newer != older:
            raise InvalidRequest(
                "max_tokens and max_completion_tokens differ", param="max_completion_tokens"
            )
        return older if newer is None else newer

    def _alternatives(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs", param="top_logprobs")
        return None

    def _names(self) -> dict[str, str]:
        newer = (
            {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        )
        return {"logprobs": "top_logprobs", **newer}


class TokenizeBody(_Body):
    """``POST /tokenize``: a text, or a conversation through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: Annotated[bool, Field(description="those around a text, such as BOS")] = (
        True
    )
    parse_special: Annotated[
        bool, Field(description="read names of special tokens in a text as these tokens")
    ] = True


class DetokenizeBody(_Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: _Ids


_AnyBody = TypeVar("_AnyBody", bound=_Body)


def parse_body(raw: bytes, body: type[_AnyBody], *, max_depth: int) -> _AnyBody:
    """The body that these bytes are.

    Raises:
        InvalidRequest: not UTF-8, not JSON, nested too deeply, or a field is wrong or not served;
            ``param`` names it.
    """
    content = _loaded(raw)
    if _is_deeper(content, raw, max_depth):
        raise InvalidRequest(f"the body is nested deeper than {max_depth} levels")
    if not isinstance(content, dict):
        raise InvalidRequest("the body must be a JSON object")
    _drop_nulls(content, _UNSUPPORTED)
    for name in _NEUTRAL.keys() & content.keys():
        if content[name] == _NEUTRAL[name]:
            del content[name]
    messages = content.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            _drop_nulls(message, _UNSUPPORTED_IN_MESSAGE)
    try:
        return body.model_validate(content)
    except ValidationError as error:
        fault = _first_fault(error.errors(include_url=False, include_input=False))
    raise fault  # out of the block: as its context, the other would keep the whole body


def _loaded(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        fault = InvalidRequest(f"the body is not valid JSON in UTF-8: {error}")
    raise fault  # out of the block, as above


def _drop_nulls(fields: dict[str, Any], names: frozenset[str]) -> None:
    for name in names & fields.keys():
        if fields[name] is None:
            del fields[name]


def _is_deeper(content: Any, raw: bytes, limit: int) -> bool:
    if raw.count(b"[") + raw.count(b"{") <= limit:  # most bodies: it cannot be
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


def _first_fault(faults: Sequence[ErrorDetails]) -> InvalidRequest:
    # An unknown field is the likelier reason, where it makes others look wrong too.
    fault = next((f for f in faults if f["type"] == "extra_forbidden"), faults[0])
    param = _path(fault["loc"])[:_LONGEST_NAME]
    if fault["type"] != "extra_forbidden":
        return InvalidRequest(f"{param}: {fault['msg']}", param=param)
    if fault["loc"][-1] in _UNSUPPORTED | _UNSUPPORTED_IN_MESSAGE:
        return UnsupportedField(f"{param} is not supported yet", param=param)
    return UnknownField(f"{param} is not a field of this request", param=param)


def _path(location: tuple[int | str, ...]) -> str:
    """``messages[0].content`` and the like, without the names that pydantic gives to types."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step.isidentifier() and step not in ("str", "int"):
            path += f".{step}" if path else step
    return path or str(location[0])


def _token_ids(bias: dict[str, float]) -> dict[int, float]:
    for token in bias:
        if not _TOKEN_ID.fullmatch(token):  # int() takes more, and reads several as one
            raise InvalidRequest("keys of logit_bias must be token ids", param="logit_bias")
    return {int(token): value for token, value in bias.items()}
