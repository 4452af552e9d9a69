"""Haystack with its embedders for OpenAI's API."""

from typing import Any

import call
from facts import DOCUMENTS, QUESTIONS
from haystack import Document, Pipeline
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.utils import Secret

TARGET: dict[str, Any] = {
    "model": call.ENCODER,
    "api_base_url": f"{call.URL}/v1",
    "api_key": Secret.from_token(call.KEY),
}


def retrieval() -> dict[str, Any]:
    """Return the name of the best document for each question, and the tokens of the documents."""
    store = InMemoryDocumentStore(embedding_similarity_function="cosine")
    documents = [Document(content=text, meta={"name": name}) for name, text in DOCUMENTS.items()]
    embedder = OpenAIDocumentEmbedder(**TARGET, progress_bar=False, raise_on_failure=True)
    embedded = embedder.run(documents)
    store.write_documents(embedded["documents"])
    pipeline = Pipeline()
    pipeline.add_component("embedder", OpenAITextEmbedder(**TARGET))
    pipeline.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=1))
    pipeline.connect("embedder.embedding", "retriever.query_embedding")
    found = {
        name: pipeline.run({"embedder": {"text": question}})["retriever"]["documents"][0]
        for name, question in QUESTIONS.items()
    }
    return {
        "found": {name: document.meta["name"] for name, document in found.items()},
        "tokens": embedded["meta"]["usage"]["prompt_tokens"],
    }


if __name__ == "__main__":
    call.run(retrieval)
