"""Packed weights: alignment, tied embeddings, head norms and unsupported checkpoints."""

from dataclasses import replace

import pytest
import torch

from runtime.checkpoint import FactorPair
from runtime.gemm.weights import PackedWeights, unsupported
from runtime.kernels.alignment import LINE_BYTES, LINE_ELEMENTS, round_up
from tests.runtime.tiny import CONFIG, tiny_checkpoint

RANKS = [(None,) * 7, (9, 5, 8, 12, 17, 11, 24), (9, None, 8, None, 17, None, 24)]


@pytest.mark.parametrize("ranks", RANKS)
def test_every_weight_row_begins_on_a_line(ranks: tuple[int | None, ...]) -> None:
    weights = PackedWeights.pack(tiny_checkpoint(ranks=ranks), "cpu")
    matrices = [weights.lm_head]
    for layer in weights.layers:
        matrices += layer.matrices
    for matrix in matrices:
        assert matrix.weight.data_ptr() % LINE_BYTES == 0
        assert matrix.weight.stride() == (round_up(matrix.weight.stride(0), LINE_ELEMENTS), 1)


@pytest.mark.parametrize("hidden", [48, 64])
def test_tied_embedding_is_contiguous(hidden: int) -> None:
    """Rows of the LM head are padded to whole lines; those of the embedding are not."""
    checkpoint = tiny_checkpoint(config=replace(CONFIG, hidden_size=hidden))
    weights = PackedWeights.pack(replace(checkpoint, embedding=checkpoint.lm_head), "cpu")
    assert weights.embedding.is_contiguous()
    assert torch.equal(weights.embedding, weights.lm_head.weight)
    assert (weights.embedding is weights.lm_head.weight) == (hidden == 64)


def test_head_norms_are_rounded_to_bf16_and_packed_as_fp32() -> None:
    checkpoint = tiny_checkpoint(head_norms=True)
    weights = PackedWeights.pack(checkpoint, "cpu")
    for layer, packed in zip(checkpoint.layers, weights.layers, strict=True):
        for norm, at in ((layer.q_norm, packed.q_norm), (layer.k_norm, packed.k_norm)):
            assert norm is not None
            packed_norm = weights.vectors[at : at + CONFIG.head_dim]
            assert torch.equal(packed_norm, norm.bfloat16().float())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 144}, None),
        ({"num_heads": 34}, None),
        ({"head_dim": 20}, "heads of 20"),
        ({"head_dim": 272}, "heads of 272"),
        ({"hidden_size": 52}, "hidden size 52"),
    ],
)
def test_unsupported_returns_the_reason(changes: dict[str, int], reason: str | None) -> None:
    checkpoint = tiny_checkpoint(config=replace(CONFIG, **changes))  # type: ignore[arg-type]
    found = unsupported(checkpoint)
    assert found is None if reason is None else reason in str(found)
    if reason is not None:
        with pytest.raises(ValueError, match=reason):
            PackedWeights.pack(checkpoint, "cpu")


def test_factor_pair_of_rank_0_is_not_supported() -> None:
    checkpoint = tiny_checkpoint()
    empty = FactorPair(torch.zeros(96, 0), torch.zeros(0, CONFIG.hidden_size), None)
    layers = tuple(replace(layer, q=empty) for layer in checkpoint.layers)
    assert unsupported(replace(checkpoint, layers=layers)) == "a factor pair of rank 0"
