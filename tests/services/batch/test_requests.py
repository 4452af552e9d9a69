"""Input files of batches."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.batch.requests import BatchFileError, check_requests, read_requests


def line(**changes: Any) -> str:
    record = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"n": 1}}
    return json.dumps({**record, **changes})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "in.jsonl"


def test_requests_are_read_in_order(file: Path) -> None:
    file.write_text(f"{line()}\n\n{line(custom_id='b')}")
    first, second = read_requests(file)
    assert (first.custom_id, first.path, json.loads(first.body)) == (
        "a",
        "/v1/completions",
        {"n": 1},
    )
    assert second.custom_id == "b"
    assert check_requests(file) == {"a", "b"}


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
        check_requests(file)
    assert message in str(caught.value)


@pytest.mark.parametrize("content", ["", "\n\n", '{"custom_id"', "[]", "\xff"])
def test_file_without_requests_is_refused(file: Path, content: str) -> None:
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(BatchFileError):
        check_requests(file)
