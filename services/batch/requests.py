"""The input of a batch: a request in each line, in the format of OpenAI's Batch API."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.common.errors import SettingsError
from services.common.file_errors import naming

MAX_LINE_BYTES = 64 << 20


class BatchFileError(SettingsError):
    """A file of a batch is invalid, or has changed."""


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


class RequestFile:
    """The requests of a file. Each iteration reads it from the beginning.

    Attributes:
        path: name of the file in messages.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file = file
        self.path = path

    @property
    def version(self) -> tuple[int, int]:
        """Size and time of the last change, by which a change of the file is found."""
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns

    def __iter__(self) -> Iterator[BatchRequest]:
        """Yield the requests. Empty lines are skipped.

        Raises:
            BatchFileError: if a line is invalid; the message has its number.
        """
        number = 0
        with naming(self.path):
            self._file.seek(0)
            while line := self._file.readline(MAX_LINE_BYTES + 1):
                number += 1
                place = f"{self.path}:{number}"
                if len(line) > MAX_LINE_BYTES:
                    raise BatchFileError(f"{place}: more than {MAX_LINE_BYTES} bytes")
                if line.strip():
                    yield _parse(line, place)


@contextmanager
def open_requests(path: Path) -> Iterator[RequestFile]:
    """Open a file of requests. A pipe is first copied to a temporary file, until its end."""
    with path.open("rb") as file:
        if file.seekable():
            yield RequestFile(file, path)
            return
        with _copied(file) as copy:
            yield RequestFile(copy, path)


def _copied(file: IO[bytes]) -> IO[bytes]:
    """Return a temporary file with the content of another one."""
    with naming(Path(tempfile.gettempdir())), ExitStack() as stack:
        copy = stack.enter_context(tempfile.TemporaryFile())
        shutil.copyfileobj(file, copy)
        copy.flush()
        stack.pop_all()
    return copy


def check_requests(requests: RequestFile) -> set[str]:
    """Return the ``custom_id`` of all requests of a file.

    Raises:
        BatchFileError: if a line is invalid, or two have the same ``custom_id``.
    """
    found: set[str] = set()
    for request in requests:
        if request.custom_id in found:
            raise BatchFileError(
                f"{requests.path}: several requests have custom_id {request.custom_id!r}"
            )
        found.add(request.custom_id)
    if not found:
        raise BatchFileError(f"{requests.path}: there are no requests")
    return found


def load_json(text: bytes) -> Any:
    """Return the value of JSON with at most 254 levels, which is the limit of orjson's encoder.

    Raises:
        ValueError: if the text is not such JSON.
    """
    value = orjson.loads(text)
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        raise ValueError("more than 254 levels") from None
    return value


def _parse(line: bytes, place: str) -> BatchRequest:
    try:
        parsed = _Line.model_validate(load_json(line))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"])) or "the line"
        raise BatchFileError(f"{place}: {field}: {first['msg']}") from None
    except ValueError as error:
        raise BatchFileError(f"{place}: invalid JSON: {error}") from None
    if parsed.body.get("stream"):
        raise BatchFileError(f"{place}: body.stream must be false: answers of a batch are whole")
    body = json.loads(line)["body"]  # orjson rounds integers of more than 64 bits
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return BatchRequest(parsed.custom_id, parsed.url, text.encode())
