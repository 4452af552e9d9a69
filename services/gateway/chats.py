"""Plans of chats: rendering for the model, and parsing of the output."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import orjson

from services.common.errors import InvalidRequest
from services.gateway.constraints import Constraint
from services.gateway.conversation_fit import ConversationFit
from services.gateway.output.call_parser import CallParser
from services.gateway.output.formats import MessageFormats
from services.gateway.output.lark import Marks
from services.gateway.output.message_grammar import (
    OBJECT,
    CallableTool,
    CallGrammar,
    MessageGrammar,
    arguments_schema,
)
from services.gateway.output.message_parser import MessageParser
from services.gateway.output.reasoning import ReasoningFormat, ReasoningParser
from services.gateway.output.tool_format import ToolFormat
from services.gateway.request_errors import UnsupportedField
from services.gateway.settings import GatewaySettings
from services.tokenizer.chat_template import ChatTemplate, TemplateInput
from services.tokenizer.tokenizer import Tokenizer

_SWITCHES = ("enable_thinking", "thinking")
"""Variables with which chat templates turn reasoning on and off."""
_OWN_VARIABLES = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
"""Variables that `ChatTemplate.render` sets."""
_MAX_NAME_CHARS = 64
_UNUSED = "the chat template of this model does not use it"


@dataclass(frozen=True)
class ChatOptions:
    """Options of a conversation, as the client sent them.

    Attributes:
        tools: tools that the model may call, in OpenAI's format.
        parallel_tool_calls: whether the message may have several calls.
        include_reasoning: whether the message has the reasoning.
        reasoning_effort: ``none``, or how much to reason; None: the model's default.
        template_kwargs: variables of the chat template.
        add_generation_prompt, continue_final_message: see `TemplateInput`.
        requires_calls: whether the message must have calls.
        called_name: name of the only function that the model may call; None for all.
        strict: names of the functions the arguments of whose calls follow their schemas.
        thinking: whether the model reasons before it answers; None: the model's default.
        requires_effort: whether the chat template must use a reasoning effort.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    reasoning_effort: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    requires_calls: bool = False
    called_name: str | None = None
    strict: frozenset[str] = frozenset()
    thinking: bool | None = None
    requires_effort: bool = True


def adds_generation_prompt(wanted: bool | None, *, continues: bool) -> bool:
    """Return whether a prompt ends with the start of the assistant's message.

    Args:
        wanted: what the client sent; None: true, unless the last message is continued.
        continues: whether the model continues the last message.

    Raises:
        InvalidRequest: both are true.
    """
    if wanted and continues:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt cannot both be true",
            param="continue_final_message",
        )
    return not continues if wanted is None else wanted


