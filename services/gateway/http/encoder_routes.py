"""Routes of the encoder: embeddings (OpenAI), rerank (Jina, Cohere) and score (vLLM)."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.responses import Response

from services.common.encoder_placement import EncoderTask
from services.common.errors import InvalidRequest
from services.gateway.encoding.inputs import InputBuilder, Tokenization, tokenize_inputs
from services.gateway.encoding.request import EncodingRequest
from services.gateway.encoding.scores import (
    check_dimensions,
    label_scores,
    normalized,
    rows_of,
    shortened,
    similarities,
)
from services.gateway.gateway import Gateway, WrongModel, enforce_deadline
from services.gateway.http.encoder_api import answers
from services.gateway.http.encoder_api.bodies import (
    EmbeddingsBody,
    EncoderBody,
    RerankBody,
    ScoreBody,
)
from services.gateway.http.encoder_api.response_schemas import (
    EmbeddingsResponse,
    RerankResponse,
    ScoreResponse,
)
from services.gateway.http.middleware import cancel_on_disconnect
from services.gateway.http.openapi import GENERATION_ERRORS, document_body, document_responses
from services.gateway.http.reading import RequestReader
from services.gateway.http.responses import json_response
from services.gateway.requests import RequestContext
from services.tokenizer.encoder import EncoderTokens


@dataclass(frozen=True)
class _Scoring:
    """Scores of pairs to compute.

    Attributes:
        pairs: for each pair, the indices of its texts among the inputs of an embedder; empty if
            each input is a pair.
    """

    request: EncodingRequest
    builder: InputBuilder
    pairs: Sequence[tuple[int, int]] = ()


class EncoderRoutes:
    """The routes of a gateway's encoder."""

    def __init__(self, gateway: Gateway, reader: RequestReader) -> None:
        self._gateway = gateway
        self._reader = reader

    def attach(self, app: FastAPI) -> None:
        """Add the routes. Other paths of the same routes are those of other servers."""

        def post(
            endpoint: Callable[..., Awaitable[Response]],
            body: type[BaseModel],
            success: type[BaseModel],
            *paths: str,
        ) -> None:
            for path in paths:
                app.post(
                    path,
                    openapi_extra=document_body(body, self._gateway),
                    responses=document_responses(success, GENERATION_ERRORS, path=path),
                    include_in_schema=path == paths[0],
                    tags=["inference"],
                )(endpoint)

        post(self.embeddings, EmbeddingsBody, EmbeddingsResponse, "/v1/embeddings")
        rerank_paths = ("/v1/rerank", "/v2/rerank", "/rerank")
        post(self.rerank, RerankBody, RerankResponse, *rerank_paths)
        post(self.score, ScoreBody, ScoreResponse, "/v1/score", "/score")

    async def embeddings(self, request: Request) -> Response:
        """Return the embeddings of texts."""
        context = self._reader.accept(request)
        async with self._reader.read(request, context, EmbeddingsBody) as (body, size):
            builder = self._builder(body)
            if builder.facts.task is not EncoderTask.EMBED:
                raise self._gateway.has_no_embeddings()
            check_dimensions(body.dimensions, builder.facts)
            prepare = partial(self._inputs, body, builder)
            inputs = await self._tokenize(request, context, size, prepare)
        asked = self._request(context, body, builder, inputs, "embeddings")
        outputs = await self._encode(request, asked)
        rows = shortened(rows_of(outputs), body.dimensions)
        if body.normalize:
            rows = normalized(rows)
        content = await answers.embeddings_body(
            rows, asked.model, asked.tokens, body.encoding_format
        )
        return Response(content, media_type="application/json")

    async def rerank(self, request: Request) -> Response:
        """Return documents in the order of their relevance for a query."""
        context = self._reader.accept(request)
        async with self._reader.read(request, context, RerankBody) as (body, size):
            self._check_count(len(body.documents), "documents")
            texts = body.texts
            pairs = [(body.query, text) for text in texts]
            names = ("query", "documents")
            scoring = await self._scoring(request, context, body, pairs, names, size, "rerank")
        scores = await self._scores(request, scoring)
        return json_response(
            answers.rerank_body(
                scores,
                texts,
                request_id=context.request_id,
                model=scoring.request.model,
                tokens=scoring.request.tokens,
                top_n=body.top_n,
                return_documents=body.return_documents,
            )
        )

    async def score(self, request: Request) -> Response:
        """Return the scores of pairs of texts."""
        context = self._reader.accept(request)
        async with self._reader.read(request, context, ScoreBody) as (body, size):
            self._check_count(body.count, body.names[1])
            pairs = body.pairs()
            scoring = await self._scoring(request, context, body, pairs, body.names, size, "score")
        scores = await self._scores(request, scoring)
        return json_response(
            answers.score_body(
                scores,
                request_id=context.request_id,
                model=scoring.request.model,
                tokens=scoring.request.tokens,
            )
        )

    def _builder(self, body: EncoderBody) -> InputBuilder:
        encoder = self._gateway.require_encoder(body.model)
        return InputBuilder.of(encoder, body.truncate_prompt_tokens, self._gateway.settings)

    def _inputs(self, body: EmbeddingsBody, builder: InputBuilder) -> Tokenization:
        given = [body.input] if isinstance(body.input, str) else body.input
        if given and isinstance(given[0], int):
            given = [given]
        self._check_count(len(given), "input")
        if isinstance(given[0], str):
            return builder.texts(given, "input", builder.prompt(body.prompt_name))
        return builder.ids(cast("list[list[int]]", given), "input")

    async def _tokenize(
        self,
        request: Request,
        context: RequestContext,
        size: int,
        plan: Callable[[], Tokenization],
    ) -> list[EncoderTokens]:
        return await tokenize_inputs(
            self._gateway.prompts,
            context.owner,
            size,
            plan,
            limit=self._gateway.settings.encoder_body_bytes,
            waiting=partial(cancel_on_disconnect, request.receive),
        )

    async def _scoring(
        self,
        request: Request,
        context: RequestContext,
        body: RerankBody | ScoreBody,
        pairs: Sequence[tuple[str, str]],
        names: tuple[str, str],
        size: int,
        operation: str,
    ) -> _Scoring:
        """Return the scores to compute; an embedder computes a common query once.

        Args:
            names: fields of both texts, for errors.
        """
        builder = self._builder(body)
        if builder.facts.task is EncoderTask.CLASSIFY:
            if builder.facts.dimension != 1:
                raise WrongModel(
                    f"the encoder has {builder.facts.dimension} labels: only encoders with one "
                    "label score pairs"
                )
            plan = partial(builder.pairs, pairs, names[1])
            inputs = await self._tokenize(request, context, size, plan)
            return _Scoring(self._request(context, body, builder, inputs, operation), builder)
        queries, documents = zip(*pairs, strict=True)
        if len(set(queries)) == 1:
            queries = queries[:1]

        def both() -> Tokenization:
            first = builder.texts(queries, names[0], builder.query_prompt)
            return first + builder.texts(documents, names[1], builder.document_prompt)

        inputs = await self._tokenize(request, context, size, both)
        indices = [(index % len(queries), len(queries) + index) for index in range(len(documents))]
        return _Scoring(self._request(context, body, builder, inputs, operation), builder, indices)

    async def _scores(self, request: Request, scoring: _Scoring) -> list[float]:
        outputs = await self._encode(request, scoring.request)
        if not scoring.pairs:
            return label_scores(outputs, scoring.builder.facts)
        rows = rows_of(outputs)
        first, second = zip(*scoring.pairs, strict=True)
        return similarities(rows[list(first)], rows[list(second)])

    def _request(
        self,
        context: RequestContext,
        body: EncoderBody,
        builder: InputBuilder,
        inputs: Sequence[EncoderTokens],
        operation: str,
    ) -> EncodingRequest:
        return builder.request(context, inputs, priority=body.priority, operation=operation)

    async def _encode(self, request: Request, asked: EncodingRequest) -> list[bytes]:
        """Return the outputs; stop if the client disconnects or the deadline passes."""
        async with (
            enforce_deadline(asked.context.deadline),
            cancel_on_disconnect(request.receive),
        ):
            return await self._gateway.encode(asked)

    def _check_count(self, count: int, param: str) -> None:
        limit = self._gateway.settings.max_inputs
        if not 1 <= count <= limit:
            raise InvalidRequest(f"{param} must have 1 to {limit} entries", param=param)
