"""Response bodies for encoders."""

import asyncio
import time
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import orjson

from services.gateway.encoding.scores import Floats

_BYTES_AT_A_TIME = 1 << 17
"""Bytes of embeddings that are formatted before other requests get a turn."""


def usage_of(tokens: int) -> dict[str, int]:
    """Return the token counts of a request."""
    return {"prompt_tokens": tokens, "total_tokens": tokens}


async def embeddings_body(rows: Floats, model: str, tokens: int, encoding_format: str) -> bytes:
    """Return the answer with embeddings, one per row.

    Numbers are written with as many digits as float32 needs.
    """
    entries = []
    formatted = 0
    for index, row in enumerate(rows):
        if encoding_format == "base64":
            value = b'"%s"' % b64encode(row.astype("<f4", copy=False).tobytes())
        else:
            value = orjson.dumps(row.copy(), option=orjson.OPT_SERIALIZE_NUMPY)
        entries.append(b'{"object":"embedding","index":%d,"embedding":%s}' % (index, value))
        formatted += row.nbytes
        if formatted > _BYTES_AT_A_TIME:
            formatted = 0
            await asyncio.sleep(0)
    return b'{"object":"list","data":[%s],"model":%s,"usage":%s}' % (
        b",".join(entries),
        orjson.dumps(model),
        orjson.dumps(usage_of(tokens)),
    )


def rerank_body(
    scores: Sequence[float],
    texts: Sequence[str],
    *,
    request_id: str,
    model: str,
    tokens: int,
    top_n: int | None,
    return_documents: bool,
) -> dict[str, Any]:
    """Return the answer with documents in the order of their scores."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": scores[index]} for index in order[: top_n or None]
    ]
    if return_documents:
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    return {
        "id": f"rerank-{request_id}",
        "model": model,
        "results": results,
        "usage": usage_of(tokens),
    }


def score_body(
    scores: Sequence[float], *, request_id: str, model: str, tokens: int
) -> dict[str, Any]:
    """Return the answer with the scores of pairs, in their order."""
    return {
        "id": f"score-{request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(scores)
        ],
        "usage": usage_of(tokens),
    }
