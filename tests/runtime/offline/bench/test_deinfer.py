"""Tables of the DeInfer paper: numbers of the paper, derived figures, rows, JSON and plot."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.gemm.model import GemmModel, build_gemm_model
from runtime.offline.bench.deinfer import paper, report
from runtime.offline.bench.deinfer.cases import (
    Case,
    Count,
    Failure,
    Load,
    Pass,
    Place,
    Result,
    Results,
    System,
    Timing,
    Weights,
    served,
)
from runtime.offline.bench.deinfer.passes import (
    Measured,
    Options,
    WeightsBench,
    measure,
    with_first_layer,
)
from runtime.offline.bench.deinfer.report import document, rows_by_table, wanted
from runtime.offline.bench.deinfer.rows import Row
from runtime.offline.bench.deinfer.systems import Setting, competitors
from runtime.offline.bench.deinfer.tables import TABLES
from runtime.offline.bench.ranks import Collectives, Elements, SilentGroup, over_ranks
from runtime.offline.bench.shapes import SHAPES, Kept, random_checkpoint
from runtime.parallel.group import ONE_RANK, RankGroup
from runtime.parallel.partition import Scheme

SETTING = Setting(("llama-3-70b", "opt-30b"), (1, 2, 4), (Scheme.LOW_RANK,), ("dense", "lowrank"))
WEIGHTS = Weights("llama-3-70b", 0.6, Kept.RANKS, Scheme.LOW_RANK)
SYSTEM = System(WEIGHTS, Collectives.NCCL)
PLACE = Place(2, nvlink=True)


def simulated(case: Case) -> Result:
    """Return times that grow with the rows of a pass, the fraction and the cost of collectives."""
    place, system, work = case
    base = system.weights.scheme is Scheme.BASE
    if isinstance(work, Count):
        return Elements(100, 200) if base else Elements(25, 40)
    rows = work.prompts * work.tokens + work.decoding
    compute = (0.1 + rows * 1e-3) * system.weights.fraction / (1 if base else place.ranks)
    link = 0 if work.silent or place.ranks == 1 else rows * 1e-3 * (1 if place.nvlink else 9)
    fast = 0.5 if system.collectives is Collectives.PUSH else 1.0
    exchange = link * fast * (1.0 if base else 0.2)
    return Timing(1.0 + (0 if work.graph else 1.0), compute + exchange, 80)


def simulated_tables(setting: Setting = SETTING) -> dict[str, list[Row]]:
    cases = wanted(list(TABLES), setting)
    return rows_by_table(list(TABLES), setting, {case: simulated(case) for case in cases})


def test_numbers_of_the_paper_agree_with_each_other() -> None:
    hidden, kv, inner = 8192, 1024, 28672
    assert 4 * hidden + 4 * kv + 4 * inner + 2 * hidden == paper.ELEMENTS["base"]
    gathered = 4 * 4916 + 2 * 614
    assert gathered + 2 * hidden == paper.ELEMENTS["deinfer"]
    assert gathered + 4 * hidden == paper.ELEMENTS_ON_THE_LINK["deinfer"]
    percent = {
        ("llama-3-70b", 4, True): (34, 34),
        ("llama-65b", 8, False): (83, 13),
        ("opt-30b", 2, True): (20, 0),
    }
    for (model, ranks, nvlink), (first_token, gap) in percent.items():
        base = paper.a800_latency(model, "base", ranks, nvlink=nvlink)
        deinfer = paper.a800_latency(model, "deinfer", ranks, nvlink=nvlink)
        assert base is not None
        assert deinfer is not None
        assert 100 * (1 - deinfer.first_token / base.first_token) == pytest.approx(
            first_token, abs=0.6
        )
        assert 100 * (1 - deinfer.gap / base.gap) == pytest.approx(gap, abs=0.6)
    assert paper.a800_latency("llama-3-70b", "base", 1, nvlink=True) is None
    layer = paper.A800_LAYER[True, 4]
    assert sum(layer["base"]) == pytest.approx(2.416)
    assert sum(layer["deinfer"]) == pytest.approx(1.308)


def test_times_of_all_layers_are_extrapolated_from_those_of_one_and_of_several() -> None:
    timing = Timing.of(3.0, 17.0, 8, 80)
    assert timing.layer_ms == 2.0
    assert timing.ms == 3.0 + 79 * 2.0
    assert Timing.of(3.0, 17.0, 8, 8).ms == 17.0
    assert Timing.of(3.0, 2.0, 8, 80).ms == 3.0  # noise


def test_figures_of_a_load_by_hand() -> None:
    load = Load(prompts=96, tokens=32, generated=11)
    assert (load.prompts_per_pass, load.prefill_passes) == (32, 3)
    first, last, decode = load.prefill(last=False), load.prefill(last=True), load.decode()
    assert (first.decoding, last.decoding, decode.context) == (0, 64, 37)
    times = {first: 10.0, last: 14.0, decode: 5.0}
    results = Results({Case(PLACE, SYSTEM, work): Timing(ms, 0, 1) for work, ms in times.items()})
    found = served(load, results, PLACE, SYSTEM)
    assert found is not None
    assert found.first_token_ms == pytest.approx((10 + 22 + 36) / 3)
    assert found.gap_ms == 5.0
    assert found.tokens_per_s == pytest.approx(96 * 11 / (36 + 10 * 5) * 1e3)
    assert served(load, Results(), PLACE, SYSTEM) is None


@pytest.mark.parametrize("name", ["high load", "mild load", "serving"])
def test_passes_of_loads_have_at_most_1024_prompt_tokens_and_2048_rows(name: str) -> None:
    for shape in SETTING.shapes:
        load = SETTING.load(name, shape)
        for last in (False, True):
            work = load.prefill(last=last)
            assert work.prompts * work.tokens == 1024
            assert 1024 + work.decoding <= 2048


def test_the_baseline_comes_first_and_uses_nccl() -> None:
    names = [each.name for each in competitors(SETTING, PLACE, "llama-3-70b")]
    assert names == ["base, nccl", "base, push", "low-rank, push", "low-rank, push, lowrank"]
    names = [each.name for each in competitors(SETTING, Place(2, nvlink=False), "llama-3-70b")]
    assert names == ["base, nccl", "low-rank, nccl", "low-rank, nccl, lowrank"]
    names = [each.name for each in competitors(SETTING, Place(1, nvlink=True), "llama-3-70b")]
    assert names == ["one rank", "one rank, lowrank"]
    names = [each.name for each in competitors(SETTING, PLACE, "llama-3-70b", 1.0)]
    assert names == ["dense, nccl", "dense, push"]


def test_every_row_of_every_table_has_a_figure_when_all_cases_are_measured() -> None:
    tables = simulated_tables()
    for name, rows in tables.items():
        assert rows, name
        assert all(row.ours is not None for row in rows), name
    assert all(row.ours is None for rows in rows_by_table(list(TABLES), SETTING, {}).values()
               for row in rows)  # fmt: skip


def test_our_ratios_are_beside_those_of_the_paper() -> None:
    rows = {
        (name, row.model, row.place, row.figure, row.system): row
        for name, rows in simulated_tables().items()
        for row in rows
    }
    model, t4 = "llama-3-70b, rank fraction 0.6", Place(4, nvlink=True)
    gap = rows["table 4", model, t4, "gap", "low-rank, push"]
    assert (gap.paper, gap.paper_ranks) == (76, 4)
    assert gap.paper_ratio == pytest.approx(76 / 115)
    base = rows["table 4", model, t4, "gap", "base, nccl"]
    assert gap.ours is not None
    assert gap.base == base.ours
    assert gap.ratio == pytest.approx(gap.ours / (base.ours or 0))
    slow = rows["table 3", model, Place(4, nvlink=False), "first token", "low-rank, nccl"]
    assert (slow.paper, slow.paper_ranks) == (3633, 8)
    layer = rows["table 5", model, t4, "communication of a layer, 512 sequences", "low-rank, push"]
    assert layer.paper == 0.267
    assert layer.ratio == pytest.approx(0.1)
    graphs = rows["table 6", model, t4, "throughput, high load", "low-rank, push, lowrank, graphs"]
    assert (graphs.paper, graphs.paper_ranks) == (3834, 8)
    speed_up = rows["figure 7", "llama-3-70b, rank fraction 0.4", t4, "throughput, high load",
                    "low-rank, push"]  # fmt: skip
    assert (speed_up.paper, speed_up.paper_ratio) == (None, 2.25)
    elements = rows["table 1", model, t4, "elements, sums counted twice", "low-rank, push"]
    assert (elements.ours, elements.paper) == (40, 53_660)


def test_one_rank_measures_passes() -> None:
    """The longer test `test_tables_of_the_deinfer_paper_run` has several ranks."""
    tiny = System(Weights("tiny", 0.6, Kept.RANKS, Scheme.LOW_RANK), Collectives.PUSH)
    place, load = Place(1, nvlink=True), Load(3, 20, 4)
    bench = WeightsBench(tiny.weights, Options("cpu", 2, 1), ONE_RANK)
    for work in (load.prefill(last=True), load.decode(silent=True)):
        found = bench.result(Case(place, tiny, work))
        assert isinstance(found, Timing)
        assert found.one_ms > 0


def test_elements_are_those_of_all_layers_but_the_first() -> None:
    """The ranks are 19 for k and v, else 38, and multiples of 8 in gathers."""
    tiny = Weights("tiny", 0.6, Kept.RANKS, Scheme.LOW_RANK)
    case = Case(Place(2, nvlink=True), System(tiny, Collectives.NCCL), Count())
    found = WeightsBench(tiny, Options("cpu", 2, 1), SilentGroup(0, 2)).result(case)
    gathered, summed = (40 + 24 + 24 + 8) + (40 + 40), 38 + 38
    assert found == Elements(gathered + summed, gathered + 2 * summed)


def test_packed_weights_of_the_first_layer_are_those_that_the_megakernel_reads() -> None:
    pytest.importorskip("triton")
    whole = random_checkpoint(SHAPES["tiny"], 0.6, device="cpu")
    model = build_gemm_model(whole, device="cpu")
    first = with_first_layer(model)
    assert isinstance(first, GemmModel)
    assert first.layers == model.layers[:1]
    assert first.weights.layers == model.weights.layers[:1]
    assert first.layout.layers == model.layout.layers[:1]


def test_models_that_cannot_be_built_are_reported() -> None:
    """A dense tiny model has fewer query heads than ranks."""
    tiny = System(Weights("tiny", 1.0, Kept.PARAMETERS, Scheme.LOW_RANK), Collectives.NCCL)
    case = Case(Place(5, nvlink=True), tiny, Load(1, 16, 4).decode())
    (measured,) = measure([case], Options("cpu", 2, 1), SilentGroup(0, 5))
    assert isinstance(measured.result, Failure)
    assert "5 ranks" in measured.result.reason


def test_results_before_a_rank_failed_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = wanted(["table 3"], SETTING)

    def failing(*_: object) -> Iterator[Measured]:
        yield Measured(cases[0], Timing(1.0, 1.0, 80))
        raise RuntimeError("a rank failed")

    monkeypatch.setattr(report, "measure_place", failing)
    (found,) = report.measure(cases, Options("cpu", 2, 1), 60)
    assert found[cases[0]] == Timing(1.0, 1.0, 80)
    failure = Failure("T = 4, no NVLink: a rank failed")
    assert [found[case] for case in cases[1:]] == [failure] * (len(cases) - 1)


def test_processes_end_at_the_deadline() -> None:
    start = time.monotonic()
    assert not list(over_ranks(1, "cpu", forever, deadline=start + 2))
    assert time.monotonic() - start < 60


def forever(_group: RankGroup) -> Iterator[None]:
    while True:
        time.sleep(1)
    yield


def test_cases_of_the_first_model_are_measured_first() -> None:
    cases = wanted(["table 4", "figure 7"], SETTING)
    shapes = [case.system.weights.shape for case in cases]
    assert shapes == sorted(shapes)
    assert len(set(cases)) == len(cases)


def test_passes_without_prompts_decode_all_sequences() -> None:
    work = Load(64, 64, 448).decode(graph=False)
    assert work == Pass(0, 0, 64, 288, graph=False)


def test_plot_is_drawn_from_the_document_and_reproducible(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from runtime.offline.bench.deinfer.plot import draw

    made = document(simulated_tables(), {"json": Path("x"), "runs": 3}, "4 GPUs", "how")
    read = json.loads(json.dumps(made))
    assert read["arguments"] == {"runs": 3}
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    draw(read, first)
    draw(read, second)
    assert first.read_bytes() == second.read_bytes()
    text = first.read_text()
    for label in ("base, nccl", "low-rank, push", "paper, T = 8", "rank fraction", "4 GPUs"):
        assert label in text
