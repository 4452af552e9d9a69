"""System messages in the middle of conversations, for chat templates that take only the first.

Agents send such messages: Codex begins with two, and Claude Code adds some later. Some templates,
such as those of Qwen 3.5, reject them. Others, such as those of SmolLM3, omit them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from services.tokenizer.chat_template import ChatTemplate, ChatTemplateError

_PROBE = "later instructions"
_CONVERSATION = (
    {"role": "system", "content": "instructions"},
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": "answer"},
    {"role": "user", "content": "question"},
    {"role": "system", "content": _PROBE},
)


def takes_later_system(template: ChatTemplate, names: Mapping[str, str]) -> bool:
    """Return whether prompts include system messages that are not the first message.

    Args:
        names: special tokens by the names of variables of the template.
    """
    try:
        return _PROBE in template.render(_CONVERSATION, names)
    except ChatTemplateError:
        return False


def fold_system_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
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
                last["content"] = _joined([last["content"], content])
            elif last["role"] in ("user", "tool"):
                last["content"] = _joined([last["content"], _tagged(content)])
            else:
                waiting.append(_tagged(content))
            continue
        if waiting and role == "user":
            content = _joined([*waiting, content])
        elif waiting:
            folded.append({"role": "user", "content": _joined(waiting)})
        waiting = []
        folded.append({**message, "content": content})
    if waiting:
        folded.append({"role": "user", "content": _joined(waiting)})
    return folded


def _tagged(content: Any) -> str:
    return f"<system>\n{_joined([content])}\n</system>"


def _joined(contents: Sequence[Any]) -> str:
    """Return contents, which may be lists of text parts, as one text."""
    return "\n\n".join(
        content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        for content in contents
    )
