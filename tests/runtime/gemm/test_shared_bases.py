"""Bases that several layers share, in packed weights and in models over them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.attention.base import Batch, SequenceSlice
from runtime.checkpoint import Checkpoint, load_checkpoint, write_checkpoint
from runtime.checkpoint.assemble import named_tensors, nbytes
from runtime.checkpoint.load import converted
from runtime.checkpoint.sharing import basis_groups
from runtime.checkpoint.slices import rank_checkpoint
from runtime.checkpoint.weights import LayersOnDemand, mapped, shapes_of
from runtime.gemm.model import build_gemm_model
from runtime.gemm.plan import KernelPlan, group_key
from runtime.gemm.weights import PackedMatrix, PackedWeights
from runtime.layers import linear, summed
from runtime.megakernel.reference import Interpreter
from runtime.models.build import build_model
from runtime.pages.plan import PageCount
from runtime.parallel.group import ONE_RANK, RankGroup
from runtime.parallel.partition import Partition, Scheme
from tests.runtime.device import DEVICE
from tests.runtime.rank_threads import ThreadGroup, on_ranks
from tests.runtime.tiny import CONFIG, tiny_checkpoint

PAIRS = (7, 5, 9, 20, 16, 30, 24)
"""Ranks of the factor pairs. Some are padded, and two ranks of a worker divide them unevenly."""
ALL = ("q", "k", "v", "gate", "up")
"""The linears that share bases in Basis Sharing."""
CONFIG_3 = replace(CONFIG, num_layers=3)


def with_shared(
    checkpoint: Checkpoint, names: Sequence[str], layers: Sequence[int] = (0, 2)
) -> Checkpoint:
    """Return the checkpoint in which all given layers have the named V of the first of them."""
    made = list(checkpoint.layers)
    first = made[layers[0]]
    for at in layers[1:]:
        shared = {n: replace(getattr(made[at], n), v=getattr(first, n).v) for n in names}
        made[at] = replace(made[at], **shared)
    return replace(checkpoint, layers=tuple(made))


def copied(checkpoint: Checkpoint) -> Checkpoint:
    """Return a copy of the checkpoint whose layers share no tensors."""
    layers = (mapped(layer, Tensor.clone) for layer in checkpoint.layers)
    return replace(checkpoint, layers=tuple(layers))


def on_demand(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with layers on demand, whose tensors are new at each read."""
    layers, shapes = checkpoint.layers, shapes_of(checkpoint.layers)
    read = LayersOnDemand(lambda index: mapped(layers[index], Tensor.clone), shapes)
    return replace(checkpoint, layers=read)


def whole(checkpoint: Checkpoint) -> Checkpoint:
    return checkpoint


def of_rank(rank: int) -> Callable[[Checkpoint], Checkpoint]:
    return lambda whole: rank_checkpoint(whole, Partition.of(whole.config, rank, 2))


PARTS = [
    pytest.param(whole, id="one rank"),
    pytest.param(of_rank(0), id="rank 0 of 2"),
    pytest.param(of_rank(1), id="rank 1 of 2"),
]


def storage_bytes(weights: PackedWeights) -> int:
    """Return the bytes of the distinct storages of all tensors."""
    tensors = [weights.vectors, weights.embedding, weights.lm_head.weight]
    for layer in weights.layers:
        tensors += [matrix.weight for matrix in layer.matrices]
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def assert_equal(found: PackedWeights, expected: PackedWeights) -> None:
    """Check that all matrices of all layers have the same bits and are read in the same way."""
    assert torch.equal(found.vectors, expected.vectors)
    assert found.max_inner == expected.max_inner
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        assert ours.inner.keys() == theirs.inner.keys()
        for own, other in zip(ours.matrices, theirs.matrices, strict=True):
            assert torch.equal(own.weight, other.weight)
            assert own.weight.stride() == other.weight.stride()
            assert (own.bias, own.inner_column) == (other.bias, other.inner_column)


def stacks(weights: PackedWeights, name: str) -> list[PackedMatrix]:
    return [layer.inner[name] for layer in weights.layers]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("source", [whole, on_demand])
def test_shared_basis_is_packed_once(
    part: Callable[[Checkpoint], Checkpoint], source: Callable[[Checkpoint], Checkpoint]
) -> None:
    checkpoint = with_shared(tiny_checkpoint(ranks=PAIRS, bias=True, config=CONFIG_3), ALL)
    apart = PackedWeights.pack(part(copied(checkpoint)), "cpu")
    shared = PackedWeights.pack(part(source(checkpoint)), "cpu")
    assert_equal(shared, apart)
    saved = 0
    for name in ("q", "gate"):
        first, second, third = stacks(shared, name)
        assert third is first is not second
        padded = 128  # each row of 48 elements
        saved += len(first.weight) * padded
    assert apart.nbytes - shared.nbytes == saved
    # Zeros that are allocated to align a matrix are in its storage.
    assert 0 <= storage_bytes(apart) - storage_bytes(shared) - saved < 4 * padded
    assert shared.step_weight_bytes == apart.step_weight_bytes
    meta = PackedWeights.pack(part(source(checkpoint)), "meta")
    assert (meta.nbytes, meta.step_weight_bytes) == (shared.nbytes, shared.step_weight_bytes)


