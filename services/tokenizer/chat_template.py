"""Chat templates: conversations to prompts, as transformers renders them."""

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Self

import jinja2
from jinja2 import meta, nodes

from services.common.errors import InvalidRequest
from services.tokenizer.template_environment import TemplateEnvironment
from services.tokenizer.tracked_text import TrackedText

_DEFAULT = "default"
"""Name of the template that is used if a model has several."""
_TOOL_USE = "tool_use"
"""Name of the template for conversations with tools, if a model has several."""


class ChatTemplateError(InvalidRequest):
    """The chat template rejects the messages."""


@dataclass(frozen=True)
class TemplateInput:
    """Variables of a chat template, beside the messages.

    Attributes:
        tools: tools in OpenAI's format; none: the variable is null.
        variables: other variables, such as ``enable_thinking``.
        add_generation_prompt: whether the prompt ends with the start of the assistant's message.
        continue_final_message: whether the prompt ends in the last message, so that the model
            continues it.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ChatTemplate:
    """A compiled template. An invalid one can be created, but not rendered.

    Args:
        source: Jinja source.
        tool_source: source of another template for conversations with tools, such as that of Hermes
            3; None if there is none.

    Attributes:
        source: Jinja source.
        tool_template: template for conversations with tools.
        problem: why the template is not valid, or None.
        variables: names of the variables that the template reads, without those of its environment.
    """

    def __init__(self, source: str, tool_source: str | None = None) -> None:
        self.source = source
        self.tool_template = self if tool_source is None else ChatTemplate(tool_source)
        self.problem: str | None = None
        self.variables: frozenset[str] = frozenset()
        environment = TemplateEnvironment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(tree)
        except jinja2.TemplateError as error:
            self.problem = f"the chat template is not valid: {error}"
            return
        self.variables = frozenset(meta.find_undeclared_variables(tree) - {*environment.globals})
        self._takes_parts = _loops_over_parts(tree)
        self._takes_null = any(
            test.name == "none" and _content_owner(test.node) for test in tree.find_all(nodes.Test)
        )
        self._takes_text = not self._takes_parts or any(
            test.name == "string" for test in tree.find_all(nodes.Test)
        )

    @classmethod
    def from_directory(cls, path: Path, config: Mapping[str, Any]) -> Self | None:
        """Return the template of a Hugging Face directory, or None if it has none.

        Template files (``chat_template.jinja``, ``additional_chat_templates/*.jinja``) take
        precedence over ``config``, the content of ``tokenizer_config.json``. Of several templates,
        the one named ``default`` is used, and with tools the one named ``tool_use``.
        """
        files = {_DEFAULT: path / "chat_template.jinja"}
        files |= {file.stem: file for file in (path / "additional_chat_templates").glob("*.jinja")}
        sources: Any = {
            name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()
        }
        sources = sources or config.get("chat_template")
        if isinstance(sources, list):
            sources = {entry["name"]: entry["template"] for entry in sources}
        if not isinstance(sources, dict):
            return cls(sources) if sources else None
        source = sources.get(_DEFAULT)
        return cls(source, sources.get(_TOOL_USE)) if source else None

    @property
    def declaration(self) -> str | list[dict[str, str]]:
        """The entry ``chat_template`` of a ``tokenizer_config.json`` with this template."""
        if self.tool_template is self:
            return self.source
        named = {_DEFAULT: self.source, _TOOL_USE: self.tool_template.source}
        return [{"name": name, "template": source} for name, source in named.items()]

    @staticmethod
    def missing() -> NoReturn:
        """Raise the error for a model without a chat template."""
        raise ChatTemplateError(
            "this model has no chat template: send a text prompt instead of messages",
            param="messages",
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        names: Mapping[str, str],
        given: TemplateInput | None = None,
    ) -> str:
        """Return the prompt.

        The result is a `TrackedText`: literals of the template, ``names`` and roles count as
        written by the template.

        Args:
            messages: mappings with ``role`` and ``content``, and further fields that templates
                know, such as ``tool_calls``. The roles must be valid ones. The content is a string,
                a list of text parts, ``{"type": "text", "text": …}``, or None.
            names: special tokens as text, by their name in the template, such as ``bos_token``.
            given: other variables. By default, the prompt ends with the start of the assistant's
                message.

        Raises:
            ChatTemplateError: if the template is not valid, or rejects the messages.
        """
        given = given or TemplateInput()
        if given.tools and self.tool_template is not self:
            return self.tool_template.render(messages, names, given)
        if self.problem:
            raise ChatTemplateError(self.problem, param="messages")
        own = TrackedText.from_template
        contents = [
            {**m, "role": own(m["role"]), "content": self._content(m["content"])} for m in messages
        ]
        end = ""
        if given.continue_final_message:
            end = f"[end of message {secrets.token_hex(16)}] "
            contents[-1]["content"] = _with_end(contents[-1]["content"], end)
        variables = {
            **given.variables,
            **{name: own(token) for name, token in names.items()},
            "messages": contents,
            "tools": [dict(tool) for tool in given.tools] or None,
            "documents": None,
            "add_generation_prompt": given.add_generation_prompt,
        }
        try:
            prompt = self._template.render(variables)
            return _cut_at(end, prompt) if end else prompt
        except (
            *(jinja2.TemplateError, TypeError, ValueError, LookupError),
            *(ArithmeticError, AttributeError, RecursionError),
        ) as error:
            raise ChatTemplateError(
                f"the chat template rejects the messages: {error}", param="messages"
            ) from error

    def _content(self, content: Any) -> Any:
        """Return the content of a message in a form that the template takes.

        As in vLLM, a template that loops over the parts of a content gets a list, and any other
        gets the texts of the parts that are not empty, separated by newlines. Null, the content of
        a message with tool calls, is an empty text for templates that do not test for null.
        """
        if content is None:
            if self._takes_null:
                return None
            content = ""
        if isinstance(content, str):
            return content if self._takes_text else [{"type": "text", "text": content}]
        if self._takes_parts:
            return content
        return "\n".join(part["text"] for part in content if part["text"])


def _with_end(content: Any, end: str) -> Any:
    """Return the content of a message with ``end`` after its last text."""
    if isinstance(content, list):
        return [*content[:-1], {**content[-1], "text": content[-1]["text"] + end}]
    return f"{content or ''}{end}"


def _cut_at(end: str, prompt: str) -> str:
    """Return a prompt without ``end`` and all after it.

    As in transformers, space before it is removed if the template removes space after a content.

    Raises:
        ValueError: if the template omits the message.
    """
    at = prompt.find(end.rstrip())
    if at < 0:
        raise ValueError("it omits the final message")
    kept = prompt[:at]
    return kept if prompt.startswith(end, at) else kept.rstrip()


def _loops_over_parts(tree: nodes.Template) -> bool:
    """Return whether a template loops over the parts of a content, by the criteria of vLLM."""
    lists = {"messages"}
    size = 0
    while len(lists) > size:  # until no variable is added
        size = len(lists)
        lists |= {
            assign.target.name
            for assign in tree.find_all(nodes.Assign)
            if isinstance(assign.target, nodes.Name) and _name_of(assign.node) in lists
        }
    loops = [loop for loop in tree.find_all(nodes.For) if isinstance(loop.target, nodes.Name)]
    messages = {_name_of(loop.target) for loop in loops if _name_of(loop.iter) in lists}
    contents = {"content", *_parameters_of_contents(tree, messages)}
    return any(
        _name_of(loop.iter) in contents or _content_owner(loop.iter) in messages for loop in loops
    )


def _parameters_of_contents(tree: nodes.Template, messages: Collection[str | None]) -> set[str]:
    """Return the parameters of macros that are called with the content of a message."""
    calls = list(tree.find_all(nodes.Call))
    return {
        parameter.name
        for macro in tree.find_all(nodes.Macro)
        for call in calls
        if _name_of(call.node) == macro.name
        for parameter, argument in zip(macro.args, call.args, strict=False)
        if _content_owner(argument) in messages
    }


def _without_filters(node: Any) -> Any:
    """Return an expression without filters, tests and slices."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    return node


def _name_of(node: Any) -> str | None:
    node = _without_filters(node)
    return node.name if isinstance(node, nodes.Name) else None


def _content_owner(node: Any) -> str | None:
    """Return ``x`` for the expressions ``x.content`` and ``x['content']``."""
    node = _without_filters(node)
    if isinstance(node, nodes.Getattr):
        found = node.attr == "content"
    else:
        found = (
            isinstance(node, nodes.Getitem)
            and isinstance(node.arg, nodes.Const)
            and node.arg.value == "content"
        )
    return node.node.name if found and isinstance(node.node, nodes.Name) else None
