"""Layers over packed weights of workers with several ranks, against those of `build_model`."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.attention.base import Batch, SequenceSlice
from runtime.checkpoint import load_checkpoint, write_checkpoint
from runtime.checkpoint.slices import rank_checkpoint
from runtime.config import ModelConfig
from runtime.gemm.model import build_gemm_model, unsupported_by_gemm
from runtime.gemm.plan import KernelPlan, group_key
from runtime.gemm.weights import PackedLayer, unsupported
from runtime.megakernel.decode_step import unsupported_by_megakernel
from runtime.models.build import build_model
from runtime.models.kernel_plan_hash import kernel_plan_hash
from runtime.pages.plan import PageCount
from runtime.parallel.group import ONE_RANK, RankGroup
from runtime.parallel.partition import Partition, Scheme
from tests.runtime.device import DEVICE
from tests.runtime.rank_threads import ThreadGroup, on_ranks
from tests.runtime.tiny import CONFIG, tiny_checkpoint

TOKENS = 5
DENSE: tuple[int | None, ...] = (None,) * 7
PAIRS: tuple[int | None, ...] = (12, 5, 9, 20, 16, 30, 24)
MIXED: tuple[int | None, ...] = (None, 12, None, 20, 16, None, 9)


UNEVEN = replace(CONFIG, num_heads=9, num_kv_heads=3, num_layers=1)
"""The numbers of heads of SmolLM2. Among four ranks, two have the same KV head, and 2 and 1 of its
queries. Features and vocabulary rows are uneven as well."""
WIDE = replace(UNEVEN, head_dim=64, vocab_size=47)


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("config", "ranks", "head_norms", "size", "scheme"),
    [
        pytest.param(CONFIG, DENSE, False, 2, Scheme.LOW_RANK, id="dense"),
        pytest.param(CONFIG, PAIRS, False, 2, Scheme.LOW_RANK, id="pairs"),
        pytest.param(CONFIG, MIXED, False, 2, Scheme.LOW_RANK, id="mixed"),
        pytest.param(UNEVEN, PAIRS, True, 4, Scheme.LOW_RANK, id="pairs, shared KV heads"),
        pytest.param(UNEVEN, DENSE, False, 4, Scheme.LOW_RANK, id="dense, shared KV heads"),
        pytest.param(WIDE, MIXED, True, 2, Scheme.LOW_RANK, id="mixed, uneven heads of 64"),
        pytest.param(CONFIG, MIXED, False, 2, Scheme.EVEN, id="mixed, even"),
        pytest.param(UNEVEN, PAIRS, True, 3, Scheme.EVEN, id="pairs, uneven rows, even"),
        pytest.param(CONFIG, PAIRS, False, 4, Scheme.EVEN, id="pairs, a rank without rows, even"),
    ],
)
def test_ranks_have_the_logits_of_the_whole_model(
    config: ModelConfig,
    ranks: Sequence[int | None],
    head_norms: bool,
    size: int,
    scheme: Scheme,
) -> None:
    checkpoint = tiny_checkpoint(config=config, bias="all", head_norms=head_norms, ranks=ranks)
    batch = Batch.of([SequenceSlice(range(TOKENS), 0, (0,))], DEVICE)
    whole = build_model(checkpoint, device=DEVICE)
    expected = whole.forward(batch, whole.new_cache(PageCount(1)))

    def run(group: ThreadGroup) -> Tensor:
        part = rank_checkpoint(checkpoint, Partition.of(config, group.rank, group.size, scheme))
        model = build_gemm_model(part, device=DEVICE, group=group)
        assert "all of them can write" in str(unsupported_by_megakernel(model))
        return model.vocabulary.whole(model.forward(batch, model.new_cache(PageCount(1))))

    first, *others = on_ranks(size, run)
    assert all(torch.equal(first, other) for other in others)
    # The GEMM kernels compute in bf16, torch in fp32 here.
    torch.testing.assert_close(first, expected, rtol=0, atol=0.04 * float(expected.abs().max()))


@pytest.mark.parametrize(("features", "size"), [(17, 2), (64, 9)])
def test_all_ranks_use_packed_layers_or_none(features: int, size: int) -> None:
    """Only some ranks have a multiple of 8 features, which the kernels need."""
    config = replace(UNEVEN, intermediate_size=features)
    whole = tiny_checkpoint(config=config)
    parts = [rank_checkpoint(whole, Partition.of(config, rank, size)) for rank in range(size)]
    assert len({part.config.intermediate_size % 8 == 0 for part in parts}) == 2
    assert all("multiples of 8" in str(unsupported(part)) for part in parts)


def test_factor_pairs_are_multiplied_out_before_ranks_divide_them(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(ranks=(8, 8, 8, 20, 16, 16, 30))
    write_checkpoint(checkpoint, tmp_path / "model")
    layer = checkpoint.layers[0]
    groups = ("q", "k", "v"), ("o",), ("down",)
    plan = KernelPlan(dense=frozenset(str(group_key(layer, names)) for names in groups))

    def packed(group: ThreadGroup) -> PackedLayer:
        part = load_checkpoint(
            tmp_path / "model",
            dtype=None,
            part=partial(Partition.of, rank=group.rank, size=group.size),
            prepare=plan.multiply_out,
        )
        return build_gemm_model(part, device="cpu", plan=plan, group=group).weights.layers[0]

    whole = build_gemm_model(checkpoint, device="cpu", plan=plan).weights.layers[0]
    first, second = on_ranks(2, packed)
    assert set(whole.inner) == set(first.inner) == set(second.inner) == {"gate"}
    for name, dim in (("q", 0), ("k", 0), ("v", 0), ("o", 1), ("down", 1)):
        parts = [layer.outer[name].weight for layer in (first, second)]
        assert torch.equal(torch.cat(parts, dim), whole.outer[name].weight)


def test_kernel_plan_hash_covers_the_scheme_but_not_the_number_of_ranks() -> None:
    checkpoint = tiny_checkpoint(ranks=PAIRS)
    plan = KernelPlan({"PLAIN 16: 1x1": None}, device="a GPU")

    def hash_of(scheme: Scheme, group: RankGroup) -> str:
        part = checkpoint
        if group.size > 1:
            part = rank_checkpoint(checkpoint, Partition.of(CONFIG, group.rank, group.size, scheme))
        if scheme is Scheme.BASE:
            return kernel_plan_hash(build_model(part, group=group))
        return kernel_plan_hash(build_gemm_model(part, device="cpu", plan=plan, group=group))

    one = hash_of(Scheme.LOW_RANK, ONE_RANK)
    low_rank, even, base = (
        {hash for size in (2, 3) for hash in on_ranks(size, partial(hash_of, scheme))}
        for scheme in Scheme
    )
    assert low_rank == even == {one}  # files of plans name the scheme
    assert len(base) == 1
    assert base != {one}
    assert base != {kernel_plan_hash(build_model(checkpoint))}


def test_base_scheme_needs_layers_of_torch() -> None:
    part = rank_checkpoint(tiny_checkpoint(), Partition.of(CONFIG, 0, 2, Scheme.BASE))
    assert "whole outputs" in str(unsupported_by_gemm(part, "cuda", torch.bfloat16))
