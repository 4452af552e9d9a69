"""Options with which the output must be valid calls of tools. They are not supported.

They need a grammar that constrains the output. All refusals of such options are in this module.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

from services.gateway.http.body_model import unsupported


def _refuse_forced(choice: Any) -> Any:
    if choice == "required" or isinstance(choice, dict):
        raise unsupported("", "is not supported: it must be 'auto' or 'none'")
    return choice


def _refuse_strict(strict: bool) -> bool:
    if strict:
        raise unsupported("", "is not supported: it must be false")
    return strict


ToolChoice = Annotated[Literal["auto", "none"], BeforeValidator(_refuse_forced)]
"""Whether the model may call tools."""
Strict = Annotated[bool, AfterValidator(_refuse_strict)]
"""Whether the arguments of calls must match the schema of the tool."""
