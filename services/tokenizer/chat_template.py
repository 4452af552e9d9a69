"""Chat templates: sandboxed Jinja with the functions that model templates expect."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Self

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.common.errors import InvalidRequest, SettingsError


class ChatTemplateError(InvalidRequest):
    """The chat template rejects the messages."""


class ChatTemplate:
    """A compiled template.

    Raises:
        SettingsError: if the source is not a valid template.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise SettingsError(f"the chat template is not valid: {error}") from error

    @classmethod
    def from_directory(cls, path: Path, config: dict[str, Any]) -> Self | None:
        """Return the template of a Hugging Face directory, or None if it has none.

        ``chat_template.jinja`` takes precedence over ``config``, the content of
        ``tokenizer_config.json``.
        """
        file = path / "chat_template.jinja"
        if file.is_file():
            return cls(file.read_text(encoding="utf-8"))
        source = config.get("chat_template")
        if isinstance(source, list):  # several templates, by name
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        return cls(source) if source else None

    @staticmethod
    def missing() -> NoReturn:
        """Raise the error for a model without a chat template."""
        raise ChatTemplateError(
            "this model has no chat template: send a text prompt instead of messages",
            param="messages",
        )

    def render(self, messages: Sequence[dict[str, Any]], names: dict[str, str]) -> str:
        """Return the prompt, up to the start of the assistant's message.

        Args:
            messages: mappings with ``role`` and ``content``.
            names: special tokens as text, by their name in the template, such as ``bos_token``.

        Raises:
            ChatTemplateError: if the template rejects the messages.
        """
        try:
            return self._template.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **names,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise ChatTemplateError(
                f"the chat template rejects the messages: {error}", param="messages"
            ) from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
