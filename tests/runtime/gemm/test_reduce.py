"""Sums over ranks in layers over packed weights, compared with those of `build_model`."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.attention.base import Batch, SequenceSlice
from runtime.checkpoint import Checkpoint, FactorPair
from runtime.gemm.epilogues import Epilogue
from runtime.gemm.layer import packed_parts
from runtime.gemm.model import GemmModel, build_gemm_model
from runtime.gemm.plan import KernelPlan, group_key
from runtime.gemm.projections import PackedProjection
from runtime.gemm.weights import PackedWeights
from runtime.kernels.alignment import round_up
from runtime.layers.reduce import Reduce, one_rank
from runtime.megakernel.decode_step import unsupported_by_megakernel
from runtime.models.build import build_model
from runtime.pages.plan import PageCount
from tests.runtime.device import DEVICE
from tests.runtime.tiny import CONFIG, tiny_checkpoint
from tests.runtime.two_ranks import RANKS, part_of

TOKENS = 5
HIDDEN = CONFIG.hidden_size
DENSE: tuple[int | None, ...] = (None,) * 7
PAIRS: tuple[int | None, ...] = (None, 12, None, 20, 16, None, 9)


class Recorded:
    """The `Reduce` of one rank, which records the shapes of the addends."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, addend: Tensor) -> Tensor:
        assert addend.is_contiguous()
        self.shapes.append(tuple(addend.shape))
        return addend


def projections(checkpoint: Checkpoint, reduce: Reduce = one_rank) -> list[PackedProjection]:
    """Return the projections of the first layer that write to the residual stream."""
    weights = PackedWeights.pack(checkpoint, DEVICE)
    parts: Any = packed_parts(weights, weights.layers[0], KernelPlan(), None, reduce)
    return [parts.o, parts.down]


@pytest.mark.parametrize("ranks", [DENSE, PAIRS])
def test_addends_of_two_ranks_give_the_output_of_the_whole_projection(
    ranks: tuple[int | None, ...],
) -> None:
    """Biases of factor pairs are held by all ranks, those of dense projections by one."""
    whole = tiny_checkpoint(ranks=ranks)
    biased = replace(whole, layers=tuple(map(_with_biases, whole.layers)))
    second: list[Tensor] = []

    def keep(addend: Tensor) -> Tensor:
        second.append(addend.clone())
        return addend

    def add(addend: Tensor) -> Tensor:
        return addend.add_(second.pop(0))

    others = projections(part_of(biased, 1), keep)
    firsts = projections(part_of(biased, 0), add)
    generator = torch.Generator().manual_seed(0)
    for expected, first, other in zip(projections(biased), firsts, others, strict=True):
        columns = expected.gemms[0].columns
        x = torch.randn(TOKENS, columns, generator=generator).to(DEVICE, torch.bfloat16)
        hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(DEVICE, torch.bfloat16)
        halves = [half.contiguous() for half in x.chunk(RANKS, dim=1)]
        other(halves[1], hidden.clone())
        residual = hidden.clone()
        found = first(halves[0], residual)
        assert found is residual, "the residual stream is updated in place"
        # Outputs and addends are rounded to bf16.
        torch.testing.assert_close(found, expected(x, hidden), rtol=0.02, atol=0.05)


def _with_biases(layer: Any) -> Any:
    pairs = {n: getattr(layer, n) for n in ("o", "down")}
    biases = {
        name: replace(pair, bias=torch.linspace(-1, 1, HIDDEN))
        for name, pair in pairs.items()
        if isinstance(pair, FactorPair)
    }
    return replace(layer, **biases)


@pytest.mark.parametrize("ranks", [DENSE, PAIRS])
def test_projections_of_one_rank_add_to_the_residual_stream_in_their_gemm(
    ranks: tuple[int | None, ...],
) -> None:
    checkpoint = tiny_checkpoint(ranks=ranks)
    plain, residual = Epilogue.PLAIN, Epilogue.RESIDUAL
    pair = ranks is PAIRS
    for projection in projections(checkpoint):
        assert [gemm.epilogue for gemm in projection.gemms] == [plain] * pair + [residual]
    for projection in projections(checkpoint, Recorded()):
        assert [gemm.epilogue for gemm in projection.gemms] == [plain] + [residual] * pair


def test_summed_factor_pairs_are_not_multiplied_out() -> None:
    checkpoint = tiny_checkpoint(ranks=(8, 8, 8, 20, 16, 16, 30))
    layer = checkpoint.layers[0]
    groups = ("q", "k", "v"), ("o",), ("down",)
    plan = KernelPlan(dense=frozenset(str(group_key(layer, names)) for names in groups))
    found = [
        build_gemm_model(checkpoint, device="cpu", plan=plan, reduce=reduce).weights.layers[0]
        for reduce in (one_rank, Recorded())
    ]
    assert [set(packed.inner) for packed in found] == [{"gate"}, {"gate", "o", "down"}]


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [DENSE, PAIRS])
def test_reduced_model_matches_the_torch_model(ranks: tuple[int | None, ...]) -> None:
    """Both sum two outputs of each layer; packed ranks are padded to a multiple of 8."""
    checkpoint = tiny_checkpoint(ranks=ranks)
    reduces = Recorded(), Recorded()
    expected = build_model(checkpoint, device=DEVICE, reduce=reduces[0])
    packed = build_gemm_model(checkpoint, device=DEVICE, reduce=reduces[1])
    batch = Batch.of([SequenceSlice(range(TOKENS), 0, (0,))], DEVICE)
    logits = [
        model.forward(batch, model.new_cache(PageCount(1))).float() for model in (expected, packed)
    ]
    assert len(reduces[0].shapes) == 2 * CONFIG.num_layers
    assert reduces[1].shapes == [(rows, round_up(size)) for rows, size in reduces[0].shapes]
    # The GEMM kernels compute in bf16, torch in fp32 here.
    atol = 0.04 * float(logits[0].abs().max())
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=atol)


def test_megakernel_refuses_reduced_models() -> None:
    models: list[GemmModel] = [
        build_gemm_model(tiny_checkpoint(), device=DEVICE, reduce=reduce)
        for reduce in (one_rank, Recorded())
    ]
    assert unsupported_by_megakernel(models[0]) is None
    assert "does not sum outputs" in str(unsupported_by_megakernel(models[1]))
