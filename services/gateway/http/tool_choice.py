"""The field ``tool_choice``: which tools the model may or must call."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from services.gateway.http.body_model import Body, check_type

_NAME_PATTERN = "^[a-zA-Z0-9_.-]{1,128}$"

ToolName = Annotated[str, Field(pattern=_NAME_PATTERN)]


class NamedFunction(Body):
    """The function of a `NamedTool`."""

    name: ToolName


class NamedTool(Body):
    """A tool that the model must call."""

    type: Literal["function"]
    function: NamedFunction

    @model_validator(mode="before")
    @classmethod
    def _check_kind(cls, content: Any) -> Any:
        return check_type(content, "function")


_WORD, _OBJECT = "a word", "an object"
"""Names of the forms of `ToolChoice`."""

ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag(_WORD)] | Annotated[NamedTool, Tag(_OBJECT)],
    Discriminator(lambda choice: _OBJECT if isinstance(choice, dict | NamedTool) else _WORD),
]
"""Whether the model may call tools (auto), must not (none), must (required), or must call one."""