@pytest.mark.parametrize("part", PARTS)
def test_stack_is_packed_for_each_layer_if_only_some_bases_are_shared(
    part: Callable[[Checkpoint], Checkpoint],
) -> None:
    names = ("q", "v", "o", "gate", "up", "down")
    checkpoint = with_shared(tiny_checkpoint(ranks=PAIRS, config=CONFIG_3), names)
    shared = PackedWeights.pack(part(checkpoint), "cpu")
    assert_equal(shared, PackedWeights.pack(part(copied(checkpoint)), "cpu"))
    for name, count in (("q", 3), ("o", 2), ("gate", 2), ("down", 2)):
        assert len(set(map(id, stacks(shared, name)))) == count


@pytest.mark.parametrize("size", [1, 2])
def test_bases_stay_shared_if_a_plan_multiplies_out_other_factor_pairs(
    size: int, tmp_path: Path
) -> None:
    checkpoint = with_shared(tiny_checkpoint(ranks=PAIRS, config=CONFIG_3), ALL)
    groups = [name for names in basis_groups(checkpoint) for name in names]
    write_checkpoint(checkpoint, tmp_path / "model")
    key = group_key(checkpoint.layers[0], ("down",))
    plan = KernelPlan(dense=frozenset([str(key)]))
    for rank in range(size):
        part = load_checkpoint(
            tmp_path / "model",
            dtype=None,
            part=partial(Partition.of, rank=rank, size=size) if size > 1 else None,
            prepare=plan.multiply_out,
        )
        assert isinstance(part.layers, LayersOnDemand)
        assert [name for names in basis_groups(part) for name in names] == groups
        shared = PackedWeights.pack(part, "cpu")
        for name in ("q", "gate"):
            first, second, third = stacks(shared, name)
            assert third is first is not second
        bases = sum(getattr(part.layers[0], name).v.nbytes for name in ALL)
        assert nbytes(part) == nbytes(copied(part)) - bases


def test_converted_layers_on_demand_share_their_bases() -> None:
    checkpoint = with_shared(tiny_checkpoint(ranks=PAIRS, config=CONFIG_3), ALL)
    found = converted(on_demand(checkpoint), torch.bfloat16)
    assert basis_groups(found) == basis_groups(checkpoint)
    assert len(basis_groups(found)) == len(ALL)
    for ours, theirs in zip(named_tensors(found), named_tensors(checkpoint), strict=True):
        assert torch.equal(ours[1], theirs[1].bfloat16())


@pytest.mark.parametrize("scheme", Scheme)
@pytest.mark.parametrize("source", [whole, on_demand])
def test_models_of_torch_pack_a_shared_basis_once_on_each_rank(
    scheme: Scheme,
    source: Callable[[Checkpoint], Checkpoint],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = with_shared(tiny_checkpoint(ranks=PAIRS, config=CONFIG_3), ALL)
    packed: list[Tensor] = []

    def count(weight: Tensor, bias: Tensor | None = None) -> linear.LinearOp:
        packed.append(weight)
        return linear.PackedLinear(weight, bias)

    monkeypatch.setattr(linear, "linear_op", count)
    monkeypatch.setattr(summed, "linear_op", count)
    batch = Batch.of([SequenceSlice(range(5), 0, (0,))])

    def run(checkpoint: Checkpoint, group: ThreadGroup) -> tuple[Tensor, int]:
        partition = Partition.of(CONFIG_3, group.rank, group.size, scheme)
        packed.clear()
        model = build_model(rank_checkpoint(checkpoint, partition), group=group)
        count = len(packed)
        logits = model.forward(batch, model.new_cache(PageCount(1)))
        return model.vocabulary.whole(logits), count

    expected = on_ranks(2, partial(run, copied(checkpoint)))
    found = on_ranks(2, partial(run, source(checkpoint)))
    stacked = len(ALL) if scheme is Scheme.BASE else 2
    for (logits, ops), (theirs, more) in zip(found, expected, strict=True):
        assert torch.equal(logits, theirs)
        assert ops == more - stacked


def test_megakernel_passes_read_shared_bases() -> None:
    checkpoint = with_shared(tiny_checkpoint(ranks=PAIRS, bias=True, config=CONFIG_3), ALL)
    logits = []
    for one in (checkpoint, copied(checkpoint)):
        size = 2, CONFIG.num_kv_heads, 16, CONFIG.head_dim
        planes = [torch.zeros(size, dtype=torch.bfloat16) for _ in range(6)]
        interpreter = Interpreter(PackedWeights.pack(one, "cpu"), planes, tall=100)
        logits.append(torch.stack([interpreter.run(token, token, [1]) for token in range(4)]))
    assert torch.equal(*logits)


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("size", [1, 2])
def test_results_with_shared_bases_are_bitwise_equal(size: int) -> None:
    checkpoint = with_shared(tiny_checkpoint(ranks=PAIRS, config=CONFIG_3), ALL)
    batch = Batch.of([SequenceSlice(range(5), 0, (0,))], DEVICE)

    def run(whole: Checkpoint, group: RankGroup) -> Tensor:
        part = rank_checkpoint(whole, Partition.of(CONFIG_3, group.rank, size))
        model = build_gemm_model(part, device=DEVICE, group=group)
        return model.vocabulary.whole(model.forward(batch, model.new_cache(PageCount(1))))

    found, expected = (
        [run(one, ONE_RANK)] if size == 1 else on_ranks(size, partial(run, one))
        for one in (checkpoint, copied(checkpoint))
    )
    assert all(map(torch.equal, found, expected))
