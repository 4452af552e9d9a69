"""OpenAI's Python package."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import call
import openai
from facts import DOCUMENTS, QUESTIONS
from person import SENTENCE, Person

client = openai.OpenAI(base_url=f"{call.URL}/v1", api_key=call.KEY, max_retries=0)
WEATHER_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather of a city.",
        "parameters": call.WEATHER,
    },
}


def models() -> list[str]:
    """List the models, and retrieve each."""
    return [client.models.retrieve(model.id).id for model in client.models.list()]


def chat() -> dict[str, Any]:
    """Ask a question, whole and streamed."""
    arguments: Any = {
        "model": call.MODEL,
        "messages": [
            {"role": "developer", "content": "Answer in one sentence."},
            {"role": "user", "content": [{"type": "text", "text": call.QUESTION}]},
        ],
        "temperature": 0,
        "max_completion_tokens": 30,
    }
    whole = client.chat.completions.create(**arguments)
    streamed, usage = "", None
    options: Any = {"include_usage": True}
    for chunk in client.chat.completions.create(**arguments, stream=True, stream_options=options):
        streamed += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    return {
        "text": whole.choices[0].message.content,
        "streamed": streamed,
        "usage": whole.usage and whole.usage.total_tokens,
        "streamed_usage": usage and usage.total_tokens,
        "finish_reason": whole.choices[0].finish_reason,
    }


def logprobs() -> list[int]:
    """Return the number of alternatives of each token."""
    answer = client.chat.completions.create(
        model=call.MODEL,
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=4,
        logprobs=True,
        top_logprobs=2,
        n=2,
    )
    found = [choice.logprobs for choice in answer.choices]
    return [
        len(token.top_logprobs) for each in found if each and each.content for token in each.content
    ]


def completion() -> dict[str, Any]:
    """Complete two prompts."""
    answer = client.completions.create(
        model=call.MODEL,
        prompt=["The capital of France is", "1, 2, 3,"],
        temperature=0,
        max_tokens=8,
    )
    return {"texts": [choice.text for choice in answer.choices]}


def parse() -> dict[str, Any]:
    """Parse an answer into a model of pydantic, whole and streamed."""
    arguments: Any = {
        "model": call.MODEL,
        "messages": [{"role": "user", "content": SENTENCE}],
        "response_format": Person,
        "temperature": 0,
        "max_tokens": 100,
    }
    whole = client.chat.completions.parse(**arguments).choices[0].message.parsed
    with client.chat.completions.stream(**arguments) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0].message.parsed
    return {"whole": whole and whole.model_dump(), "streamed": streamed and streamed.model_dump()}


def tools() -> dict[str, Any]:
    """Call a tool as in earlier turns, and answer with its result."""
    messages: list[Any] = []
    for city in ("Rome", "Oslo", "Lima", "Paris"):
        messages.append({"role": "user", "content": f"How is the weather in {city}?"})
        function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
        messages.append(
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": city, "type": "function", "function": function}],
            }
        )
    arguments: Any = {
        "model": call.MODEL,
        "messages": messages[:-1],
        "tools": [WEATHER_TOOL],
        "temperature": 0,
        "max_tokens": 60,
    }
    message = client.chat.completions.create(**arguments).choices[0].message
    with client.chat.completions.stream(**arguments) as stream:
        streamed = stream.get_final_completion().choices[0].message
    calls: list[Any] = message.tool_calls or []
    results = [{"role": "tool", "tool_call_id": each.id, "content": "Sunny"} for each in calls]
    arguments["messages"] = [*messages[:-1], message, *results]
    answer = client.chat.completions.create(**arguments).choices[0].message
    return {
        "calls": [each.function.to_dict() for each in calls],
        "streamed": [each.function.to_dict() for each in streamed.tool_calls or []],
        "answer": answer.content,
    }


def required() -> dict[str, Any]:
    """Force a call of some tool, and of a named one."""
    found = {}
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    for name, choice in {"required": "required", "named": named}.items():
        answer = client.chat.completions.create(
            model=call.MODEL,
            messages=[{"role": "user", "content": "How is the weather in Paris?"}],
            tools=[WEATHER_TOOL],
            tool_choice=choice,
            temperature=0,
            max_tokens=100,
        )
        calls: list[Any] = answer.choices[0].message.tool_calls or []
        found[name] = [(each.function.name, json.loads(each.function.arguments)) for each in calls]
    return found


def errors() -> dict[str, Any]:
    """Return the type, the code and the parameter of errors."""
    found = {}
    user: Any = {"role": "user", "content": "Hi"}
    bodies: dict[str, Any] = {
        "model": {"model": "another", "messages": [user]},
        "temperature": {"model": call.MODEL, "messages": [user], "temperature": 9},
        "messages": {"model": call.MODEL, "messages": []},
        "tokens": {"model": call.MODEL, "messages": [user], "max_tokens": 100_000},
    }
    for name, body in bodies.items():
        try:
            client.chat.completions.create(**body)
        except openai.APIStatusError as error:
            found[name] = [type(error).__name__, error.code, error.param, error.type]
    return found


def responses() -> dict[str, Any]:
    """Ask a question over the Responses API, whole and streamed."""
    arguments: Any = {"model": call.MODEL, "input": call.QUESTION, "temperature": 0}
    whole = client.responses.create(**arguments, max_output_tokens=30)
    streamed, completed = "", None
    for event in client.responses.create(**arguments, max_output_tokens=30, stream=True):
        if event.type == "response.output_text.delta":
            streamed += event.delta
        elif event.type in ("response.completed", "response.incomplete"):
            completed = event.response.output_text
    return {"text": whole.output_text, "streamed": streamed, "completed": completed}


def responses_parse() -> dict[str, Any]:
    """Parse an answer of the Responses API into a model of pydantic."""
    answer = client.responses.parse(
        model=call.MODEL,
        input=SENTENCE,
        text_format=Person,
        temperature=0,
        max_output_tokens=100,
    )
    return answer.output_parsed.model_dump() if answer.output_parsed else {}


def embeddings() -> dict[str, Any]:
    """Embed texts in all forms; return the largest differences from the default form."""
    create, texts = client.embeddings.create, list(DOCUMENTS.values())
    default = create(model=call.ENCODER, input=texts)  # the package requests base64
    forms = {
        "float": create(model=call.ENCODER, input=texts, encoding_format="float"),
        "user": create(model=call.ENCODER, input=texts, user="someone"),
        "single": create(model=call.ENCODER, input=texts[0]),
        "async": asyncio.run(_embed_at_once(texts)),
    }
    found = {
        name: max(_difference(*pair) for pair in zip(answer.data, default.data, strict=False))
        for name, answer in forms.items()
    }
    return {
        "differences": found,
        "counts": {name: len(answer.data) for name, answer in forms.items()},
        "indices": [each.index for each in default.data],
        "usage": default.usage.to_dict(),
        "model": default.model,
    }


async def _embed_at_once(texts: Sequence[str]) -> Any:
    async with openai.AsyncOpenAI(base_url=f"{call.URL}/v1", api_key=call.KEY) as own:
        calls = (own.embeddings.create(model=call.ENCODER, input=texts) for _ in range(4))
        return (await asyncio.gather(*calls))[-1]


def _difference(first: Any, second: Any) -> float:
    pairs = zip(first.embedding, second.embedding, strict=True)
    return max(abs(one - other) for one, other in pairs)


def embeddings_of_ids() -> dict[str, Any]:
    """Embed token ids as lists and as a list of lists, and shortened embeddings."""
    create, ids = client.embeddings.create, [101, 7592, 102]  # [CLS] hello [SEP]
    text = create(model=call.ENCODER, input="hello").data[0]
    lists = create(model=call.ENCODER, input=[ids, ids]).data
    short = create(model=call.ENCODER, input="hello", dimensions=64).data[0].embedding
    return {
        "difference": _difference(create(model=call.ENCODER, input=ids).data[0], text),
        "differences": [_difference(each, text) for each in lists],
        "dimensions": len(short),
        "length": sum(value * value for value in short) ** 0.5,
    }


def retrieval() -> dict[str, str]:
    """Return the name of the best document for each question."""
    texts = [*DOCUMENTS.values(), *QUESTIONS.values()]
    data = client.embeddings.create(model=call.ENCODER, input=texts).data
    rows = [each.embedding for each in data]
    documents = dict(zip(DOCUMENTS, rows, strict=False))
    questions = dict(zip(QUESTIONS, rows[len(DOCUMENTS) :], strict=True))
    return {
        name: max(documents, key=lambda other: _product(row, documents[other]))
        for name, row in questions.items()
    }


def _product(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(one * other for one, other in zip(first, second, strict=True))


def embedding_errors() -> dict[str, Any]:
    """Return the type, the code and the parameter of errors."""
    found = {}
    bodies: dict[str, Any] = {
        "model": {"model": "text-embedding-3-small", "input": "a"},
        "generates": {"model": call.MODEL, "input": "a"},
        "dimensions": {"model": call.ENCODER, "input": "a", "dimensions": 1536},
        "tokens": {"model": call.ENCODER, "input": ["a", "word " * 1000]},
        "ids": {"model": call.ENCODER, "input": [[57668, 53901]]},  # of tiktoken
        "none": {"model": call.ENCODER, "input": []},
    }
    for name, body in bodies.items():
        try:
            client.embeddings.create(**body)
        except openai.APIStatusError as error:
            found[name] = [type(error).__name__, error.code, error.param]
    return found


if __name__ == "__main__":
    call.run(
        *(models, chat, logprobs, completion, parse, tools, required, errors),
        *(responses, responses_parse),
        *(embeddings, embeddings_of_ids, retrieval, embedding_errors),
    )
