"""Kernel plans for several numbers of ranks: the GEMMs that are measured, and the choices."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.reduction import ForkingPickler

import pytest

from runtime.checkpoint import Checkpoint, FactorPair
from runtime.checkpoint.slices import rank_checkpoint
from runtime.gemm.model import build_gemm_model
from runtime.gemm.plan import BUCKETS, KernelPlan, choice_key, group_key
from runtime.offline.bench import variants as variants_module
from runtime.offline.bench.plan import gemms_by_choice
from runtime.offline.bench.ranks import SilentGroup
from runtime.offline.bench.shapes import without_content
from runtime.offline.bench.variants import StepTimes, Variant, times_of_rank, with_variants
from runtime.parallel.partition import Partition, Scheme
from tests.runtime.rank_threads import ThreadGroup, on_ranks
from tests.runtime.tiny import CONFIG, tiny_checkpoint

UNEVEN = replace(CONFIG, num_heads=9, num_kv_heads=3, num_layers=3)
CHECKPOINT = tiny_checkpoint(config=UNEVEN, ranks=(8, 8, 8, 20, 16, 16, None))
WHOLE = without_content(CHECKPOINT)
OUTPUT = str(group_key(CHECKPOINT.layers[0], ("o",)))
"""A group of factor pairs that `times_with` can make faster as a product."""


def times_with(
    product: dict[int, float],
    base: float,
    measured: list[int] | None = None,
    even: dict[int, float] | None = None,
) -> StepTimes:
    """Return step times of 1 ms, but for a product and the other schemes.

    Args:
        product, even: times by the number of ranks.
    """
    times_of_even = even or {}

    def times(whole: Checkpoint, variants: Sequence[Variant], size: int) -> list[float]:
        assert whole.config == UNEVEN
        if measured is not None:
            measured.append(size)
        return [
            base
            if variant.scheme is Scheme.BASE
            else times_of_even.get(size, 1.0)
            if variant.scheme is Scheme.EVEN
            else 1.0
            if isinstance(variant.layer.o, FactorPair)
            else product[size]
            for variant in variants
        ]

    return times


def test_plan_covers_the_gemms_of_all_ranks() -> None:
    measured = dict(gemms_by_choice(KernelPlan(), WHOLE, (1, 2), "cpu"))
    used = set()
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        part = CHECKPOINT
        if size > 1:
            part = rank_checkpoint(CHECKPOINT, Partition.of(UNEVEN, rank, size))
        model = build_gemm_model(part, device="cpu", group=SilentGroup(rank, size))
        for gemm in model.grouped_gemms():
            used |= {choice_key(gemm.name, bucket, gemm.shapes) for bucket in BUCKETS}
    assert measured.keys() == used
    assert all(len(alike) >= UNEVEN.num_layers for alike in measured.values())


def test_base_scheme_has_no_gemms_of_several_ranks() -> None:
    plan = KernelPlan(scheme=Scheme.BASE)
    assert not dict(gemms_by_choice(plan, WHOLE, (2, 3), "cpu"))


@pytest.mark.parametrize(
    ("sizes", "product", "chosen"),
    [
        ((1,), {1: 0.9}, True),
        ((1,), {1: 0.98}, False),
        ((1, 2), {1: 0.9, 2: 0.9}, True),
        ((1, 2), {1: 0.9, 2: 1.1}, False),
        ((), {}, False),
    ],
)
def test_pairs_are_multiplied_out_if_that_is_faster_with_every_number_of_ranks(
    sizes: Sequence[int], product: dict[int, float], chosen: bool
) -> None:
    plan = with_variants(KernelPlan(), WHOLE, sizes, lambda _: None, times_with(product, 1.0))
    assert plan.dense == (frozenset([OUTPUT]) if chosen else frozenset())


@pytest.mark.parametrize(
    ("even", "base", "scheme"),
    [
        ({2: 0.9, 4: 0.8}, 1.2, Scheme.EVEN),
        ({2: 0.9, 4: 0.8}, 0.85, Scheme.BASE),  # the worst of even is 0.9
        ({2: 0.98, 4: 0.8}, 1.2, Scheme.LOW_RANK),
    ],
)
def test_scheme_with_the_least_worst_time_is_chosen(
    even: dict[int, float], base: float, scheme: Scheme
) -> None:
    times = times_with({2: 1.1, 4: 1.1}, base, even=even)
    assert with_variants(KernelPlan(), WHOLE, (2, 4), lambda _: None, times).scheme is scheme


@pytest.mark.parametrize(
    ("sizes", "base", "scheme"),
    [
        ((2, 4), 0.9, Scheme.BASE),
        ((2, 4), 0.98, Scheme.LOW_RANK),
        ((1, 2), 0.9, Scheme.LOW_RANK),
        ((1,), 0.9, Scheme.LOW_RANK),
        ((), 0.9, Scheme.LOW_RANK),
    ],
)
def test_base_scheme_is_chosen_only_for_plans_without_workers_of_one_rank(
    sizes: Sequence[int], base: float, scheme: Scheme
) -> None:
    times = times_with(dict.fromkeys(sizes, 1.1), base)
    lines: list[str] = []
    plan = with_variants(KernelPlan(), WHOLE, sizes, lines.append, times)
    assert plan.scheme is scheme
    assert any("for one rank as well" in line for line in lines) == (len(sizes) > 1 and 1 in sizes)


def test_variants_are_timed_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are processes, so that their work is pickled; here they are threads."""
    monkeypatch.setattr(variants_module, "LAYERS", 1)
    variants = [Variant(WHOLE.layers[0], scheme) for scheme in Scheme]
    work = partial(times_of_rank, replace(WHOLE, layers=()), variants, "cpu", runs=1)
    pickled = ForkingPickler.dumps(work)

    def run(group: ThreadGroup) -> list[float]:
        return list(ForkingPickler.loads(pickled)(group))

    for found in on_ranks(2, run):
        assert len(found) == len(Scheme)
        assert all(ms > 0 for ms in found)
