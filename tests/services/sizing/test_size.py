"""Numbers of workers, with figures that allow checks by hand, and against measured deployments."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import SettingsError
from services.sizing.lengths import Lengths
from services.sizing.measured import FOLDER, Figures
from services.sizing.size import Load, Transfers, plan

ENDS = {"sink_pages": 1, "window": 64}
COMPRESSED = {
    "page_size": 16,
    "groups": [
        {"name": "full_precision", "part": "ends", **ENDS},
        {"name": "compressed", "part": "middle", **ENDS},
    ],
}
PAGES: dict[str, Any] = {
    "page_plans": {
        "dense": {"page_size": 16, "groups": [{"name": "kv"}]},
        "fp8": COMPRESSED,
        "int4": COMPRESSED,
    },
    "page_bytes": {
        "dense": {"kv": 16 * 1000},
        "fp8": {"full_precision": 16 * 1000, "compressed": 16 * 500},
        "int4": {"full_precision": 16 * 1000, "compressed": 16 * 250},
    },
}
"""Pages of KV formats, as a router lists them."""
SIMPLE: dict[str, Any] = {
    "name": "simple",
    "sources": {},
    # 10 ms, and 0.1 ms per token
    "prefill": [{"tokens": 100, "first_ms": 20}, {"tokens": 1100, "first_ms": 120}],
    # 9 ms, and 1 ms per sequence
    "decode": {
        "dense": [
            {"sequences": 1, "context": 1100, "token_ms": 10},
            {"sequences": 101, "context": 1100, "token_ms": 110},
        ],
        "fp8": [{"sequences": 1, "context": 1100, "token_ms": 12}],
    },
    "max_running": 256,
    "kv": PAGES | {"bytes": 1e9},
    "gateway_tokens_per_s": 1000,
}
FIGURES = Figures.model_validate(SIMPLE)
LOAD = Load(
    rate=5,
    prompt=Lengths.parse("fixed:1000"),
    answer=Lengths.parse("fixed:200"),
    ttft_s=1,
    tpot_s=0.049,
    link_bits_per_s=math.inf,
)


def figures(**changes: object) -> Figures:
    return Figures.model_validate(SIMPLE | changes)


def test_prefill_is_the_measured_time_plus_the_wait() -> None:
    """A prompt occupies the worker for 100 ms, so that 5 requests/s use half of its time. In M/D/1,
    the mean wait is 50 ms, and 95 % wait at most 100 ms * ln 10 = 230 ms. T(1,000) is 110 ms."""
    found = plan(LOAD, FIGURES).prefill
    assert (found.workers, found.limit) == (1, "utilization")
    assert found.utilization == pytest.approx(0.5)
    assert found.mean_wait_s == pytest.approx(0.05)
    assert found.ttft_s == pytest.approx(0.230 + 0.110, abs=0.001)


@pytest.mark.parametrize(
    ("rate", "ttft_s", "workers", "limit"),
    [
        (7.5, 1.0, 1, "utilization"),
        (7.6, 1.0, 2, "utilization"),
        (75, 1.0, 10, "utilization"),
        (5, 0.34, 2, "ttft"),
        (5, 0.35, 1, "utilization"),
    ],
)
def test_prefill_workers(rate: float, ttft_s: float, workers: int, limit: str) -> None:
    found = plan(replace(LOAD, rate=rate, ttft_s=ttft_s), FIGURES).prefill
    assert (found.workers, found.limit) == (workers, limit)


def test_decode_follows_littles_law() -> None:
    """At 49 ms per token, 40 sequences fit, of which 75 % are used: 30, and 39 ms per token. An
    answer takes 200 * 39 ms = 7.8 s, so a worker completes 30 / 7.8 = 3.85 requests/s."""
    found = plan(replace(LOAD, rate=3.8), FIGURES).decode
    assert (found.workers, found.limit, found.max_sequences) == (1, "tpot", 40)
    # b = 3.8 * 200 * (9 + b) ms: b = 6.84 / 0.24
    assert found.sequences == pytest.approx(28.5)
    assert found.tpot_s == pytest.approx(0.0375)
    assert plan(replace(LOAD, rate=3.9), FIGURES).decode.workers == 2
    assert plan(replace(LOAD, rate=38), FIGURES).decode.workers == 10


def test_mean_of_few_sequences_leaves_room_for_peaks() -> None:
    """At most 4 sequences run, the 95 % quantile of a mean of 1.80: 1.80 + 1.645 sqrt(1.80) = 4."""
    load = replace(LOAD, rate=0.5, tpot_s=0.013)
    found = plan(load, FIGURES).decode
    assert found.max_sequences == 4
    assert found.sequences + 1.645 * found.sequences**0.5 <= 4
    # 1.80 / (200 * 10.8 ms) = 0.83 requests/s
    assert plan(replace(load, rate=0.82), FIGURES).decode.workers == 1
    assert plan(replace(load, rate=0.85), FIGURES).decode.workers == 2


def test_kv_memory_limits_the_sequences_by_format() -> None:
    """A running sequence has 1,000 + 100 tokens and half a page more: 1,108 of 23,000. With fp8,
    84 are in full precision: the first page, the window of 64 tokens and the rest of its page."""
    memory = PAGES | {"bytes": 23_000_000}
    small = figures(kv=memory)
    found = plan(replace(LOAD, rate=1), small).decode
    assert (found.max_sequences, found.limit) == (20, "kv")
    assert found.kv_usage == pytest.approx(found.sequences * 1108 / 23_000)
    assert small.kv is not None
    assert small.kv.size("fp8", 1108) == 84 * 1000 + 1024 * 500
    fp8 = plan(replace(LOAD, rate=1, kv_format="fp8"), small).decode
    assert (fp8.max_sequences, fp8.limit) == (int(23_000 / 596), "kv")
    assert plan(LOAD, figures(max_running=7)).decode.limit == "max_running"
    assert plan(LOAD, figures(kv=None)).decode.kv_usage is None


def test_longer_contexts_take_the_time_to_read_their_kv() -> None:
    """10 sequences with 500 tokens more than measured: 5 MB at 1 GB/s are 5 ms."""
    kv = SIMPLE["kv"] | {"read_bytes_per_s": {"dense": 1e9}}
    found = figures(kv=kv)
    assert found.token_s(10, 1100) == pytest.approx(0.019)
    assert found.token_s(10, 1600) == pytest.approx(0.024)
    assert found.token_s(10, 1000) == pytest.approx(0.018)
    assert found.token_s(10, 1) == pytest.approx(0.010)  # not below the fastest measured time


def test_more_sequences_than_measured_take_as_much_longer_as_with_dense_kv() -> None:
    """11 instead of 1 sequences add 10 ms with dense KV. Reading 10 sequences of 1,100 tokens is
    11 MB at 1 GB/s with dense KV, and 5.5 MB at 1.1 GB/s with fp8: 6 ms less."""
    kv = SIMPLE["kv"] | {"read_bytes_per_s": {"dense": 1e9, "fp8": 1.1e9}}
    found = figures(kv=kv)
    assert found.token_s(1, 1100, "fp8") == pytest.approx(0.012)
    assert found.token_s(11, 1100, "fp8") == pytest.approx(0.012 + 0.010 - 0.006)
    (note,) = plan(replace(LOAD, kv_format="fp8", rate=1), found).notes
    assert "extrapolated from 1 sequences, the most measured with KV format fp8" in note


@pytest.mark.parametrize(
    ("kv_format", "sequences", "context", "token_ms"),
    [
        *(("dense", 16, 4200, 6.84), ("dense", 16, 8192, 8.71), ("dense", 1, 32000, 4.71)),
        *(("fp8", 16, 4200, 5.83), ("fp8", 16, 8192, 6.81)),
        *(("fp8", 1, 2048, 4.11), ("fp8", 1, 7900, 4.42), ("fp8", 1, 32000, 4.97)),
        *(("int4", 16, 8192, 6.44), ("int4", 1, 7900, 4.24), ("int4", 4, 2048, 4.87)),
        *(("k4v2", 16, 8192, 6.17), ("k4v2", 1, 7900, 4.23), ("k4v2", 4, 2048, 4.83)),
    ],
)
def test_times_of_an_output_token_are_those_measured_with_its_kv_format(
    kv_format: str, sequences: float, context: float, token_ms: float
) -> None:
    """runtime/kv/BENCHMARKS.md and tests/figures/serving_h200.json, on H200s."""
    llama = Figures.load("h200-llama-3-8b")
    assert llama.token_s(sequences, context, kv_format) * 1e3 == pytest.approx(token_ms, rel=0.1)


def test_prompts_between_and_beyond_the_measured_lengths_follow_a_quadratic() -> None:
    """5 ms, 20 us per token and 0.4 ns per square of the tokens."""

    def first_ms(tokens: int) -> float:
        return 5 + 0.02 * tokens + 0.4e-6 * tokens**2

    found = figures(
        prefill=[{"tokens": n, "first_ms": first_ms(n)} for n in (500, 2000, 8000, 32000)]
    )
    assert found.overhead_s == pytest.approx(0.005)
    for tokens in (1, 250, 1000, 16_000, 64_000, 128_000):
        assert found.first_token_s(tokens) * 1e3 == pytest.approx(first_ms(tokens))
    far = plan(replace(LOAD, prompt=Lengths.parse("fixed:64000"), rate=0.01, ttft_s=60), found)
    assert "extrapolated from 32,000, as a quadratic" in far.notes[0]


@pytest.mark.parametrize(
    ("tokens", "measured_ms"),
    [(4096, 102.04), (4096, 98.62), (7900, 217.1), (7900, 205.77), (32000, 1201.35)],
)
def test_long_prompts_are_within_10_percent_of_measured_times(
    tokens: int, measured_ms: float
) -> None:
    """The slowest and the fastest time of each length, of 1 prefill + 1 decode worker.

    From tests/figures/serving_h200.json and serving_h100.json, in other runs than the figures."""
    llama = Figures.load("h200-llama-3-8b")
    assert llama.first_token_s(tokens) * 1e3 == pytest.approx(measured_ms, rel=0.1)


def test_measured_times_that_do_not_grow_faster_are_no_quadratic() -> None:
    falling = [{"tokens": n, "first_ms": ms} for n, ms in ((100, 20), (1000, 90), (2000, 120))]
    assert figures(prefill=falling).square_s == 0
    noisy = [{"tokens": n, "first_ms": ms} for n, ms in ((100, 20), (1000, 19), (2000, 120))]
    assert figures(prefill=noisy).square_s == 0
    steep = [{"tokens": n, "first_ms": ms} for n, ms in ((100, 20), (1000, 21), (2000, 120))]
    found = figures(prefill=steep)
    times = [found.first_token_s(tokens) for tokens in range(0, 4000, 50)]
    assert times == sorted(times)


def test_running_sequences_have_the_mean_context_over_time() -> None:
    """Answers of 100 or 300 tokens: E[g²] / (2 E[g]) = 50,000 / 400 = 125 tokens."""
    load = replace(LOAD, answer=Lengths.parse("fixed:100+fixed:300"))
    assert load.context == pytest.approx(1125)


def test_links_carry_every_prompt_once() -> None:
    """5 * 1,000 tokens of 1,000 bytes are 40 Mbit/s: two links of 30 Mbit/s at 75 %."""
    found = plan(replace(LOAD, link_bits_per_s=30e6), FIGURES)
    assert found.transfers == Transfers(40e6, 20e6, 20e6, prompt_s=8 / 30)
    assert (found.prefill.workers, found.prefill.limit) == (2, "link")
    one = plan(replace(LOAD, link_bits_per_s=54e6, rate=3), FIGURES)
    assert (one.prefill.workers, one.decode.workers) == (1, 1)
    with pytest.raises(SettingsError, match="needs figures that contain KV sizes"):
        plan(replace(LOAD, link_bits_per_s=1e9), figures(kv=None))
    (note,) = plan(replace(LOAD, link_bits_per_s=None), figures(kv=None)).notes
    assert "KV transfers are not counted" in note


def test_gateways_follow_the_output_tokens() -> None:
    assert plan(replace(LOAD, rate=3.75), FIGURES).gateways == 1  # 750 tokens/s
    assert plan(replace(LOAD, rate=3.8), FIGURES).gateways == 2
    assert plan(LOAD, figures(gateway_tokens_per_s=None)).gateways is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ttft_s": 0.1}, "1,000 tokens takes 0.11 s on an idle worker"),
        (
            {"tpot_s": 0.009},
            "takes 0.01 s on an idle worker with KV format dense, the target is 0.009",
        ),
        ({"rate": 1e6}, "more than 10,000 workers"),
        (
            {"kv_format": "int4"},
            "no times of an output token for KV format 'int4', only for: dense, fp8",
        ),
        (
            {"link_bits_per_s": None},
            "--link is missing: prompts of this load have 0.04 Gbit/s of KV",
        ),
        ({"prompt": Lengths.parse("fixed:2000000"), "ttft_s": 1e6}, "no memory"),
    ],
)
def test_impossible_loads_are_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        plan(replace(LOAD, **changes), FIGURES)


def test_single_points_and_noise() -> None:
    """One point of prefill is proportional to the tokens; a faster larger batch counts as noise."""
    single = figures(
        prefill=[{"tokens": 1000, "first_ms": 100}],
        decode={
            "dense": [
                {"sequences": 1, "context": 1, "token_ms": 10},
                {"sequences": 2, "context": 1, "token_ms": 9},
                {"sequences": 3, "context": 1, "token_ms": 11},
            ]
        },
    )
    assert [single.first_token_s(tokens) for tokens in (0, 500, 2000)] == [0, 0.05, 0.2]
    assert [single.token_s(count, 1) for count in (0.5, 2, 3)] == [0.01, 0.01, 0.011]


def test_noise_between_prompt_lengths_leaves_the_worker_occupied() -> None:
    """The longer prompt was measured as the faster one: prompts still take all of their time."""
    noisy = figures(prefill=[{"tokens": 900, "first_ms": 101}, {"tokens": 1000, "first_ms": 100}])
    assert noisy.overhead_s == 0
    assert plan(LOAD, noisy).prefill.utilization == pytest.approx(5 * 0.101)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefill": []}, "at least 1 item"),
        ({"prefill": [{"tokens": 1, "first_ms": 0}]}, "greater than 0"),
        ({"decode": {}}, "at least 1 item"),
        ({"decode": {"fp8": SIMPLE["decode"]["dense"][::-1]}}, "points of decode.fp8 .* ascending"),
        ({"unknown": 1}, "unknown: Extra inputs"),
        ({"kv": SIMPLE["kv"] | {"page_plans": {"fp8": {"page_size": 0}}}}, "kv.page_plans.fp8: "),
        ({"kv": SIMPLE["kv"] | {"page_bytes": {}}}, "kv: .*have different KV formats"),
        (
            {"kv": SIMPLE["kv"] | {"page_bytes": PAGES["page_bytes"] | {"fp8": {"kv": 1}}}},
            "kv: .*pages of kv instead of full_precision, compressed",
        ),
        ({"kv": SIMPLE["kv"] | {"read_bytes_per_s": {"int9": 1e9}}}, "kv: .*lacks int9"),
    ],
)
def test_invalid_figures_name_the_field(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "figures.json"
    file.write_text(json.dumps(SIMPLE | changes))
    with pytest.raises(SettingsError, match=message):
        Figures.load(str(file))


@pytest.mark.parametrize("name", [file.stem for file in FOLDER.glob("*.json")])
def test_packaged_figures_are_valid_and_have_sources(name: str) -> None:
    found = Figures.load(name)
    assert {"prefill", "decode"} <= found.sources.keys()
    with pytest.raises(SettingsError, match=f"built in: .*{name}"):
        Figures.load("no such figures")


@pytest.mark.parametrize(("answer", "measured"), [(128, 39.0), (512, 17.99)])
def test_estimate_is_below_the_measured_capacity(answer: int, measured: float) -> None:
    """The highest rate at which 95 % of the requests met these targets: the estimate is at most
    15 % lower. tests/figures/serving_h200.json, one prefill and one decode worker."""
    llama = Figures.load("h200-llama-3-8b")
    load = Load(
        rate=measured,
        prompt=Lengths.parse("lognormal:1000,0.6"),
        answer=Lengths.parse(f"fixed:{answer}"),
        ttft_s=0.4,
        tpot_s=0.008,
        link_bits_per_s=math.inf,
    )
    over, within = (plan(replace(load, rate=part * measured), llama) for part in (1.0, 0.85))
    assert over.prefill.workers + over.decode.workers == 3
    assert (within.prefill.workers, within.decode.workers) == (1, 1)


def test_cached_tokens_are_neither_computed_nor_transferred_nor_held_twice() -> None:
    """800 of 1,000 tokens are cached: 20 ms of 100 ms remain, and a fifth of the KV."""
    cold, warm = (
        plan(replace(LOAD, shared_prefix=shared, link_bits_per_s=1e9), FIGURES)
        for shared in (0, 800)
    )
    assert warm.prefill.utilization * warm.prefill.workers == pytest.approx(5 * 0.02)
    assert cold.prefill.utilization * cold.prefill.workers == pytest.approx(5 * 0.1)
    assert warm.transfers is not None
    assert cold.transfers is not None
    # A prompt has 63 pages, of which 50 are cached.
    ratio = warm.transfers.bits_per_s / cold.transfers.bits_per_s
    assert ratio == pytest.approx(13 / 63, abs=0.01)
    assert warm.decode.kv_usage is not None
    assert cold.decode.kv_usage is not None
    assert warm.decode.kv_usage < cold.decode.kv_usage


@pytest.mark.parametrize(("tokens", "cached"), [(1, 0), (16, 0), (17, 16), (50, 32), (5000, 32)])
def test_full_pages_are_cached_and_one_token_is_computed(tokens: int, cached: int) -> None:
    assert replace(LOAD, shared_prefix=40).cached(tokens) == cached


def test_a_shared_prefix_of_the_pool_leaves_room_for_more_sequences() -> None:
    """Pool of 1,000,000 tokens; contexts of 1,100 tokens and half a page, 992 of them cached."""
    load = replace(LOAD, shared_prefix=1000, tpot_s=10, link_bits_per_s=math.inf)
    figures = Figures.model_validate(SIMPLE | {"max_running": 100_000})
    found = plan(load, figures)
    assert found.decode.limit == "kv"
    assert found.decode.max_sequences == int((1_000_000 - 992) / (1108 - 992))
