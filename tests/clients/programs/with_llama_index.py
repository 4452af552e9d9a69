"""LlamaIndex with llama-index-llms-openai-like and llama-index-embeddings-openai-like."""

from typing import Any

import call
from facts import DOCUMENTS, QUESTIONS
from llama_index.core import VectorStoreIndex
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from person import SENTENCE, Person


def model(**options: Any) -> OpenAILike:
    """Return a chat model of the deployment."""
    return OpenAILike(
        model=call.MODEL,
        api_base=f"{call.URL}/v1",
        api_key=call.KEY,
        is_chat_model=True,
        context_window=8192,
        temperature=0,
        max_tokens=80,
        max_retries=0,
        **options,
    )


def chat() -> dict[str, Any]:
    """Ask a question, whole and streamed."""
    messages = [ChatMessage(role="user", content=call.QUESTION)]
    streamed = [each.delta or "" for each in model().stream_chat(messages)]
    return {"text": model().chat(messages).message.content, "streamed": "".join(streamed)}


def completion() -> str:
    """Complete a prompt over /v1/completions."""
    completing = OpenAILike(
        model=call.MODEL, api_base=f"{call.URL}/v1", api_key=call.KEY, temperature=0, max_tokens=8
    )
    return completing.complete("The capital of France is").text


def structured() -> dict[str, Any]:
    """Return a model of pydantic."""
    prompt = PromptTemplate("{sentence}")
    answer = model(should_use_structured_outputs=True).structured_predict(
        Person, prompt, sentence=SENTENCE
    )
    return answer.model_dump()


def structured_by_call() -> dict[str, Any]:
    """Return a model of pydantic, by a forced call."""
    prompt = PromptTemplate("{sentence}")
    calling = model(is_function_calling_model=True)
    answer = calling.structured_predict(
        Person, prompt, llm_kwargs={"tool_choice": "required"}, sentence=SENTENCE
    )
    return answer.model_dump()


def retrieval() -> dict[str, str]:
    """Return the name of the best document for each question, by an index."""
    embedder = OpenAILikeEmbedding(
        model_name=call.ENCODER, api_base=f"{call.URL}/v1", api_key=call.KEY, max_retries=0
    )
    nodes = [TextNode(text=text, id_=name) for name, text in DOCUMENTS.items()]
    retriever = VectorStoreIndex(nodes, embed_model=embedder).as_retriever(similarity_top_k=1)
    found = {name: retriever.retrieve(question) for name, question in QUESTIONS.items()}
    return {name: best.node_id for name, (best,) in found.items()}


if __name__ == "__main__":
    call.run(chat, completion, structured, structured_by_call, retrieval)
