"""Runs and sweeps of closed loops against the synthetic server."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from loadgen.closed_loop import FAILURE_PERIOD_S
from loadgen.files import read_run, read_sweep
from tests.loadgen.command import ANY_LAG, loadgen
from tests.loadgen.page_content import Content, number
from tests.loadgen.synthetic import Behaviour, Outcome, SyntheticServer, Truth, serving

LENGTHS = ("--input", "fixed:5", "--output", "fixed:8", *ANY_LAG)


def run(server: SyntheticServer, *flags: str | Path) -> tuple[int, str]:
    return loadgen("run", server.url + "/v1", *LENGTHS, *flags)


def most_in_flight(truths: list[Truth]) -> int:
    """Return the maximum number of requests that the server had read and not answered."""
    changes = [(truth.read, 1) for truth in truths]
    changes += [(truth.ended, -1) for truth in truths if truth.ended is not None]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("rpc", [False, True])
def test_concurrency_is_kept_and_reported(tmp_path: Path, rpc: bool) -> None:
    with serving(Behaviour(ttft_s=0.05, itl_s=0.02)) as server:
        target = f"grpc://{server.grpc_target}" if rpc else server.url + "/v1"
        code, output = loadgen(
            "run", target, *LENGTHS, "--tokenizer-url", server.url, "--concurrency", "4",
            "--duration", "3", "--warm-up", "0.5", "--out", tmp_path,
        )  # fmt: skip
        truths = server.log()
    assert code == 0, output
    assert "closed loop of 4" in output
    assert most_in_flight(truths) == 4
    records, summary = read_run(tmp_path)
    assert len(records) == len(truths)
    assert all(record.succeeded for record in records)
    assert max(record.due for record in records) < 3
    measured = [record for record in records if record.due >= 0.5]
    assert summary["concurrency"] == 4
    assert summary["window"] == {"begin": 0.5, "end": 3.0}
    assert summary["in_flight"]["most"] == 4
    jct = summary["measures"]["e2e"]
    assert jct["count"] == summary["outcomes"]["total"] == len(measured)
    assert jct["mean"] == pytest.approx(mean([r.ended - r.due for r in measured if r.ended]))
    ended = [r for r in records if r.ended is not None and 0.5 <= r.ended < 3.0]
    assert summary["throughput"]["requests"] == pytest.approx(len(ended) / 2.5)
    content = Content((tmp_path / "report.html").read_text())
    assert number(content.tile("JCT, mean")[0].split()[0]) == pytest.approx(
        1e3 * jct["mean"], rel=6e-3
    )
    assert "Closed loop of 4" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_requests_are_those_of_the_open_loop(tmp_path: Path) -> None:
    """A concurrency of 1 sends the requests in the order of the open schedule."""
    flags = ("--input", "uniform:3,40", "--output", "uniform:2,9", "--requests", "90")
    more = ("--seed", "3", "--cancel", "0.3")
    received = []
    for name, load in (("open", ("--rate", "200")), ("closed", ("--concurrency", "1"))):
        with serving(Behaviour()) as server:
            target = server.url + "/v1"
            code, output = loadgen(
                "run", target, *flags, *more, *load, "--most-lag", "60", "--out", tmp_path / name
            )
            received.append(server.log())
        assert code == 0, output
    opened, closed = (read_run(tmp_path / name)[0] for name in ("open", "closed"))
    wanted = [(record.wanted_tokens, record.cancelled) for record in opened]
    assert [(record.wanted_tokens, record.cancelled) for record in closed] == wanted
    assert [truth.max_tokens for truth in received[1]] == [tokens for tokens, _ in wanted]
    shapes = [sorted((t.prompt_tokens, t.max_tokens) for t in truths) for truths in received]
    assert shapes[0] == shapes[1]


@pytest.mark.slow
def test_server_that_refuses_at_once_is_not_flooded(tmp_path: Path) -> None:
    with serving(Behaviour(outcomes=(Outcome.STATUS_429,))) as server:
        code, output = run(server, "--concurrency", "3", "--duration", "1.5", "--out", tmp_path)
        received = len(server.log())
    assert code == 0, output
    assert 3 <= received <= 3 * (1 + int(1.5 / FAILURE_PERIOD_S))
    records, summary = read_run(tmp_path)
    assert summary["outcomes"]["failed"] == {"rejected": received}
    for record in records[3:]:
        assert record.due >= FAILURE_PERIOD_S


@pytest.mark.slow
def test_interrupted_run_cancels_requests_and_writes_a_report(tmp_path: Path) -> None:
    with serving(Behaviour(ttft_s=0.05, itl_s=0.1)) as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "loadgen", "run", server.url + "/v1", *LENGTHS,
             "--concurrency", "3", "--duration", "600", "--out", str(tmp_path)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while len(server.log()) < 7 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    records, summary = read_run(tmp_path)
    assert summary["stopped"] is True
    assert summary["outcomes"]["succeeded"] >= 4
    assert sum(record.ended is None for record in records) == 3
    # The window ends with the run, and not after the 600 s that were planned.
    assert records[-1].due < summary["window"]["end"] < 599


@pytest.mark.slow
def test_finite_workload_ends_the_measured_part(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    line = orjson.dumps({"prompt": "w1 w2", "max_tokens": 3}, option=orjson.OPT_APPEND_NEWLINE)
    file.write_bytes(25 * line)
    with serving(Behaviour(ttft_s=0.01)) as server:
        target = (server.url + "/v1", "--most-lag", "60", "--file", file, "--duration", "3600")
        code, output = loadgen("run", *target, "--concurrency", "2", "--out", tmp_path / "run")
        assert code == 0, output
        code, few = loadgen("run", *target, "--concurrency", "25")
    assert code == 2
    assert "a closed loop of 25 needs more than 25 requests" in few
    records, summary = read_run(tmp_path / "run")
    assert len(records) == 25
    assert summary["outcomes"]["total"] == 25
    assert summary["window"]["end"] == pytest.approx(records[-1].due, abs=1e-6)


def document(folder: Path) -> dict[str, Any]:
    return dict(orjson.loads((folder / "comparison.json").read_bytes()))


@pytest.mark.long
def test_sweeps_of_concurrencies_are_compared(tmp_path: Path) -> None:
    """The servers have two slots."""
    folders = [tmp_path / "slow", tmp_path / "fast"]
    for folder, itl_s in zip(folders, (0.02, 0.005), strict=True):
        with serving(Behaviour(ttft_s=itl_s, itl_s=itl_s, concurrency=2)) as server:
            code, output = loadgen(
                "sweep", server.url + "/v1", *LENGTHS, "--concurrency", "4,1", "--seeds", "1",
                "--duration", "1", "--out", folder,
            )  # fmt: skip
            assert code == 0, output
            assert "knee" in output.lower()
            assert "4 requests in flight, seed 0" in output
    sweep = read_sweep(folders[0])
    assert [point["concurrency"] for point in sweep["points"]] == [1, 4]
    assert [point["folders"] for point in sweep["points"]] == [
        ["concurrency-1/seed-0"], ["concurrency-4/seed-0"],
    ]  # fmt: skip
    assert sweep["knee"]["concurrency"] in (1, 4)
    for point in sweep["points"]:
        assert not point["saturated"]
        summary = read_run(folders[0] / point["folders"][0])[1]
        assert summary["concurrency"] == summary["in_flight"]["most"] == point["concurrency"]
        assert point["figures"]["e2e:mean"]["mean"] == summary["measures"]["e2e"]["mean"]
    content = Content((folders[0] / "report.html").read_text())
    assert content.row("4")
    assert (folders[0] / "sweep.csv").read_text().startswith("concurrency,runs")
    code, output = loadgen("compare", *folders, "--out", tmp_path / "both")
    assert code == 0, output
    rows = {(row["concurrency"], row["figure"]): row for row in document(tmp_path / "both")["rows"]}
    assert rows[4, "e2e:mean"]["ratio"]["mean"] < 1
    assert "Against the concurrency" in (tmp_path / "both/report.html").read_text()
    with serving(Behaviour()) as server:
        code, output = run(server, "--rate", "50", "--requests", "9", "--out", tmp_path / "open")
    assert code == 0, output
    code, output = loadgen("compare", tmp_path / "open", folders[0] / "concurrency-1/seed-0")
    assert code == 2
    assert "only one of them is a closed loop" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "flags", "why"),
    [
        ("run", ("--concurrency", "2", "--rate", "4"), "cannot be combined with --rate"),
        ("run", ("--concurrency", "2", "--arrivals", "poisson"), "combined with --arrivals"),
        ("run", ("--concurrency", "0"), "--concurrency must be at least 1"),
        ("run", ("--concurrency", "2,4"), "as an integer"),
        ("run", ("--concurrency", "9"), "a closed loop of 9 needs more than 9 requests"),
        ("sweep", ("--concurrency", "2,4", "--rates", "4"), "cannot be combined with --rates"),
        ("sweep", ("--concurrency", "2,4", "--rate", "4"), "cannot be combined with --rate"),
        ("sweep", ("--concurrency", "2,x"), "expected concurrencies such as 1,4,16"),
        ("sweep", (), "--rates, an initial --rate or --concurrency"),
    ],
)
def test_unusable_options_are_explained(
    tmp_path: Path, command: str, flags: tuple[str, ...], why: str
) -> None:
    with serving(Behaviour()) as server:
        out = () if command == "run" else ("--out", str(tmp_path))
        code, output = loadgen(
            command, server.url + "/v1", *LENGTHS, "--requests", "9", *flags, *out
        )
        assert not server.log()
    assert code == 2
    assert why in output.replace("│ ", "").replace("│", "")
