"""Random checkpoints have the shapes of real models, and the ranks that were asked for."""

from dataclasses import replace

import pytest

from runtime.checkpoint.weights import FactorPair, linears_of
from runtime.models.build import build_model
from runtime.offline.bench.ranks import rank_part
from runtime.offline.bench.shapes import SHAPES, Kept, random_checkpoint, title
from runtime.parallel.partition import Partition


def test_rank_fractions_are_those_of_deinfer() -> None:
    """Its Table 1 has 4916 and 614 for LLaMA-3-70B; the first one is rounded up."""
    config = replace(SHAPES["llama-3-70b"], num_layers=1, vocab_size=8)
    whole = random_checkpoint(config, 0.6, device="cpu", on_demand=True, kept=Kept.RANKS)
    (layer,) = whole.layers.shapes  # type: ignore[attr-defined]
    ranks = {name: pair.rank for name, pair in linears_of(layer) if isinstance(pair, FactorPair)}
    assert ranks == dict.fromkeys(("q", "o", "gate", "up", "down"), 4915) | {"k": 614, "v": 614}
    assert title("llama-3-70b", 0.6, kept=Kept.RANKS) == "llama-3-70b, rank fraction 0.6"


@pytest.mark.parametrize("keep", [1.0, 0.5])
def test_shapes_of_opt_have_positions_biases_of_norms_and_tied_embeddings(keep: float) -> None:
    config = replace(SHAPES["opt-125m"], num_layers=1, context_length=8, vocab_size=16)
    whole = random_checkpoint(config, keep, device="cpu")
    assert whole.positions is not None
    assert whole.positions.shape == (8, 768)
    assert whole.lm_head is whole.embedding
    assert not whole.layers[0].input_norm_bias.any()
    assert whole.layers[0].input_norm.all()
    part = rank_part(whole, Partition.of(config, 0, 2))
    assert part.lm_head is part.embedding
    assert len(part.embedding) == 8
    assert build_model(whole).embed_positions is not None
