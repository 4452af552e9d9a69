"""Output files of batches, and the continuation of earlier ones."""

import json
import resource
import stat
from pathlib import Path
from typing import Any

import pytest

from services.batch.answers import Answer, open_answers
from services.batch.requests import BatchFileError

REQUESTED = {"a", "b", "c", "d"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write(file: Path, *answers: Answer) -> None:
    with open_answers(file, REQUESTED) as opened:
        for answer in answers:
            opened.add(answer)


def test_answers_have_the_format_of_openai(file: Path) -> None:
    write(file, Answer("a", 200, "r-1", b'{"id": "x"}'), Answer("b", error=("code", "why")))
    first, second = records(file)
    assert first["id"].startswith("batch_req_")
    assert first["id"] != second["id"]
    del first["id"], second["id"]
    response = {"status_code": 200, "request_id": "r-1", "body": {"id": "x"}}
    assert first == {"custom_id": "a", "response": response, "error": None}
    error = {"code": "code", "message": "why"}
    assert second == {"custom_id": "b", "response": None, "error": error}


def test_answers_and_lasting_errors_are_kept(file: Path) -> None:
    write(file, Answer("a", 200), Answer("b", 400), Answer("c", 404))
    before = file.read_bytes()
    with open_answers(file, REQUESTED) as opened:
        assert opened.answered == {"a", "b", "c"}
        assert opened.failed == 2
    assert file.read_bytes() == before


def test_failures_that_may_not_occur_again_are_removed(file: Path) -> None:
    answers = (Answer("a", 200), Answer("b", 503), Answer("c", error=("x", "y")), Answer("d", 400))
    write(file, *answers)
    with open_answers(file, REQUESTED) as opened:
        assert opened.answered == {"a", "d"}
        opened.add(Answer("b", 200))
    assert [record["custom_id"] for record in records(file)] == ["a", "d", "b"]
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_rewritten_file_keeps_its_mode_and_its_link(file: Path, mode: int) -> None:
    target = file.with_name("target.jsonl")
    target.touch()
    target.chmod(mode)
    file.symlink_to(target.name)
    file.with_name(".target.jsonl.draft").write_text("of a run that was killed")
    write(file, Answer("a", 200), Answer("b", 503))
    write(file, Answer("c", 200))
    assert file.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == mode
    assert [record["custom_id"] for record in records(target)] == ["a", "c"]
    assert {path.name for path in file.parent.iterdir()} == {file.name, target.name}


def test_failed_write_names_the_file(file: Path) -> None:
    """Closing the file tries to write again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        with pytest.raises(OSError, match="File too large") as error:
            write(file, Answer("a", 200))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.filename == str(file)


@pytest.mark.parametrize("cut", [1, 5, 20, 60])
def test_partial_last_line_is_removed(file: Path, cut: int) -> None:
    write(file, Answer("a", 200))
    whole = file.read_bytes()
    file.write_bytes(whole + Answer("b", 200).line()[:-cut])
    with open_answers(file, REQUESTED) as opened:
        assert opened.answered == {"a"}
    assert file.read_bytes() == whole


@pytest.mark.parametrize("content", ["a text", "a text\n", '{"custom_id": "a"}\n', "[]\n", "1\n"])
def test_other_file_is_not_changed(file: Path, content: str) -> None:
    file.write_text(content)
    with pytest.raises(BatchFileError, match=r"out.jsonl:1: not an answer"):
        write(file)
    assert file.read_text() == content


def test_answers_to_other_requests_are_refused(file: Path) -> None:
    write(file, Answer("a", 200))
    with (
        pytest.raises(BatchFileError, match="the input has no request 'a'"),
        open_answers(file, {"b"}),
    ):
        pass


@pytest.mark.parametrize("answers", [(), (Answer("a", 503),)])
def test_file_has_one_writer(file: Path, answers: tuple[Answer, ...]) -> None:
    write(file, *answers)
    with open_answers(file, REQUESTED), pytest.raises(BatchFileError, match="another process"):
        write(file)
