"""Cases of the serving benchmark against servers with known latencies."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.loadgen.synthetic import Behaviour, Outcome, serving
from tests.programs.serving_bench.arguments import cases_of, parser, systems_of
from tests.programs.serving_bench.bench import Bench, Limits
from tests.programs.serving_bench.cases import (
    Cached,
    Case,
    Constrained,
    HangUps,
    Interference,
    Load,
    Mixes,
    Single,
)
from tests.programs.serving_bench.cases.load import Traffic
from tests.programs.serving_bench.cases.mixes import scale_of
from tests.programs.serving_bench.cases.search import Search
from tests.programs.serving_bench.counters import histogram_quantile, mean, stages, total
from tests.programs.serving_bench.results import Results
from tests.programs.serving_bench.systems import HeadraceSystem, Layout, Peer

TTFT_S, ITL_S = 0.04, 0.01
TRAFFIC = Traffic(inputs="fixed:16", seconds=1.5, warm_up_s=0.2, ttft_s=10, tpot_s=10)
ANY_LAG = Limits(run_s=60, max_lag_s=60)


def measured(folder: Path, case: Case, *peers: Peer, limits: Limits = ANY_LAG) -> list[Any]:
    """Return the entries of the systems after one case."""
    results = Results(folder / "results.json", {"started": "", "commit": "", "gpus": []})
    Bench(results, [case], Console(quiet=True), limits=limits, warm_up=1).run(peers)
    return list(results.document["systems"])


@pytest.mark.slow
def test_single_requests_have_the_latencies_of_the_server(tmp_path: Path) -> None:
    with serving(Behaviour(ttft_s=TTFT_S, itl_s=ITL_S)) as server:
        case = Single(lengths=(16, 64), repeats=3, warm_up=1, answer=5)
        (entry,) = measured(tmp_path, case, Peer("peer", (server.url,)))
    assert [row["tokens"] for row in entry["cases"]["single"]] == [16, 64]
    for row in entry["cases"]["single"]:
        assert row["first"] >= TTFT_S
        assert row["second"] >= TTFT_S + ITL_S
        assert [len(times) for times in row["times"]] == [5, 5, 5]


@pytest.mark.slow
def test_cached_prompts_are_faster_than_cold_ones(tmp_path: Path) -> None:
    """Each token that is not cached takes a millisecond."""
    with serving(Behaviour(ttft_s=TTFT_S, itl_s=ITL_S, prefix_cache=16, prefill_s=1e-3)) as server:
        case = Cached(lengths=(200,), shared=160, repeats=3, warm_up=1, answer=3)
        (entry,) = measured(tmp_path, case, Peer("peer", (server.url,)))
        truths = [one for one in server.log() if one.prompt_tokens == 200]
    (row,) = entry["cases"]["cached"]
    assert [one.cached_tokens for one in truths] == [0] * 5 + [160] * 3
    assert (row["cold"]["cached_tokens"], row["warm"]["cached_tokens"]) == (0, 160)
    assert row["cold"]["first"] >= TTFT_S + 0.2
    assert TTFT_S + 0.04 <= row["warm"]["first"] < row["cold"]["first"]
    assert row["warm"]["second"] >= TTFT_S + 0.04 + ITL_S
    assert row["ratio"]["first"] == row["warm"]["first"] / row["cold"]["first"]


@pytest.mark.slow
def test_load_of_chats_shares_system_prompts_between_rates(tmp_path: Path) -> None:
    traffic = Traffic(
        *("fixed:16", 1.5, 0.2, 10, 10), turns="fixed:2", prefix_tokens=32, prefix_groups=1
    )
    with serving(Behaviour(ttft_s=TTFT_S, prefix_cache=16)) as server:
        case = Load(rates=(4.0, 5.0), answers=(4,), traffic=traffic)
        (entry,) = measured(tmp_path, case, Peer("peer", (server.url,)))
        cached = [one.cached_tokens for one in server.log() if one.prompt_tokens == 48]
    first, second = entry["cases"]["load"]
    assert [turn["turn"] for turn in first["summary"]["turns"]] == [1, 2]
    assert set(cached[1:]) == {32}, "first turns share the system prompt alone, at both rates"
    assert second["summary"]["turns"][1]["cached"]["fraction"] == 48 / 68
    assert second["shape"] == "chats of fixed:2 turns, 32 shared tokens"


@pytest.mark.slow
def test_refused_length_is_a_row_with_its_error(tmp_path: Path) -> None:
    # The first three requests are those of the check for readiness and of the warm-up.
    outcomes = (*(Outcome.OK,) * 3, Outcome.STATUS_400)
    with serving(Behaviour(outcomes=outcomes)) as server:
        case = Single(lengths=(16,), repeats=1, warm_up=0, answer=5)
        (entry,) = measured(tmp_path, case, Peer("peer", (server.url,)))
    assert entry["cases"]["single"] == [
        {"tokens": 16, "error": entry["cases"]["single"][0]["error"]}
    ]
    assert "400" in entry["cases"]["single"][0]["error"]


@pytest.mark.slow
def test_replicas_share_the_load_equally(tmp_path: Path) -> None:
    behaviour = Behaviour(ttft_s=TTFT_S, itl_s=ITL_S)
    with serving(behaviour) as one, serving(behaviour) as other:
        case = Load(rates=(20.0,), answers=(4,), traffic=TRAFFIC)
        (entry,) = measured(tmp_path, case, Peer("both", (one.url, other.url)))
        counts = [sum(truth.max_tokens == 4 for truth in each.log()) for each in (one, other)]
    (row,) = entry["cases"]["load"]
    assert abs(counts[0] - counts[1]) <= 1
    assert sum(counts) >= row["summary"]["outcomes"]["total"] > 0
    assert row["summary"]["goodput"]["attainment"] == 1
    assert row["summary"]["measures"]["tpot"]["p50"] >= 0.9 * ITL_S


@pytest.mark.long
def test_search_ends_runs_whose_objectives_are_out_of_reach(tmp_path: Path) -> None:
    with serving(Behaviour(ttft_s=TTFT_S, itl_s=ITL_S)) as server:
        hopeless = Traffic("fixed:16", 30.0, 0.0, ttft_s=TTFT_S / 2, tpot_s=10)
        case = Search(answers=(4,), start=40.0, traffic=hopeless)
        limits = Limits(run_s=60, total_s=8.0, max_lag_s=60)  # a few rates
        (entry,) = measured(tmp_path, case, Peer("peer", (server.url,)), limits=limits)
        sent = len(server.log())
    row = entry["cases"]["search"][0]
    assert (row["gave_up"], row["passed"], row["failed"]) == (True, None, 40)
    assert row["attainment"] == 0
    assert sent < 600, "of 1,200 requests"


@pytest.mark.long
def test_search_keeps_a_row_for_each_rate(tmp_path: Path) -> None:
    with serving(Behaviour(ttft_s=TTFT_S, itl_s=ITL_S, concurrency=1)) as server:
        traffic = Traffic("fixed:16", 2.0, 0.0, ttft_s=0.5, tpot_s=10)
        case = Search(answers=(4,), start=6.0, tolerance=0.5, traffic=traffic)
        (entry,) = measured(tmp_path, case, Peer("peer", (server.url,)))
    rows = entry["cases"]["search"]
    assert len({row["rate"] for row in rows}) == len(rows)
    assert rows[-1]["passed"] < rows[-1]["failed"] <= 1.5 * rows[-1]["passed"]


@pytest.mark.long
def test_rate_is_measured_again_after_all_clients_have_hung_up(tmp_path: Path) -> None:
    with serving(Behaviour(ttft_s=TTFT_S, itl_s=ITL_S, concurrency=1)) as server:
        traffic = Traffic("fixed:16", 2.0, 0.0, ttft_s=0.5, tpot_s=10)
        search = Search(answers=(4,), start=6.0, tolerance=1.5, attain=0.5, traffic=traffic)
        case = HangUps(search, overload=20.0, overload_s=1.0, rounds=2)
        (entry,) = measured(tmp_path, case, Peer("peer", (server.url,)))
    rows = entry["cases"]["hang-ups"]
    assert [row["round"] for row in rows] == [1, 2]
    assert all(row["passes"] for row in rows)
    assert all(row["overload"]["summary"]["outcomes"]["unfinished"] for row in rows), (
        "clients hung up"
    )


@pytest.mark.long
def test_mixes_keep_the_requests_in_flight(tmp_path: Path) -> None:
    with serving(Behaviour(ttft_s=TTFT_S, itl_s=ITL_S)) as server:
        case = Mixes(("imdb", "pg19"), tokens=40, concurrency=(1, 4), requests=3)
        (entry,) = measured(tmp_path, case, Peer("peer", (server.url,)))
    rows = entry["cases"]["mixes"]
    assert [(row["mix"], row["concurrency"]) for row in rows] == [
        *(("imdb", 1), ("imdb", 4), ("pg19", 1), ("pg19", 4))
    ]
    for row in rows:
        assert row["summary"]["outcomes"]["total"] == 3 * row["concurrency"]
        assert row["summary"]["measures"]["ttft"]["mean"] >= TTFT_S
        assert row["wire_bytes_per_token"] is None, "the server has no workers"
    assert rows[0]["scale"] == pytest.approx(40 / (315 + 37))
    assert rows[2]["summary"]["measures"]["e2e"]["mean"] >= TTFT_S + 15 * ITL_S


def test_mean_request_of_a_scaled_mix() -> None:
    assert scale_of("arxiv", 6543) == 1
    assert scale_of("pg19", 61_777 // 7) == pytest.approx(1 / 7, rel=1e-3)


@pytest.mark.parametrize(
    ("quantile", "expected"), [(0.5, 1.0), (0.25, 0.5), (0.75, 1.5), (0.95, 2.0)]
)
def test_quantiles_are_interpolated_within_buckets(quantile: float, expected: float) -> None:
    """10 of 20 are below 1, 10 between 1 and 2; the last 2 are beyond the bounds."""
    buckets = [(1.0, 10.0), (2.0, 20.0), (4.0, 20.0), (float("inf"), 20.0)]
    if quantile == 0.95:
        buckets = [(1.0, 9.0), (2.0, 18.0), (float("inf"), 20.0)]
    assert histogram_quantile(buckets, quantile) == pytest.approx(expected)


@pytest.mark.slow
def test_constrained_streams_are_compared_with_free_ones(tmp_path: Path) -> None:
    with serving(Behaviour(ttft_s=TTFT_S, itl_s=ITL_S)) as server:
        case = Constrained((3,), prompt=16, seconds=0.5)
        (entry,) = measured(tmp_path, case, Peer("peer", (server.url,)))
    (row,) = entry["cases"]["constrained"]
    assert min(row[name]["p50"] for name in ("free", "beside_one", "constrained")) > 0
    assert row["beside_one"]["count"] < row["constrained"]["count"]


@pytest.mark.slow
def test_interference_measures_the_same_streams_twice(tmp_path: Path) -> None:
    with serving(Behaviour(ttft_s=TTFT_S, itl_s=ITL_S)) as server:
        case = Interference((3,), prompt=16, answer=2000, seconds=0.5, arriving=32, concurrency=2)
        (entry,) = measured(tmp_path, case, Peer("peer", (server.url,)))
    (row,) = entry["cases"]["interference"]
    assert row["quiet"]["p50"] > 0
    assert row["busy"]["count"] > 0
    assert row["arrived"]["tokens"] == pytest.approx(32 * row["arrived"]["requests"])


@pytest.mark.slow
def test_failed_system_does_not_end_the_benchmark(tmp_path: Path) -> None:
    case = Single(lengths=(16,), repeats=1, warm_up=0, answer=5)
    with serving(Behaviour()) as server:
        entries = measured(
            tmp_path,
            case,
            Peer("fails", ("http://127.0.0.1:9",), ("exit 3",)),
            Peer("works", (server.url,)),
        )
    assert "code 3" in entries[0]["error"]
    assert "first" in entries[1]["cases"]["single"][0]


@pytest.mark.slow
def test_nothing_is_started_after_the_total_limit(tmp_path: Path) -> None:
    with serving(Behaviour()) as server:
        case = Single(lengths=(16,), repeats=1)
        assert not measured(tmp_path, case, Peer("a", (server.url,)), limits=Limits(total_s=0))


def test_metrics_are_summed_by_role_and_labels() -> None:
    metrics = {
        "gateway": {
            'headrace_request_stage_seconds_sum{stage="queue"}': 3.0,
            'headrace_request_stage_seconds_count{stage="queue"}': 2.0,
        },
        "prefill-0": {'headrace_kv_segments_total{mode="raw"}': 5.0},
        "prefill-1": {'headrace_kv_segments_total{mode="splitzip"}': 2.0},
        "decode-0": {
            'headrace_kv_transfer_bytes_total{kind="raw"}': 100.0,
            'headrace_kv_transfer_bytes_total{kind="wire"}': 50.0,
        },
    }
    assert total(metrics, "headrace_kv_segments_total") == 7
    assert total(metrics, "headrace_kv_segments_total", mode="raw") == 5
    assert mean(metrics, "headrace_request_stage_seconds", "gateway", stage="queue") == 1.5
    assert mean(metrics, "headrace_request_stage_seconds", "gateway", stage="decode") is None
    found = stages(metrics)
    assert found["queue"] == 1.5
    assert (found["kv_bytes"], found["wire_bytes"], found["segments"]) == (
        100,
        50,
        {"raw": 5, "splitzip": 2},
    )


@pytest.mark.parametrize(
    "text", ["colocated", "colocated:2", "colocated:1x2", "1+1", "2+3", "1x4+3x2"]
)
def test_layout_round_trip(text: str) -> None:
    assert str(Layout.parse(text)) == text


@pytest.mark.parametrize("text", ["", "1", "1+0", "1+1+1", "1x0+1", "colocated:x", "a+b"])
def test_invalid_layout_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected colocated"):
        Layout.parse(text)


def test_flags_of_layouts() -> None:
    assert Layout.parse("colocated").flags == ("--colocated", "--decode", "1")
    several = Layout.parse("1x4+2x2").flags
    assert " ".join(several) == "--prefill 1 --prefill-tp 4 --decode 2 --decode-tp 2"


def test_arguments_become_systems_and_cases() -> None:
    own = parser().parse_args([
        *("--shape", "tiny", "--keep", "1,0.5", "--systems", "colocated,1+1"),
        *("--codec", "raw,splitzip", "--set", "HEADRACE_DECODE_MAX_RUNNING=8"),
        *("--peer", "p=http://a:1/v1,http://b:2", "--peer-command", "p=run --x=1"),
        *("--cases", "search,single"),
    ])  # fmt: skip
    *deployments, peer = systems_of(own)
    names = [system.name for system in deployments]
    assert names == [
        *("tiny-dense colocated", "tiny-dense 1+1 raw", "tiny-dense 1+1 splitzip"),
        *("tiny-keep0.5 colocated", "tiny-keep0.5 1+1 raw", "tiny-keep0.5 1+1 splitzip"),
    ]
    assert all(isinstance(system, HeadraceSystem) for system in deployments)
    assert deployments[0].describe()["settings"] == {"HEADRACE_DECODE_MAX_RUNNING": "8"}
    assert isinstance(peer, Peer)
    assert (peer.urls, peer.commands) == (("http://a:1", "http://b:2"), ("run --x=1",))
    assert [case.name for case in cases_of(own)] == ["search", "single"]


def test_each_kv_format_is_a_system() -> None:
    own = parser().parse_args(["--kv-formats", "int4,fdc:/a/b.fdc", "--systems", "1+1"])
    systems = [system for system in systems_of(own) if isinstance(system, HeadraceSystem)]
    assert [system.name.split(" ", 1)[1] for system in systems] == ["1+1 int4", "1+1 fdc:b.fdc"]
    assert systems[1].describe()["flags"][-2:] == ["--kv-format", "fdc:/a/b.fdc"]


def test_arguments_of_chats_and_cached_prompts() -> None:
    own = parser().parse_args([
        *("--cases", "cached,search", "--lengths", "7900", "--shared", "7424"),
        *("--turns", "fixed:8", "--prefix-tokens", "2000", "--answers", "128", "--think", "1"),
        *("--input", "fixed:200", "--cold"),
    ])  # fmt: skip
    cached, search = cases_of(own)
    assert isinstance(cached, Cached)
    assert isinstance(search, Search)
    assert (cached.lengths, cached.shared) == ((7900,), 7424)
    workload = search.traffic.workload(128, variant=3)
    assert (workload.turns, workload.prefix_tokens, workload.think_s) == ("fixed:8", 2000, 1)
    assert (workload.inputs, workload.outputs, workload.variant) == ("fixed:200", "fixed:128", 3)
    assert workload.cold
    assert search.traffic.shape.endswith("2,000 shared tokens, cold")
    assert workload.token_ids


def test_shared_tokens_beyond_the_prompt_are_refused() -> None:
    with pytest.raises(ValueError, match="--shared 7424"):
        cases_of(parser().parse_args(["--cases", "cached", "--lengths", "512"]))


def test_unknown_mix_is_refused() -> None:
    with pytest.raises(ValueError, match="imdb"):
        cases_of(parser().parse_args(["--mixes", "novels"]))


@pytest.mark.parametrize(
    "arguments", [["--set", "X"], ["--peer", "http://a"], ["--peer-command", "p=x"]]
)
def test_invalid_pairs_are_refused(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match=r"expected NAME=VALUE|no --peer"):
        systems_of(parser().parse_args(arguments))
