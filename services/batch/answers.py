"""The output of a batch: an answer in each line, in the format of OpenAI's Batch API."""

import fcntl
import os
import stat
import uuid
from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import orjson

from services.batch.requests import BatchFileError
from services.common.file_errors import naming

TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""Statuses of failures that may not occur again."""

_BEGINNING = b'{"id":"batch_req_'
"""Beginning of each line. A partial line without it is refused: it may be of another file."""


@dataclass(frozen=True)
class Answer:
    """The answer to a request of a batch: a response of the server, or an error without one.

    Attributes:
        status: HTTP status, or None without a response.
        request_id: the server's id of the request.
        body: JSON of the response, without line breaks.
        error: code and message if there is no response.
    """

    custom_id: str
    status: int | None = None
    request_id: str | None = None
    body: bytes | None = None
    error: tuple[str, str] | None = None

    @property
    def is_success(self) -> bool:
        """Whether the server answered the request."""
        return self.status is not None and 200 <= self.status < 300

    def line(self) -> bytes:
        """Return the line of the answer, which ends with a newline."""
        response = None
        if self.status is not None:
            response = {
                "status_code": self.status,
                "request_id": self.request_id,
                "body": self.body and orjson.Fragment(self.body),
            }
        error = self.error and {"code": self.error[0], "message": self.error[1]}
        record = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": self.custom_id,
            "response": response,
            "error": error,
        }
        return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


class AnswerFile:
    """A file of answers, which may have those of an earlier run.

    Attributes:
        answered: ``custom_id`` of the requests that the file answers.
        failed: how many of them have an error.
    """

    def __init__(self, file: IO[bytes], answered: set[str], failed: int) -> None:
        self._file = file
        self.answered = answered
        self.failed = failed

    def add(self, answer: Answer) -> None:
        """Append an answer."""
        self._file.write(answer.line())
        self._file.flush()
        self.answered.add(answer.custom_id)
        self.failed += not answer.is_success


@contextmanager
def open_answers(path: Path, requested: Set[str]) -> Iterator[AnswerFile]:
    """Open a file of answers for appending; it is created if needed.

    A partial last line, and failures that may not occur again, are removed, so that these requests
    are sent again.

    Args:
        requested: ``custom_id`` of all requests of the batch.

    Raises:
        BatchFileError: if another process writes the file, or if it has other content.
    """
    with naming(path), ExitStack() as stack:  # closing a file may write to it
        file: IO[bytes] = stack.enter_context(path.open("a+b"))
        _lock(file, path)
        answered: set[str] = set()
        kept: list[tuple[int, int]] = []  # offset and length of lines
        failed = end = 0
        file.seek(0)
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") and line[: len(_BEGINNING)] == _BEGINNING[: len(line)]:
                file.truncate(end)
                break
            custom_id, status = _parse(line, f"{path}:{number}")
            if custom_id not in requested:
                raise BatchFileError(f"{path}:{number}: the input has no request {custom_id!r}")
            if status is not None and status not in TRANSIENT:
                answered.add(custom_id)
                failed += not 200 <= status < 300
                kept.append((end, len(line)))
            end += len(line)
        if sum(length for _, length in kept) < end:
            file = stack.enter_context(_rewrite(file, path, kept))
        yield AnswerFile(file, answered, failed)


def _lock(file: IO[bytes], path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BatchFileError(f"{path}: another process writes this file") from None


def _parse(line: bytes, place: str) -> tuple[str, int | None]:
    """Return the ``custom_id`` of an answer, and its HTTP status."""
    try:
        record = orjson.loads(line)
        response = record["response"]
        return str(record["custom_id"]), None if response is None else int(response["status_code"])
    except (KeyError, TypeError, ValueError):
        raise BatchFileError(f"{place}: not an answer of a batch") from None


def _rewrite(file: IO[bytes], path: Path, kept: list[tuple[int, int]]) -> IO[bytes]:
    """Replace a file by one with some of its lines, and return that one, locked.

    The file is complete at any time, and always locked. It keeps its mode; a symbolic link keeps
    its target.
    """
    target = path.resolve()
    draft_path = target.with_name(f".{target.name}.draft")
    draft_path.unlink(missing_ok=True)  # of a run that was killed
    draft = os.fdopen(os.open(draft_path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "w+b")
    os.fchmod(draft.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode))
    _lock(draft, path)
    for start, length in kept:
        file.seek(start)
        draft.write(file.read(length))
    draft.flush()
    os.fsync(draft.fileno())
    draft_path.replace(target)
    return draft
