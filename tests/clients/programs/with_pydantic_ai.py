"""pydantic-ai: agents with structured output and tools."""

import asyncio
from typing import Any

import call
from person import SENTENCE, Person
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.messages import (
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

MODEL = OpenAIChatModel(
    call.MODEL, provider=OpenAIProvider(base_url=f"{call.URL}/v1", api_key=call.KEY)
)
SETTINGS: Any = {"temperature": 0, "max_tokens": 100}


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"Sunny in {city}."


def chat() -> dict[str, Any]:
    """Ask a question, whole and streamed."""
    agent = Agent(MODEL, model_settings=SETTINGS)

    async def stream() -> str:
        async with agent.run_stream(call.QUESTION) as answer:
            return "".join([text async for text in answer.stream_text(delta=True)])

    return {"text": agent.run_sync(call.QUESTION).output, "streamed": asyncio.run(stream())}


def native() -> dict[str, Any]:
    """Return a model of pydantic by a JSON schema."""
    agent = Agent(MODEL, output_type=NativeOutput(Person), model_settings=SETTINGS)
    return agent.run_sync(SENTENCE).output.model_dump()


def by_call() -> dict[str, Any]:
    """Return a model of pydantic by a forced call, which is the default."""
    agent = Agent(MODEL, output_type=Person, model_settings=SETTINGS)
    return agent.run_sync(SENTENCE).output.model_dump()


def tools() -> dict[str, Any]:
    """Let an agent call a tool, as in earlier turns, and answer."""
    history: list[Any] = []
    for city in ("Rome", "Oslo", "Lima"):
        called = ToolCallPart("get_weather", {"city": city}, tool_call_id=city)
        returned = ToolReturnPart("get_weather", f"Sunny in {city}.", tool_call_id=city)
        history += [
            ModelRequest([UserPromptPart(f"How is the weather in {city}?")]),
            ModelResponse([called]),
            ModelRequest([returned]),
            ModelResponse([TextPart(f"It is sunny in {city}.")]),
        ]
    agent = Agent(MODEL, tools=[get_weather], model_settings=SETTINGS)
    answer = agent.run_sync("How is the weather in Paris?", message_history=history)
    parts = [part for message in answer.new_messages() for part in message.parts]
    return {
        "calls": [part.args_as_dict() for part in parts if isinstance(part, ToolCallPart)],
        "answer": answer.output,
    }


if __name__ == "__main__":
    call.run(chat, native, by_call, tools)
