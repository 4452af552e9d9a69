"""`headrace size`, with packaged figures and with those of load generator runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from loadgen.files import write_run
from loadgen.measures import Window
from loadgen.record import Failure, Record
from loadgen.summary import Summary
from services.cli import app
from services.common.errors import SettingsError
from services.sizing.runs import figures_of_runs

LOAD = {
    "--rate": "20",
    "--input": "lognormal:1000,0.6",
    "--output": "fixed:128",
    "--ttft": "0.4",
    "--tpot": "0.008",
    "--link": "1900",
}


FLAGS = [part for pair in LOAD.items() for part in pair]


def run(*arguments: str, **changes: str) -> Result:
    load = LOAD | {f"--{name}": value for name, value in changes.items()}
    given = [part for pair in load.items() for part in pair]
    return CliRunner().invoke(app, ["size", *given, *arguments])


def write_loop(
    folder: Path,
    concurrency: int | None,
    input_tokens: int,
    output_tokens: int,
    first_s: float,
    token_s: float,
    **changes: Any,
) -> Path:
    """Write a run of ten requests of equal lengths and times, as the load generator does."""
    records = []
    for number in range(10):
        times = [number + first_s + at * token_s for at in range(output_tokens)]
        records.append(
            Record(
                *(number, float(number), input_tokens, output_tokens, float(number), times),
                counts=[1] * output_tokens,
                ended=times[-1],
            )
        )
    failed = Record(10, 10.0, 9, 9, 10.0, ended=10.0, failure=Failure.REJECTED)
    summary = Summary.of([*records, failed], Window(0, 11), concurrency=concurrency).as_json()
    manifest = {"model": "tiny", "started": "2026-11-23T10:00:00+00:00"}
    write_run(folder, [*records, failed], summary | {"manifest": manifest} | changes)
    return folder


def test_prints_workers_limits_and_the_source_of_the_figures() -> None:
    shown = " ".join(run().output.split())
    assert "figures: Llama-3-8B, dense, bf16, on one H200 per worker" in shown
    assert "prefill 1 utilization" in shown
    assert "decode 1 tpot" in shown
    assert "KV transfers, uncompressed: 20.96 Gbit/s in total, 20.96 per prefill worker" in shown
    assert "links: 1,900 Gbit/s per worker, as given; the KV of a prompt takes 0.552 ms" in shown
    assert "note:" not in shown


def test_link_is_asked_for_and_decides_the_number_of_workers() -> None:
    """100 requests/s of 1,000 tokens of 131,072 bytes: 105 Gbit/s, and 75 % of 4.8 are 3.6."""
    asked = CliRunner().invoke(app, ["size", *FLAGS[:-2]])
    assert asked.exit_code == 2
    assert asked.stdout == ""
    assert "--link is missing: prompts of this load have 21 Gbit/s of KV" in asked.stderr
    assert "1,900 over NVLink, 4.8 over TCP, as measured" in asked.stderr
    assert asked.stderr.count("\n") == 1
    slow, fast = (
        json.loads(run("--json", rate="100", link=link).stdout) for link in ("4.8", "1900")
    )
    assert (slow["prefill_workers"], slow["decode_workers"]) == (30, 30)
    assert slow["expected"]["decode"]["limit"] == "link"
    assert (fast["prefill_workers"], fast["decode_workers"]) == (3, 2)
    unlimited = run("--json", rate="100", link="unlimited")
    assert json.loads(unlimited.stdout)["load"]["link_bits_per_s"] == "unlimited"
    assert "links: unlimited, as given" in run(link="unlimited").stdout
    assert "wait 0 ms on average" in " ".join(run(rate="100", link="4.8").stdout.split())


def test_compressed_kv_is_slower_than_dense_at_short_contexts() -> None:
    """runtime/kv/BENCHMARKS.md: one sequence of 2,048 tokens takes 3.66 ms, and 4.11 with fp8."""
    few = {"rate": "0.2", "input": "fixed:2048", "output": "fixed:32", "tpot": "0.004"}
    assert run(**few).exit_code == 0
    refused = run(**few | {"kv-format": "fp8"})
    assert refused.exit_code == 2
    assert "takes 0.00423 s on an idle worker with KV format fp8" in refused.stderr


def test_prompts_of_32000_tokens_take_the_measured_time() -> None:
    """1,201 ms, one prefill and one decode worker: tests/figures/serving_h100.json."""
    result = run("--json", rate="0.02", input="fixed:32000", ttft="3", tpot="0.02")
    ttft_s = json.loads(result.stdout)["expected"]["prefill"]["ttft_s"]
    assert ttft_s == pytest.approx(1.201, rel=0.1)


def test_prints_json_with_everything_that_the_result_depends_on() -> None:
    document = json.loads(run("--json", "--spare", "1", rate="100").stdout)
    assert (document["prefill_workers"], document["decode_workers"]) == (4, 3)
    assert document["expected"]["prefill"]["workers"] == 3
    assert document["load"]["prompt"] == LOAD["--input"]
    assert document["figures"]["sources"].keys() >= {"prefill", "decode", "kv"}


def test_extrapolated_prompts_are_noted() -> None:
    shown = " ".join(run(input="fixed:40000", ttft="5", rate="0.1").output.split())
    assert "note: prompts of up to 40,000 tokens are extrapolated from 32,000" in shown


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": "normal:1,2"}, "'normal:1,2' is not a distribution of lengths"),
        ({"ttft": "0.001"}, "on an idle worker"),
        ({"figures": "unknown"}, "cannot read figures unknown: No such file"),
        ({"kv-format": "int9"}, "no times of an output token for KV format 'int9'"),
        ({"figures": "cpu-smollm2-135m", "kv-format": "int4"}, "KV format 'int4', only for: dense"),
        ({"link": "fast"}, "--link must be a number of Gbit/s or `unlimited`, not 'fast'"),
        ({"link": "0"}, "--link must be a number"),
        ({"link": "nan"}, "--link must be a number"),
    ],
)
def test_errors_are_one_line(changes: dict[str, str], message: str) -> None:
    result = run(**changes)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_figures_of_closed_loops(tmp_path: Path) -> None:
    """In run c, each of 8 requests decodes for 1.9 of its 2.0 s: 8 * 1.9 / 2.0 = 7.6 sequences."""
    folders = [
        write_loop(tmp_path / "a", 1, 1000, 21, 0.5, 0.01),
        write_loop(tmp_path / "b", 1, 500, 21, 0.3, 0.01),
        write_loop(tmp_path / "c", 8, 200, 20, 0.1, 0.1),
    ]
    found = figures_of_runs(folders, "fp8")
    assert [point.tokens for point in found.prefill] == [500, 1000]
    assert [point.first_ms for point in found.prefill] == [pytest.approx(300), pytest.approx(500)]
    points = found.points("fp8")
    assert [(point.sequences, point.context) for point in points] == [(1, 510.5), (7.6, 210)]
    assert [point.token_ms for point in points] == [pytest.approx(10), pytest.approx(100)]
    assert found.name == "tiny"
    assert "2026-11-23" in found.sources["runs"]
    flags = [part for folder in folders for part in ("--figures", str(folder))]
    measured = {"rate": "1", "ttft": "5", "tpot": "0.1", "input": "fixed:1000"}
    result = run(*flags, "--json", "--kv-format", "fp8", link="unlimited", **measured)
    document = json.loads(result.stdout)
    assert document["gateways"] is None
    # 0.4 ms per token and 100 ms: 1,000 tokens occupy the worker for 400 ms.
    assert document["expected"]["prefill"]["utilization"] == pytest.approx(0.4)


def test_figures_that_were_printed_can_be_read_again(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    first = json.loads(run("--json").stdout)
    file.write_text(json.dumps(first["figures"]))
    assert json.loads(run("--json", "--figures", str(file)).stdout) == first


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        ((None, 100, 9, 0.1, 0.1), {}, "not a closed loop"),
        ((1, 100, 9, 0.1, 0.1), {"invalid": "late"}, "is invalid: late"),
        ((1, 100, 1, 0.1, 0.1), {}, "answers of several tokens"),
        ((4, 100, 9, 0.1, 0.1), {}, "one request in flight"),
        ((1, 100, 9, 0.1, 0.1), {"measures": {}}, "holds no run"),
    ],
)
def test_other_runs_are_refused(
    arguments: Any, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_loop(tmp_path / "run", *arguments, **changes)
    with pytest.raises(SettingsError, match=message):
        figures_of_runs([folder], "dense")


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    assert "holds no run of headrace-loadgen" in run("--figures", str(tmp_path)).stderr
    mixed = run("--figures", str(tmp_path), "--figures", "h200-llama-3-8b")
    assert "must all be folders" in mixed.stderr
