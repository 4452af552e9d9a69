"""Anthropic's Python package."""

from typing import Any

import anthropic
import call

client = anthropic.Anthropic(base_url=call.URL, api_key=call.KEY, max_retries=0)
GREEDY = {"temperature": 0}  # the package has no argument for it
WEATHER_TOOL: Any = {
    "name": "get_weather",
    "description": "Return the weather of a city.",
    "input_schema": call.WEATHER,
}


def messages() -> dict[str, Any]:
    """Ask a question, whole and streamed."""
    arguments: Any = {
        "model": call.MODEL,
        "system": "Answer in one sentence.",
        "messages": [{"role": "user", "content": call.QUESTION}],
        "extra_body": GREEDY,
        "max_tokens": 30,
    }
    whole = client.messages.create(**arguments)
    with client.messages.stream(**arguments) as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    return {
        "text": "".join(block.text for block in whole.content if block.type == "text"),
        "streamed": streamed,
        "stop_reasons": [whole.stop_reason, final.stop_reason],
        "usage": [whole.usage.output_tokens, final.usage.output_tokens],
    }


def tools() -> dict[str, Any]:
    """Call a tool as in earlier turns, whole and streamed, and answer with its result."""
    messages: list[Any] = []
    for city in ("Rome", "Oslo", "Lima"):
        used = {"type": "tool_use", "id": city, "name": "get_weather", "input": {"city": city}}
        result = {"type": "tool_result", "tool_use_id": city, "content": f"Sunny in {city}."}
        messages += [
            {"role": "user", "content": f"How is the weather in {city}?"},
            {"role": "assistant", "content": [used]},
            {"role": "user", "content": [result]},
            {"role": "assistant", "content": f"It is sunny in {city}."},
        ]
    messages.append({"role": "user", "content": "How is the weather in Paris?"})
    arguments: Any = {
        "model": call.MODEL,
        "messages": messages,
        "tools": [WEATHER_TOOL],
        "extra_body": GREEDY,
        "max_tokens": 60,
    }
    whole = client.messages.create(**arguments)
    with client.messages.stream(**arguments) as stream:
        streamed = stream.get_final_message()
    used = [block for block in whole.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "Sunny in Paris."}
        for block in used
    ]
    turns = [
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": results},
    ]
    answer = client.messages.create(**{**arguments, "messages": [*messages, *turns]})
    return {
        "calls": [[block.name, block.input] for block in used],
        "streamed": [
            [block.name, block.input] for block in streamed.content if block.type == "tool_use"
        ],
        "stop_reason": whole.stop_reason,
        "answer": "".join(block.text for block in answer.content if block.type == "text"),
    }


def required() -> list[Any]:
    """Force a call."""
    answer = client.messages.create(
        model=call.MODEL,
        messages=[{"role": "user", "content": "How is the weather in Paris?"}],
        tools=[WEATHER_TOOL],
        tool_choice={"type": "any"},
        extra_body=GREEDY,
        max_tokens=100,
    )
    return [[block.name, block.input] for block in answer.content if block.type == "tool_use"]


def count() -> int:
    """Count the tokens of a message."""
    counted = client.messages.count_tokens(
        model=call.MODEL, messages=[{"role": "user", "content": call.QUESTION}]
    )
    return counted.input_tokens


def errors() -> list[Any]:
    """Return the class and the type of an error."""
    try:
        client.messages.create(
            model="another", max_tokens=5, messages=[{"role": "user", "content": "Hi"}]
        )
    except anthropic.APIStatusError as error:
        body: Any = error.body
        return [type(error).__name__, body["type"], body["error"]["type"]]
    return []


if __name__ == "__main__":
    call.run(messages, tools, required, count, errors)
