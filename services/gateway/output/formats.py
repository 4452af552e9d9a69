"""The known formats, and the choice of those of a model."""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from services.gateway.output.hermes import Hermes
from services.gateway.output.llama3 import Llama3
from services.gateway.output.mistral import Mistral
from services.gateway.output.qwen3_coder import Qwen3Coder
from services.gateway.output.reasoning import MISTRAL, THINK, ReasoningFormat
from services.gateway.output.smollm2 import SmolLM2
from services.gateway.output.tool_format import ToolFormat
from services.tokenizer.chat_template import ChatTemplate

ToolParserName: TypeAlias = Literal[
    "auto", "none", "hermes", "llama3", "mistral", "qwen3_coder", "smollm2"
]
ReasoningParserName: TypeAlias = Literal["auto", "none", "think", "mistral"]

TOOL_FORMATS: dict[str, ToolFormat] = {
    format.name: format for format in (Hermes(), Llama3(), Mistral(), Qwen3Coder(), SmolLM2())
}
REASONING_FORMATS: dict[str, ReasoningFormat] = {format.name: format for format in (THINK, MISTRAL)}


@dataclass(frozen=True)
class MessageFormats:
    """Formats in which a model writes tool calls and reasoning; None if it has none."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @classmethod
    def of(
        cls,
        template: ChatTemplate | None,
        tools: ToolParserName = "auto",
        reasoning: ReasoningParserName = "auto",
    ) -> "MessageFormats":
        """Return the named formats, or for ``auto`` those that fit the chat template."""
        tool_template = template and template.tool_template
        return cls(
            _select(TOOL_FORMATS, tool_template, tools),
            _select(REASONING_FORMATS, template, reasoning),
        )


def _select(formats: dict[str, Any], template: ChatTemplate | None, name: str) -> Any:
    if name != "auto":
        return formats.get(name)
    if template is None or template.problem:
        return None
    return next((format for format in formats.values() if format.fits(template)), None)
