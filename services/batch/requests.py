"""The input of a batch: a request in each line, in the format of OpenAI's Batch API."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.common.errors import SettingsError

MAX_LINE_BYTES = 64 << 20


class BatchFileError(SettingsError):
    """A file of a batch has an invalid line."""


@dataclass(frozen=True)
class BatchRequest:
    """A request of a batch.

    Attributes:
        custom_id: the client's name of the request, unique in the file.
        path: path of the URL, such as ``/v1/chat/completions``.
        body: JSON of the request.
    """

    custom_id: str
    path: str
    body: bytes


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")

    custom_id: Annotated[str, Field(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: Annotated[str, Field(pattern=r"^/v1/[a-z0-9_/-]+$")]
    body: dict[str, Any]


def read_requests(file: Path) -> Iterator[BatchRequest]:
    """Yield the requests of a file. Empty lines are skipped.

    Raises:
        BatchFileError: if a line is invalid; the message has its number.
    """
    with file.open("rb") as lines:
        number = 0
        while line := lines.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise BatchFileError(f"{file}:{number}: more than {MAX_LINE_BYTES} bytes")
            if line.strip():
                yield _parse(line, f"{file}:{number}")


def check_requests(file: Path) -> set[str]:
    """Return the ``custom_id`` of all requests of a file.

    Raises:
        BatchFileError: if a line is invalid, or two have the same ``custom_id``.
    """
    found: set[str] = set()
    for request in read_requests(file):
        if request.custom_id in found:
            raise BatchFileError(f"{file}: several requests have custom_id {request.custom_id!r}")
        found.add(request.custom_id)
    if not found:
        raise BatchFileError(f"{file}: there are no requests")
    return found


def _parse(line: bytes, place: str) -> BatchRequest:
    try:
        parsed = _Line.model_validate(orjson.loads(line))
    except orjson.JSONDecodeError as error:
        raise BatchFileError(f"{place}: not JSON in UTF-8: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"])) or "the line"
        raise BatchFileError(f"{place}: {field}: {first['msg']}") from None
    if parsed.body.get("stream"):
        raise BatchFileError(f"{place}: body.stream must be false: answers of a batch are whole")
    return BatchRequest(parsed.custom_id, parsed.url, orjson.dumps(parsed.body))
