"""Models with a tokenizer of bytes and a chat template of a family, and outputs of chats."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.gateway.http import response_schemas
from services.gateway.served import ServedModel
from services.gateway.settings import GatewaySettings
from tests.services.gateway.conftest import Site
from tests.services.gateway.fakes import STOP, FakeStream, Script

END = "<|im_end|>"
_TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{{ tools | tojson if tools }}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ opening }}{% endif %}"
)
TEMPLATES = {
    "hermes": _TURNS + "{# <tool_call> #}",
    "qwen-3": _TURNS + "{# <tool_call> <think> #}",
    "qwen-3.5": (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('a later system message') }}{% endif %}{% endfor %}"
        f"{_TURNS}{{# <tool_call> <think> #}}"
    ),
    "smollm3": _TURNS + "{# <tool_call> <think> #}{{ '/no_think' if enable_thinking is false }}",
    "deepseek-r1": "{% set opening = '<think>\\n' %}" + _TURNS + "{# <tool_call> #}",
    "qwen3-coder": _TURNS + "{# <tool_call> <function= <parameter= #}",
    "llama3": _TURNS + "{# <|start_header_id|> #}",
    "mistral": _TURNS + "{# [TOOL_CALLS] [THINK] #}",
}
SPECIAL = (
    *("<|im_start|>", END, "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "<|other|>"),
)


def family_model(folder: Path, family: str) -> ServedModel:
    """Return a model with the template of a family: bytes are tokens, tags special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: id for id, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": END, "chat_template": TEMPLATES[family]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text("{}")
    return ServedModel.load(GatewaySettings.model_validate({"model": str(folder)}))


def speak(site: Site, *texts: str, size: int = 1, end: Any = STOP) -> Script:
    """Return a script that sends one text for each choice, ``size`` tokens at a time."""
    outputs = [site.encode(text) for text in texts]

    async def script(stream: FakeStream) -> None:
        for choice, ids in enumerate(outputs):
            begun = stream.replayed
            for at in range(begun, len(ids), size):
                sent = ids[at : at + size]
                await stream.tokens(*sent, choice=choice, logprobs=[-1.0] * len(sent))
        for choice in range(len(outputs)):
            await stream.end(end, choice=choice)

    return script


async def events_of(site: Site, body: dict[str, Any]) -> list[Any]:
    """Return the parsed events of a streamed chat."""
    response = await site.http.post("/v1/chat/completions", json={**body, "stream": True})
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def choices_of(site: Site, body: dict[str, Any]) -> list[Any]:
    """Return the choices of a chat that is not streamed, without the ids of calls."""
    response = await site.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    response_schemas.ChatResponse.model_validate(response.json(), strict=True)
    choices: list[Any] = response.json()["choices"]
    for choice in choices:
        for call in choice["message"].get("tool_calls", ()):
            assert call.pop("id")
    return choices


def assembled(events: Sequence[Any], count: int = 1) -> list[Any]:
    """Return the choices of a stream in the form of `choices_of`."""
    choices: list[Any] = [
        {"index": n, "message": {"role": "", "content": ""}, "logprobs": None} for n in range(count)
    ]
    for event in events:
        for part in event["choices"]:
            _append(choices[part["index"]], part)
    for choice in choices:
        message = choice["message"]
        if not message["content"] and message.keys() & {"tool_calls", "reasoning"}:
            message["content"] = None
    return choices


def _append(choice: dict[str, Any], part: dict[str, Any]) -> None:
    message, delta = choice["message"], part["delta"]
    for name in ("role", "content", "reasoning", "reasoning_content"):
        if name in delta:
            message[name] = message.get(name, "") + delta[name]
    for call in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if "id" in call:
            assert call["index"] == len(calls)
            calls.append({"type": call["type"], "function": dict(call["function"])})
        else:
            assert call.keys() == {"index", "function"}
            assert call["index"] == len(calls) - 1
            calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    if part["logprobs"]:
        choice["logprobs"] = choice["logprobs"] or {"content": []}
        choice["logprobs"]["content"] += part["logprobs"]["content"]
    if "token_ids" in part:
        choice.setdefault("token_ids", []).extend(part["token_ids"])
    choice["finish_reason"] = part["finish_reason"]
