"""Response bodies for encoders, used in the OpenAPI document only."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Response(BaseModel):
    model_config = ConfigDict(extra="forbid")


class EncoderUsage(_Response):
    """Token counts of a request for an encoder."""

    prompt_tokens: int
    total_tokens: int


class Embedding(_Response):
    """Embedding of one input."""

    object: Literal["embedding"]
    index: int
    embedding: Annotated[
        list[float] | str,
        Field(description="numbers, or little-endian float32 in base64 if `encoding_format` is"),
    ]


class EmbeddingsResponse(_Response):
    """Body of the answer to ``POST /v1/embeddings``."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EncoderUsage


class RankedDocument(_Response):
    """Text of a document, with `return_documents` only."""

    text: str


class RerankResult(_Response):
    """Score of one document."""

    index: Annotated[int, Field(description="index of the document in the request")]
    relevance_score: float
    document: RankedDocument | None = None


class RerankResponse(_Response):
    """Body of the answer to ``POST /v1/rerank``, the most relevant documents first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EncoderUsage


class Score(_Response):
    """Score of one pair."""

    object: Literal["score"]
    index: int
    score: float


class ScoreResponse(_Response):
    """Body of the answer to ``POST /v1/score``."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EncoderUsage
