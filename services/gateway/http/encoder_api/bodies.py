"""Request bodies of ``/v1/embeddings``, ``/v1/rerank`` and ``/v1/score``."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from services.common.errors import InvalidRequest
from services.common.messages import MAX_PRIORITY
from services.gateway.http.body_model import Body
from services.gateway.http.other_fields import IN_EMBEDDINGS, IN_RERANK, IN_SCORE
from services.gateway.http.schemas import Ids, Texts


class EncoderBody(Body):
    """Fields of all requests for the encoder."""

    for_encoder: ClassVar[bool] = True

    model: Annotated[str | None, Field(description="default: the served encoder")] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Field(ge=-1, lt=1 << 31)] | None,
        Field(
            description="maximum tokens of a text or pair, whose end is cut off; -1: as many as "
            "the encoder supports; default: longer ones are refused"
        ),
    ] = None
    priority: Annotated[
        int,
        Field(
            ge=-MAX_PRIORITY,
            le=MAX_PRIORITY,
            description="lower values are handled first, among the requests of one tenant",
        ),
    ] = 0


class EmbeddingsBody(EncoderBody):
    """Body of ``POST /v1/embeddings``."""

    others = IN_EMBEDDINGS

    input: Annotated[
        str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)],
        Field(description="texts, or token ids that include special tokens"),
    ]
    encoding_format: Annotated[
        Literal["float", "base64"],
        Field(description="base64: little-endian float32 in base64"),
    ] = "float"
    dimensions: Annotated[
        Annotated[int, Field(ge=1)] | None,
        Field(
            description="return the first dimensions only, scaled to the length 1; sensible for "
            "encoders that were trained for it"
        ),
    ] = None
    normalize: Annotated[
        Literal[True] | None,
        Field(description="scale embeddings to the length 1; default: as the encoder defines"),
    ] = None
    prompt_name: Annotated[
        str | None,
        Field(description="name of a prompt of the encoder that precedes texts, such as query"),
    ] = None


class Document(Body):
    """A document to rank."""

    text: str


class RerankBody(EncoderBody):
    """Body of ``POST /v1/rerank``."""

    others = IN_RERANK

    query: str
    documents: Annotated[list[str | Document], Field(fail_fast=True)]
    top_n: Annotated[
        Annotated[int, Field(ge=0)] | None,
        Field(description="number of results; default and 0: all documents"),
    ] = None
    return_documents: Annotated[bool, Field(description="return the text of each document")] = False

    @property
    def texts(self) -> list[str]:
        """Texts of the documents."""
        return [each if isinstance(each, str) else each.text for each in self.documents]


class ScoreBody(EncoderBody):
    """Body of ``POST /v1/score``: one text with several others, or as many with as many."""

    others = IN_SCORE

    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    queries: Annotated[str | Texts | None, Field(description="other name of text_1")] = None
    documents: Annotated[str | Texts | None, Field(description="other name of text_2")] = None

    @model_validator(mode="after")
    def _check_names(self) -> "ScoreBody":
        for name, other in (("text_1", "queries"), ("text_2", "documents")):
            given = [getattr(self, each) is not None for each in (name, other)]
            if sum(given) != 1:
                raise InvalidRequest(f"set either {name} or {other}, and not both", param=name)
        return self

    @property
    def count(self) -> int:
        """Number of pairs, if the numbers of texts match."""
        return len(self._second)

    def pairs(self) -> list[tuple[str, str]]:
        """Return the pairs of texts.

        Raises:
            InvalidRequest: the numbers of texts do not match.
        """
        given = self.queries if self.text_1 is None else self.text_1
        first, second = _list_of(given), self._second
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise InvalidRequest(
                f"there are {len(first)} texts for {len(second)} others: one text, or as many as "
                "the others, must be given",
                param=self.names[0],
            )
        return list(zip(first, second, strict=True))

    @property
    def names(self) -> tuple[str, str]:
        """Names of the fields with the texts, for errors."""
        first = "text_1" if self.text_1 is not None else "queries"
        return first, "text_2" if self.text_2 is not None else "documents"

    @property
    def _second(self) -> list[str]:
        return _list_of(self.documents if self.text_2 is None else self.text_2)


def _list_of(texts: str | list[str] | None) -> list[str]:
    return [texts] if isinstance(texts, str) else texts or []
