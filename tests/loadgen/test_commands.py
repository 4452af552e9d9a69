"""Commands other than `run` against the synthetic server."""

from pathlib import Path

import orjson
import pytest

from tests.loadgen.command import ANY_LAG, loadgen
from tests.loadgen.synthetic import Behaviour, Outcome, closed_port, serving

LENGTHS = ("--input", "fixed:5", "--output", "fixed:8", *ANY_LAG)


@pytest.mark.long
def test_two_sweeps_are_compared(tmp_path: Path) -> None:
    """The servers have one slot and complete ten and twenty requests per second."""
    folders = []
    for name, itl_s in (("slow", 0.0125), ("fast", 0.00625)):
        with serving(Behaviour(ttft_s=itl_s, itl_s=itl_s, concurrency=1)) as server:
            code, output = loadgen(
                "sweep", server.url + "/v1", *LENGTHS, "--arrivals", "constant", "--rates", "4,16",
                "--seeds", "1", "--duration", "1.5", "--out", tmp_path / name,
            )  # fmt: skip
        assert code == 0, output
        assert "knee" in output.lower()
        folders.append(tmp_path / name)
    sweeps = [orjson.loads((folder / "sweep.json").read_bytes()) for folder in folders]
    saturated = [{p["rate"]: p["saturated"] for p in sweep["points"]} for sweep in sweeps]
    assert saturated[0][16]  # on a busy machine, lower rates may be saturated too
    code, output = loadgen("compare", *folders, "--names", "one,two", "--out", tmp_path / "both")
    assert code == 0, output
    assert "two / one" in output
    comparison = orjson.loads((tmp_path / "both/comparison.json").read_bytes())
    rows = {(row["rate"], row["figure"]): row for row in comparison["rows"]}
    assert rows[4, "itl:p50"]["ratio"]["mean"] < 1
    assert rows[16, "e2e:p50"]["ratio"]["mean"] < 1
    for page in (*(folder / "report.html" for folder in folders), tmp_path / "both/report.html"):
        assert page.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.slow
def test_report_command_recreates_the_report(tmp_path: Path) -> None:
    with serving(Behaviour(ttft_s=0.01)) as server:
        code, output = loadgen(
            "run", server.url + "/v1", *LENGTHS, "--rate", "20", "--requests", "9",
            "--out", tmp_path,
        )  # fmt: skip
    assert code == 0, output
    page = (tmp_path / "report.html").read_text()
    (tmp_path / "report.html").unlink()
    assert loadgen("report", tmp_path)[0] == 0
    assert (tmp_path / "report.html").read_text() == page
    assert loadgen("report", tmp_path / "nothing")[0] == 2


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_unusable_output_folder_is_reported_before_anything_is_sent(
    tmp_path: Path, command: str
) -> None:
    file = tmp_path / "file"
    file.touch()
    with serving(Behaviour()) as server:
        flags = (*LENGTHS, "--rate", "50", "--requests", "4", "--out")
        code, output = loadgen(command, server.url + "/v1", *flags, file / "run")
        assert not server.log()
    assert code == 2
    assert output == f"headrace-loadgen: {file / 'run'} cannot be written: Not a directory"


@pytest.mark.slow
def test_files_that_cannot_be_written_are_reported_in_one_line(tmp_path: Path) -> None:
    folder, full = tmp_path / "run", tmp_path / "full"
    full.mkdir()
    (full / "requests.jsonl").symlink_to("/dev/full")
    with serving(Behaviour()) as server:
        flags = (*LENGTHS, "--rate", "50", "--requests", "4", "--out")
        assert loadgen("run", server.url + "/v1", *flags, folder)[0] == 0
        code, output = loadgen("run", server.url + "/v1", *flags, full)
    assert code == 2
    assert "4 answered" in output, "figures are printed before files are written"
    assert output.endswith(" headrace-loadgen: No space left on device")
    file = folder / "requests.jsonl"
    for command in (("report", folder), ("compare", folder, folder)):
        code, output = loadgen(*command, "--out", file / "report.html")
        assert code == 2
        assert f"headrace-loadgen: {file}" in output


@pytest.mark.slow
def test_answers_are_checked_against_a_reference(tmp_path: Path) -> None:
    """The reference breaks off its second answer, which counts as missing."""
    flags = (*LENGTHS, "--rate", "50", "--requests", "4")
    outcomes = (Outcome.OK, Outcome.HALF_CLOSE, Outcome.OK, Outcome.OK)
    with serving(Behaviour()) as server, serving(Behaviour(outcomes=outcomes)) as other:
        against = ("--check-against", other.url + "/v1")
        code, output = loadgen("run", server.url + "/v1", *flags, *against, "--out", tmp_path)
        assert code == 0, output
        code, output = loadgen("run", server.url + "/v1", *flags, *against, "--temperature", "1")
        assert code == 2
        assert "only greedy answers" in output
    found = orjson.loads((tmp_path / "summary.json").read_bytes())["check"]
    assert (found["equal"], found["different"], found["missing"]) == (3, 0, 1)


def test_check_without_comparable_answers_fails() -> None:
    """The reference returns empty answers only."""
    nothing = Behaviour(outcomes=(Outcome.EMPTY,))
    with serving(Behaviour()) as server, serving(nothing) as other:
        code, output = loadgen(
            "run", server.url + "/v1", *LENGTHS, "--rate", "50", "--requests", "4",
            "--check-against", other.url + "/v1",
        )  # fmt: skip
    assert code == 1
    assert "0 equal" in output


def test_unreachable_reference_is_reported_before_anything_is_sent() -> None:
    with serving(Behaviour()) as server, closed_port() as closed:
        code, output = loadgen(
            "run", server.url + "/v1", *LENGTHS, "--rate", "50", "--requests", "4",
            "--check-against", closed + "/v1",
        )  # fmt: skip
        assert not server.log()
    assert code == 2
    assert f"cannot reach {closed}/v1" in output


def test_fault_without_a_local_deployment_is_refused() -> None:
    with serving(Behaviour()) as server:
        code, output = loadgen(
            "run", server.url + "/v1", *LENGTHS, "--rate", "5", "--requests", "2",
            "--fault", "kill decode at 1s",
        )  # fmt: skip
    assert code == 2
    assert "no deployment of `headrace up`" in output
