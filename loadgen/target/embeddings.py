"""Requests for embeddings, and their answers."""

from typing import Any

import orjson

from loadgen.record import Failure, Record
from loadgen.schedule import ScheduledRequest
from loadgen.target.base import Options, RequestFailed, add_chunk, shuffles
from loadgen.workload.base import Dialogue, Text

_MAX_DETAIL = 300
"""Maximum characters of an answer that are recorded."""


def embeddings_body(prompt: Text | Dialogue, options: Options) -> dict[str, Any]:
    """Return the body of a request. Embeddings are sent in base64, as for OpenAI's client."""
    body: dict[str, Any] = {
        "model": options.model,
        "input": shuffles(prompt, options.texts),
        "encoding_format": "base64",
    }
    return body | options.extra


def take_embeddings(
    body: bytes, scheduled: ScheduledRequest, record: Record, options: Options, at: float
) -> None:
    """Record an answer that arrived at time ``at``: one output token for each embedding.

    Raises:
        RequestFailed: if it is not valid, or does not have the embeddings of all texts.
    """
    try:
        answer = orjson.loads(body)
        found = [entry["embedding"] for entry in answer["data"]]
        if len(found) != options.texts or not all(found):
            raise ValueError
        if usage := answer.get("usage"):
            record.input_tokens = int(usage["prompt_tokens"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestFailed(
            Failure.MALFORMED, f"invalid embeddings: {body[:_MAX_DETAIL]!r}"
        ) from error
    record.reported_tokens = len(found)
    if options.keep_answers:
        record.text = orjson.dumps(found).decode()
    add_chunk(record, scheduled, at, len(found))
