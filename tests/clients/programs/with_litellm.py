"""LiteLLM's package, and OpenAI's package with LiteLLM's proxy."""

import json
import os
from typing import Any

import call
import litellm
import openai
from facts import DOCUMENTS, QUESTIONS
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


def embeddings() -> dict[str, Any]:
    """Embed texts with the providers for servers of OpenAI's API; return counts and dimensions."""
    found = {}
    for provider in ("hosted_vllm", "openai", "infinity", "jina_ai"):
        answer: Any = litellm.embedding(
            model=f"{provider}/{call.ENCODER}",
            input=list(DOCUMENTS.values()),
            api_base=f"{call.URL}/v1",
            api_key=call.KEY,
        )
        found[provider] = [len(answer.data), len(answer.data[0]["embedding"])]
    return found


def rerank() -> dict[str, Any]:
    """Return the names of the documents for each question, with the providers of rerankers."""
    names, texts = list(DOCUMENTS), list(DOCUMENTS.values())
    targets: dict[str, dict[str, Any]] = {
        "hosted_vllm": {"api_base": f"{call.URL}/v1"},
        "cohere": {"api_base": call.URL},
        "jina_ai": {"api_base": f"{call.URL}/v1"},
        # LiteLLM expects that Infinity returns documents in another form.
        "infinity": {"api_base": call.URL, "return_documents": False},
    }
    found: dict[str, Any] = {}
    for provider, target in targets.items():
        found[provider] = {}
        for name, question in QUESTIONS.items():
            answer: Any = litellm.rerank(
                model=f"{provider}/{call.ENCODER}",
                query=question,
                documents=texts,
                top_n=2,
                api_key=call.KEY,
                **target,
            )
            found[provider][name] = [names[result["index"]] for result in answer.results]
    return found


def proxied_embeddings() -> dict[str, Any]:
    """Embed and rank texts through the proxy at HEADRACE_PROXY."""
    client = openai.OpenAI(
        base_url=os.environ["HEADRACE_PROXY"],
        api_key=os.environ["HEADRACE_PROXY_KEY"],
        max_retries=0,
    )
    texts = list(DOCUMENTS.values())
    data = client.embeddings.create(model="embedder", input=texts).data
    body = {"model": "reranker", "query": QUESTIONS["moon"], "documents": texts}
    ranked: Any = client.post("/rerank", body=body, cast_to=object)
    return {
        "dimensions": [len(each.embedding) for each in data],
        "best": list(DOCUMENTS)[ranked["results"][0]["index"]],
    }


if __name__ == "__main__":
    call.run(chat, structured, errors, proxied, embeddings, rerank, proxied_embeddings)
