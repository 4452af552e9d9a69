"""OpenAI's Agents SDK, over the Responses API and over chats."""

from typing import Any

import call
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from person import SENTENCE, Person

set_tracing_disabled(True)
SETTINGS = ModelSettings(temperature=0, max_tokens=100)
MODELS = {"responses": OpenAIResponsesModel, "chats": OpenAIChatCompletionsModel}


@function_tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"Sunny in {city}."


def agents(**options: Any) -> dict[str, Agent]:
    """Return an agent for each interface."""
    client = AsyncOpenAI(base_url=f"{call.URL}/v1", api_key=call.KEY, max_retries=0)
    return {
        name: Agent(
            name="agent", model=model(call.MODEL, client), model_settings=SETTINGS, **options
        )
        for name, model in MODELS.items()
    }


def text() -> dict[str, Any]:
    """Ask a question."""
    return {
        name: Runner.run_sync(agent, call.QUESTION).final_output for name, agent in agents().items()
    }


def structured() -> dict[str, Any]:
    """Return a model of pydantic."""
    return {
        name: Runner.run_sync(agent, SENTENCE).final_output.model_dump()
        for name, agent in agents(output_type=Person).items()
    }


def tools() -> dict[str, Any]:
    """Force a call of a tool, whose result is the answer."""
    found = {}
    for name, agent in agents(tools=[get_weather], tool_use_behavior="stop_on_first_tool").items():
        agent.model_settings = ModelSettings(temperature=0, max_tokens=100, tool_choice="required")
        found[name] = Runner.run_sync(agent, "How is the weather in Paris?").final_output
    return found


if __name__ == "__main__":
    call.run(text, structured, tools)
