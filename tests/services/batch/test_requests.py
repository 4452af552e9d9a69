"""Input files of batches."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from services.batch.requests import BatchFileError, BatchRequest, check_requests, open_requests


def line(**changes: Any) -> str:
    record = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"n": 1}}
    return json.dumps({**record, **changes})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "in.jsonl"


def check(path: Path) -> set[str]:
    with open_requests(path) as requests:
        return check_requests(requests)


def read(path: Path) -> list[BatchRequest]:
    with open_requests(path) as requests:
        return list(requests)


def test_requests_are_read_in_order(file: Path) -> None:
    file.write_text(f"{line()}\n\n{line(custom_id='b')}")
    first, second = read(file)
    assert (first.custom_id, first.path, json.loads(first.body)) == (
        "a",
        "/v1/completions",
        {"n": 1},
    )
    assert second.custom_id == "b"
    assert check(file) == {"a", "b"}


def test_pipe_is_read_several_times(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = f"{line()}\n{line(custom_id='b')}\n"
    writer = threading.Thread(target=pipe.write_text, args=(text,), daemon=True)
    writer.start()
    with open_requests(pipe) as requests:
        assert check_requests(requests) == {"a", "b"}
        assert [request.custom_id for request in requests] == ["a", "b"]
    writer.join()


@pytest.mark.parametrize(
    "body",
    [
        '{"seed":18446744073709551616,"n":-9223372036854775809}',
        '{"x":1.5,"y":1e-07,"z":true,"t":null}',
        '{"text":"ö\\n\\\\🙂"}',
        '{"x":' + "[" * 250 + "]" * 250 + "}",
    ],
    ids=["integers", "other", "text", "levels"],
)
def test_bodies_keep_their_values(file: Path, body: str) -> None:
    file.write_text(line(body=0).replace('"body": 0', f'"body": {body}'))
    (request,) = read(file)
    assert json.loads(request.body) == json.loads(body)


@pytest.mark.parametrize("levels", [254, 1000, 100_000])
def test_body_with_too_many_levels_is_refused(file: Path, levels: int) -> None:
    body = '{"x":' + "[" * levels + "]" * levels + "}"
    file.write_text(f"{line()}\n" + line(body=0).replace('"body": 0', f'"body": {body}'))
    with pytest.raises(BatchFileError, match=r"in.jsonl:2: invalid JSON"):
        check(file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "GET"}, "in.jsonl:2: method"),
        ({"url": "http://other/v1/completions"}, "in.jsonl:2: url"),
        ({"url": "/v1/../metrics"}, "in.jsonl:2: url"),
        ({"custom_id": ""}, "in.jsonl:2: custom_id"),
        ({"custom_id": 5}, "in.jsonl:2: custom_id"),
        ({"body": []}, "in.jsonl:2: body"),
        ({"body": {"stream": True}}, "in.jsonl:2: body.stream"),
        ({"other": 1}, "in.jsonl:2: other"),
        ({"custom_id": "a"}, "several requests have custom_id 'a'"),
    ],
)
def test_invalid_line_is_named(file: Path, changes: dict[str, Any], message: str) -> None:
    file.write_text(f"{line()}\n{line(**{'custom_id': 'b', **changes})}\n")
    with pytest.raises(BatchFileError) as caught:
        check(file)
    assert message in str(caught.value)


@pytest.mark.parametrize("content", ["", "\n\n", '{"custom_id"', "[]", "\xff"])
def test_file_without_requests_is_refused(file: Path, content: str) -> None:
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(BatchFileError):
        check(file)
