"""LangChain with langchain-openai: messages, structured output, an agent with a tool, retrieval."""

import asyncio
from typing import Any

import call
from facts import DOCUMENTS, QUESTIONS
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from person import SENTENCE, Person


@tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"Sunny in {city}."


def model(**options: Any) -> ChatOpenAI:
    """Return a chat model of the deployment."""
    defaults: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "max_retries": 0}
    return ChatOpenAI(
        base_url=f"{call.URL}/v1", api_key=call.KEY, model=call.MODEL, **{**defaults, **options}
    )


def earlier_turns() -> list[Any]:
    """Return turns in which the tool was called, which a small model imitates."""
    messages: list[Any] = []
    for city in ("Rome", "Oslo", "Lima"):
        called = {"name": "get_weather", "args": {"city": city}, "id": city}
        messages.append(HumanMessage(f"How is the weather in {city}?"))
        messages.append(AIMessage("", tool_calls=[called]))
        messages.append(ToolMessage(f"Sunny in {city}.", tool_call_id=city))
        messages.append(AIMessage(f"It is sunny in {city}."))
    return messages


def chat() -> dict[str, Any]:
    """Ask a question: whole, streamed and in a batch."""
    whole = model().invoke(call.QUESTION)
    streamed = "".join(str(chunk.content) for chunk in model().stream(call.QUESTION))
    batch = model().batch([call.QUESTION, "Say hello."])
    return {
        "text": whole.content,
        "streamed": streamed,
        "batch": [each.content for each in batch],
        "usage": whole.usage_metadata and whole.usage_metadata["total_tokens"],
    }


def structured() -> dict[str, Any]:
    """Return a model of pydantic, by the default method: a strict JSON schema."""
    answer: Any = model().with_structured_output(Person).invoke(SENTENCE)
    return answer.model_dump()


def structured_by_call() -> dict[str, Any]:
    """Return a model of pydantic, by a forced call."""
    structured = model().with_structured_output(Person, method="function_calling")
    answer: Any = structured.invoke(SENTENCE)
    return answer.model_dump()


def agent() -> list[Any]:
    """Let an agent call a tool and answer; return the messages after the question."""
    history = [*earlier_turns(), HumanMessage("How is the weather in Paris?")]
    answer = create_agent(model(), [get_weather]).invoke({"messages": history})
    return [
        {"type": message.type, "text": message.content, "calls": getattr(message, "tool_calls", [])}
        for message in answer["messages"][len(history) :]
    ]


def agent_with_format() -> dict[str, Any]:
    """Let an agent answer in a structured format."""
    from langchain.agents.structured_output import ProviderStrategy

    created = create_agent(model(), [], response_format=ProviderStrategy(Person))
    answer = created.invoke({"messages": [HumanMessage(SENTENCE)]})
    return answer["structured_response"].model_dump()


def embedder(**options: Any) -> OpenAIEmbeddings:
    """Return an embedding model of the deployment."""
    return OpenAIEmbeddings(
        base_url=f"{call.URL}/v1",
        api_key=call.KEY,
        model=call.ENCODER,
        check_embedding_ctx_length=False,  # else it sends token ids of tiktoken
        max_retries=0,
        **options,
    )


def retrieval() -> dict[str, Any]:
    """Return the name of the best document for each question, by a retriever."""
    store = InMemoryVectorStore(embedder())
    store.add_texts(list(DOCUMENTS.values()), [{"name": name} for name in DOCUMENTS])
    retriever = store.as_retriever(search_kwargs={"k": 1})
    found = {name: retriever.invoke(question) for name, question in QUESTIONS.items()}
    return {name: best.metadata["name"] for name, (best,) in found.items()}


def embeddings() -> dict[str, Any]:
    """Embed texts: with and without asyncio, shortened, and more than 1 MiB in one request."""
    texts = list(DOCUMENTS.values())
    many = [f"{index}{' ' * 3000}." for index in range(400)]  # long, with few tokens
    return {
        "same": embedder().embed_documents(texts)
        == asyncio.run(embedder().aembed_documents(texts)),
        "dimensions": len(embedder(dimensions=64).embed_query("hello")),
        "many": len(embedder().embed_documents(many)),
    }


if __name__ == "__main__":
    call.run(
        *(chat, structured, structured_by_call, agent, agent_with_format),
        *(retrieval, embeddings),
    )
