"""LiteLLM's package, and OpenAI's package with LiteLLM's proxy."""

import json
import os
from typing import Any

import call
import litellm
import openai
from person import SENTENCE, Person

TARGET: dict[str, Any] = {
    "model": f"hosted_vllm/{call.MODEL}",
    "api_base": f"{call.URL}/v1",
    "api_key": call.KEY,
    "temperature": 0,
    "max_tokens": 100,
    "num_retries": 0,
}
MESSAGES = [{"role": "user", "content": call.QUESTION}]


def chat() -> dict[str, Any]:
    """Ask a question, whole and streamed, with both providers for servers of OpenAI's API."""
    found = {}
    for provider in ("hosted_vllm", "openai"):
        target = {**TARGET, "model": f"{provider}/{call.MODEL}", "messages": MESSAGES}
        whole: Any = litellm.completion(**target)
        chunks: Any = litellm.completion(**target, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        found[provider] = {"text": whole.choices[0].message.content, "streamed": streamed}
    return found


def structured() -> dict[str, Any]:
    """Return JSON of a schema."""
    answer: Any = litellm.completion(
        **TARGET,
        messages=[{"role": "user", "content": SENTENCE}],
        response_format=Person,
    )
    return json.loads(answer.choices[0].message.content)


def errors() -> list[str]:
    """Return the classes of errors."""
    found = []
    for change in ({"model": "hosted_vllm/another"}, {"max_tokens": 100_000}):
        try:
            litellm.completion(**{**TARGET, "messages": MESSAGES, **change})
        except openai.APIStatusError as error:  # the base of LiteLLM's errors
            found.append(type(error).__name__)
    return found


def proxied() -> dict[str, Any]:
    """Ask a question through the proxy at HEADRACE_PROXY, whole and streamed."""
    client = openai.OpenAI(
        base_url=os.environ["HEADRACE_PROXY"],
        api_key=os.environ["HEADRACE_PROXY_KEY"],
        max_retries=0,
    )
    arguments: Any = {"model": "small", "messages": MESSAGES, "temperature": 0, "max_tokens": 30}
    whole = client.chat.completions.create(**arguments)
    streamed = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**arguments, stream=True)
        if chunk.choices
    )
    return {"text": whole.choices[0].message.content, "streamed": streamed}


if __name__ == "__main__":
    call.run(chat, structured, errors, proxied)
