"""Tools of the Responses API: functions, alone and in namespaces, and those that OpenAI hosts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from services.common.errors import InvalidRequest
from services.gateway.http.body_model import Body, check_kind, tag_of_kind
from services.gateway.http.other_fields import IN_RESPONSES_TOOL
from services.gateway.request_errors import UnsupportedField


class FunctionTool(Body):
    """A function that the model may call."""

    others = IN_RESPONSES_TOOL

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Annotated[
        dict[str, Any] | None, Field(description="JSON schema of the arguments; default: none")
    ] = None
    strict: Annotated[bool, Field(description="the arguments of each call follow the schema")] = (
        False
    )


class NamespaceTool(Body):
    """Functions whose calls have the name of the namespace in a field of its own."""

    type: Literal["namespace"]
    name: Annotated[str, Field(min_length=1)]
    description: Annotated[
        str | None, Field(description="ignored: the model gets those of the functions")
    ] = None
    tools: Annotated[
        list[Annotated[FunctionTool, BeforeValidator(check_kind("function"))]],
        Field(fail_fast=True),
    ]


class HostedTool(Body):
    """A tool that OpenAI's servers run. The model does not get it."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["web_search", "image_generation"]


_HOSTED = ("web_search", "image_generation")
_check_kind = check_kind("function", "namespace")


def _check(tool: Any) -> Any:
    return tool if isinstance(tool, dict) and tool.get("type") in _HOSTED else _check_kind(tool)


def _tag(tool: Any) -> str:
    tag = tag_of_kind()(tool)
    return "a hosted tool" if tag.removeprefix("a ") in _HOSTED else tag


ResponsesTool = Annotated[
    Annotated[FunctionTool, Tag("a function")]
    | Annotated[NamespaceTool, Tag("a namespace")]
    | Annotated[HostedTool, Tag("a hosted tool")],
    Discriminator(_tag),
    BeforeValidator(_check),
]


@dataclass(frozen=True)
class OfferedFunction:
    """A function of a request.

    Attributes:
        path: path of the function in the request.
        namespace: name of its namespace, if it is in one.
    """

    path: str
    namespace: str | None
    function: FunctionTool

    @property
    def name(self) -> str:
        """Name of the function in the chat."""
        return chat_name(self.namespace, self.function.name)

    def as_chat(self) -> dict[str, Any]:
        """Return the tool of a `ChatBody`."""
        function = self.function.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": {**function, "name": self.name}}


def offered_functions(tools: Sequence[ResponsesTool]) -> list[OfferedFunction]:
    """Return the functions among tools.

    Raises:
        UnsupportedField: there are hosted tools only. Beside functions, they are ignored, because
            agents such as Codex always offer them, and a model need not use them.
        InvalidRequest: functions of different namespaces have the same name in the chat.
    """
    offered: list[OfferedFunction] = []
    for at, tool in enumerate(tools):
        path = f"tools[{at}]"
        if isinstance(tool, FunctionTool):
            offered.append(OfferedFunction(path, None, tool))
        elif isinstance(tool, NamespaceTool):
            offered += [
                OfferedFunction(f"{path}.tools[{inner}]", tool.name, function)
                for inner, function in enumerate(tool.tools)
            ]
    if not offered:
        for at, tool in enumerate(tools):
            if isinstance(tool, HostedTool):
                param = f"tools[{at}].type"
                raise UnsupportedField(
                    f"{param} {tool.type!r} is not supported, only 'function', 'namespace'",
                    param=param,
                )
    namespaces: dict[str, str | None] = {}
    for one in offered:
        if namespaces.setdefault(one.name, one.namespace) != one.namespace:
            param = f"{one.path}.name"
            raise InvalidRequest(f"{param} is that of another function: {one.name}", param=param)
    return offered


def chat_name(namespace: str | None, name: str) -> str:
    """Return the name that a function of a namespace has in a chat."""
    return name if namespace is None else f"{namespace}__{name}"