@dataclass(frozen=True)
class ChatPlan:
    """Rendering of one chat, and parsing of its output.

    Attributes:
        options: options that were checked.
        variables: variables of the chat template.
        tool_format: format of calls in the conversation and in the output; None if it is unknown.
        reasoning: format of the reasoning block; None if the output has none.
        keeps_calls: whether the model gets calls and their results in earlier messages.
        fit: what the chat template does not take.
        marks: writes the marks of the formats in grammars.
    """

    options: ChatOptions
    variables: Mapping[str, Any]
    tool_format: ToolFormat | None
    reasoning: ReasoningFormat | None
    keeps_calls: bool
    fit: ConversationFit
    marks: Marks

    @property
    def shown(self) -> frozenset[str]:
        """Names of special tokens that are part of the text of the output."""
        calls = self.tool_format.marks if self.tool_format and self.options.tools else ()
        tags = (self.reasoning.start, self.reasoning.end) if self.reasoning else ()
        return frozenset((*calls, *tags))

    def render(self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> "ChatPrompt":
        """Return the prompt of a conversation.

        Raises:
            InvalidRequest: if the chat template rejects the messages, or would omit calls.
        """
        if not self.keeps_calls:
            _refuse_calls(messages)
        options = self.options
        last = messages[-1]["content"] if options.continue_final_message else None
        tools = options.tools
        messages = self.fit.apply(messages)
        if self.tool_format is not None:
            messages, tools = self.tool_format.prepare(messages, tools)
        given = TemplateInput(
            tools=tools,
            variables=self.variables,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
        )
        prompt = tokenizer.render_chat(messages, given)
        return ChatPrompt(prompt, self._is_reasoning(prompt, last))

    def grammar(self, answer: Constraint | None, *, is_reasoning: bool) -> MessageGrammar | None:
        """Return what the message may consist of; None if it may be any text.

        Args:
            answer: constraint on the content. It does not apply if calls are required.
            is_reasoning: whether the output begins in a reasoning block.

        Raises:
            InvalidRequest: the schema of a function is not that of an object.
        """
        options, calls, field = self.options, None, answer.field if answer else ""
        if options.tools and (options.requires_calls or options.strict or answer):
            assert self.tool_format is not None
            calls = CallGrammar(
                self.tool_format,
                tuple(self._callable_tools()),
                required=options.requires_calls,
                parallel=options.parallel_tool_calls,
            )
        if options.requires_calls:
            answer, field = None, "tool_choice"
        if calls is None and answer is None:
            return None
        spec = answer.spec if answer else None
        return MessageGrammar(self.reasoning, is_reasoning, calls, spec, field or "tools")

    def _callable_tools(self) -> Iterator[CallableTool]:
        options = self.options
        for at, tool in enumerate(options.tools):
            function, field = tool["function"], f"tools[{at}].function.parameters"
            name, is_strict = function["name"], function["name"] in options.strict
            if options.called_name in (None, name):
                follows = is_strict or options.requires_calls
                schema = arguments_schema(function.get("parameters"), field) if follows else OBJECT
                yield CallableTool(name, schema, is_strict=is_strict, field=field)

    def parser_factory(
        self, *, is_reasoning: bool, gap: str = ""
    ) -> Callable[[], MessageParser] | None:
        """Return a function that returns a parser for one choice; None if no text needs parsing.

        Args:
            is_reasoning: whether the output begins in a reasoning block.
            gap: white space after the block that is not content.
        """
        options, tool_format, reasoning = self.options, self.tool_format, self.reasoning
        functions = [tool["function"] for tool in options.tools]
        schemas = {each["name"]: each.get("parameters") or {} for each in functions}
        if not schemas and reasoning is None:
            return None

        def new_parser() -> MessageParser:
            return MessageParser(
                ReasoningParser(reasoning, is_open=is_reasoning, gap=gap) if reasoning else None,
                CallParser(tool_format, schemas) if tool_format and schemas else None,
                include_reasoning=options.include_reasoning,
                parallel=options.parallel_tool_calls,
                is_named=options.called_name is not None,
            )

        return new_parser

    def new_call_id(self) -> str:
        """Return an id for a call in the output."""
        assert self.tool_format is not None
        return self.tool_format.new_id()

    def _is_reasoning(self, prompt: str, last: Any) -> bool:
        """Return whether a prompt ends in a reasoning block.

        Args:
            last: content of the message that the model continues; None for a new message.
        """
        if self.reasoning is None:
            return False
        if last is None:
            return self.options.add_generation_prompt and self.reasoning.is_open(prompt)
        return self.reasoning.is_unclosed(last if isinstance(last, str) else last[-1]["text"])


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation.

    Attributes:
        text: the prompt, for `Tokenizer.encode_rendered`.
        is_reasoning: whether it ends in a reasoning block.
    """

    text: str
    is_reasoning: bool


class ChatPlanner:
    """Checks the options of chats against the settings and the chat template of the model."""

    def __init__(
        self,
        settings: GatewaySettings,
        template: ChatTemplate | None,
        names: Mapping[str, str],
        special_tokens: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Choose the formats of the model.

        Args:
            names: special tokens by the names of variables of the template.
            special_tokens: ids of all special tokens, by their text.
        """
        self._settings = settings
        self._template = template
        self._formats = MessageFormats.of(template, settings.tool_parser, settings.reasoning_parser)
        templates = {template, template.tool_template} if template else set()
        self._fits = {one: ConversationFit.of(one, names) for one in templates}
        self._reserved = _OWN_VARIABLES | names.keys()
        self._marks = Marks(special_tokens)

    def plan(self, options: ChatOptions) -> ChatPlan:
        """Return the plan of a chat.

        Raises:
            InvalidRequest: if an option exceeds its bound or the model does not support it;
                ``param`` names it.
        """
        formats = self._formats
        template = self._template
        if template is not None and options.tools:
            template = template.tool_template
        variables = template.variables if template else frozenset()
        if options.tools:
            self._check_tools(options.tools, variables)
        describes_tools = formats.tools is not None and formats.tools.describes_tools
        source = template.source if template else ""
        kwargs = self._kwargs(options.template_kwargs, variables)
        return ChatPlan(
            options,
            {**self._effort(options, variables), **self._thinking(options, variables), **kwargs},
            formats.tools,
            formats.reasoning,
            keeps_calls=describes_tools or "tool_calls" in source,
            fit=self._fits[template] if template else ConversationFit(),
            marks=self._marks,
        )

    def _check_tools(self, tools: Sequence[Mapping[str, Any]], variables: Collection[str]) -> None:
        settings, tool_format = self._settings, self._formats.tools
        if len(tools) > settings.max_tools:
            raise InvalidRequest(
                f"tools must have at most {settings.max_tools} items", param="tools"
            )
        _check_size("tools", list(tools), settings.max_tool_bytes)
        takes_tools = "tools" in variables
        if tool_format is not None and (takes_tools or tool_format.describes_tools):
            return
        if settings.tool_parser == "none":
            reason = "this server has no tool_parser"
        elif takes_tools:
            reason = "the format of the calls of this model is not known"
        else:
            reason = "the chat template of this model takes no tools"
        raise UnsupportedField(f"tools is not supported: {reason}", param="tools")

    def _effort(self, options: ChatOptions, variables: Collection[str]) -> dict[str, Any]:
        """Return the variables of a reasoning effort."""
        effort = options.reasoning_effort
        if effort is None or (effort == "none" and self._formats.reasoning is None):
            return {}
        switches = {name: effort != "none" for name in _SWITCHES if name in variables}
        own = {"reasoning_effort": effort} if "reasoning_effort" in variables else {}
        if not switches and not own and options.requires_effort:
            raise UnsupportedField(
                f"reasoning_effort is not supported: {_UNUSED}",
                param="reasoning_effort",
            )
        return own | switches

    def _thinking(self, options: ChatOptions, variables: Collection[str]) -> dict[str, bool]:
        """Return the switches of the chat template for reasoning."""
        wanted = options.thinking
        if wanted is None:
            return {}
        switches = {name: wanted for name in _SWITCHES if name in variables}
        if not switches and wanted != (self._formats.reasoning is not None):
            reason = "does not reason" if wanted else "always reasons"
            raise UnsupportedField(
                f"thinking is not supported: this model {reason}", param="thinking"
            )
        return switches

    def _kwargs(self, kwargs: Mapping[str, Any], variables: Collection[str]) -> Mapping[str, Any]:
        """Check the variables of the client."""
        if not kwargs:
            return kwargs
        _check_size("chat_template_kwargs", kwargs, self._settings.max_template_bytes)
        for name in kwargs:
            param = f"chat_template_kwargs.{name[:_MAX_NAME_CHARS]}"
            if name in self._reserved:
                raise InvalidRequest(f"{param} cannot be set", param=param)
            if name not in variables:
                raise UnsupportedField(f"{param} is not supported: {_UNUSED}", param=param)
        return kwargs


def _check_size(name: str, value: Any, limit: int) -> None:
    size = len(orjson.dumps(value))
    if size > limit:
        raise InvalidRequest(f"{name} must have at most {limit} bytes as JSON", param=name)


def _refuse_calls(messages: Sequence[Mapping[str, Any]]) -> None:
    for at, message in enumerate(messages):
        field = "tool_calls" if message.get("tool_calls") else "role"
        if field == "tool_calls" or message["role"] == "tool":
            param = f"messages[{at}].{field}"
            raise UnsupportedField(
                f"{param} is not supported: the chat template of this model takes no tool calls",
                param=param,
            )
