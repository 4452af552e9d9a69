"""Conversations in a form of which a chat template omits nothing.

Agents send more than many templates take. Codex begins with two system messages, and Claude Code
sends some later: the template of Qwen 3.5 rejects these, that of SmolLM3 omits them. Claude Code
also sends a system message in several parts, of which the templates of Gemma 3 and of Mistral Small
take only the first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.tokenizer.chat_template import ChatTemplate, ChatTemplateError

_PROBE = "second instructions"
_PARTS = [{"type": "text", "text": text} for text in ("instructions", _PROBE)]
_ROLES = ("system", "user", "assistant", "user")
_CONVERSATION: list[dict[str, Any]] = [{"role": role, "content": "content"} for role in _ROLES]


@dataclass(frozen=True)
class ConversationFit:
    """Forms of messages that a chat template takes.

    Attributes:
        takes_later_system: whether prompts have system messages that are not the first message.
        joined: roles whose content must be one text, because prompts lack all parts but the first.
    """

    takes_later_system: bool = True
    joined: frozenset[str] = frozenset()

    @classmethod
    def of(cls, template: ChatTemplate, names: Mapping[str, str]) -> "ConversationFit":
        """Try what a template takes.

        Args:
            names: special tokens by the names of variables of the template.
        """

        def takes(conversation: Sequence[Mapping[str, Any]]) -> bool:
            try:
                return _PROBE in template.render(conversation, names)
            except ChatTemplateError:
                return False

        parts = {
            role: [*_CONVERSATION[:at], {"role": role, "content": _PARTS}, *_CONVERSATION[at + 1 :]]
            for at, role in enumerate(_ROLES[:-1])
        }
        return cls(
            takes([*_CONVERSATION, {"role": "system", "content": _PROBE}]),
            frozenset(role for role, conversation in parts.items() if not takes(conversation)),
        )

    def apply(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return a conversation of which the template omits nothing."""
        if self.joined:
            messages = [
                {**message, "content": _text(message["content"])}
                if message["role"] in self.joined and isinstance(message["content"], list)
                else message
                for message in messages
            ]
        is_later = any(message["role"] == "system" for message in messages[1:])
        return _folded(messages) if is_later and not self.takes_later_system else messages


def _folded(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation in which at most the first message has the role ``system``.

    System messages at the beginning become one. A later one is put in tags. It joins the message
    of the user or the result of a call before it, or else the message of the user after it. It
    keeps its place, so that the prompt still begins like that of an earlier request.
    """
    folded: list[dict[str, Any]] = []
    waiting: list[str] = []  # system messages that follow one of the assistant
    for message in messages:
        role, content = message["role"], message["content"]
        last = folded[-1] if folded else None
        if role == "system" and last is not None:
            if last["role"] == "system":
                last["content"] = _joined(last["content"], content)
            elif last["role"] in ("user", "tool"):
                last["content"] = _joined(last["content"], _tagged(content))
            else:
                waiting.append(_tagged(content))
            continue
        if waiting and role == "user":
            content = _joined(*waiting, content)
        elif waiting:
            folded.append({"role": "user", "content": _joined(*waiting)})
        waiting = []
        folded.append({**message, "content": content})
    if waiting:
        folded.append({"role": "user", "content": _joined(*waiting)})
    return folded


def _tagged(content: Any) -> str:
    return f"<system>\n{_text(content)}\n</system>"


def _joined(*contents: Any) -> str:
    return "\n\n".join(map(_text, contents))


def _text(content: Any) -> str:
    """Return a content, which may be a list of text parts, as text."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)
