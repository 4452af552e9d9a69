"""Basis Sharing: one V for several layers, in files and in memory."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.attention.base import Batch, SequenceSlice
from runtime.checkpoint import FactorPair, LayerWeights, load_checkpoint, write_checkpoint
from runtime.checkpoint.sharing import basis_groups
from runtime.checkpoint.weights import linears_of
from runtime.layers.linear import SharedOps
from runtime.models.build import build_model
from runtime.models.decoder import ServingBuilder
from runtime.models.llama import LLAMA
from runtime.offline.compress.forward import forward
from runtime.offline.convert import SourceFormat, convert
from runtime.pages.plan import PageCount, pages_for
from tests.runtime.offline.convert.samples import (
    assert_same,
    basis_sharing,
    save_folder,
    shared_checkpoint,
)


def bases_of(layer: LayerWeights) -> Iterator[tuple[str, Tensor]]:
    for name, linear in linears_of(layer):
        if isinstance(linear, FactorPair):
            yield name, linear.v


def copied(layer: LayerWeights) -> LayerWeights:
    """Return the layer with copies of its bases."""
    pairs: dict[str, Any] = {
        name: replace(getattr(layer, name), v=v.clone()) for name, v in bases_of(layer)
    }
    return replace(layer, **pairs)


@pytest.mark.parametrize("pickled", [True, False])
def test_shared_bases_are_loaded_and_stored_once(pickled: bool, tmp_path: Path) -> None:
    expected = shared_checkpoint()
    groups = basis_groups(expected)
    assert len(groups) == 5
    save_folder(
        expected,
        basis_sharing(expected),
        tmp_path / "m",
        architecture="ShareLlamaForCausalLM",
        pickled=pickled,
        q_groups=[[0, 1]],
        num_basis_q=7,
    )
    made, source = convert(tmp_path / "m")
    assert source.format is SourceFormat.BASIS_SHARING
    assert basis_groups(made) == groups
    assert_same(made, expected)
    write_checkpoint(made, tmp_path / "ours")
    again = load_checkpoint(tmp_path / "ours")
    assert basis_groups(again) == groups
    assert dict(bases_of(again.layers[1]))["q"] is dict(bases_of(again.layers[0]))["q"]
    assert_same(again, expected)
    apart = tmp_path / "apart"
    write_checkpoint(replace(made, layers=tuple(map(copied, made.layers))), apart)
    bases = sum(v.nbytes for name, v in bases_of(made.layers[0]) if name not in ("o", "down"))
    saved = (apart / "model.safetensors").stat().st_size
    assert saved - (tmp_path / "ours" / "model.safetensors").stat().st_size >= bases


def test_model_packs_a_shared_basis_once_and_matches_the_plain_forward_pass() -> None:
    shared = shared_checkpoint()
    packed: SharedOps = {}
    for layer in shared.layers:
        LLAMA.parts(ServingBuilder(LLAMA, shared.config, layer, packed))
    assert len(packed) == 6, "q, k, v, gate and up of both layers, and o and down of each"
    model = build_model(shared)
    tokens = list(range(1, 30))
    cache = model.new_cache(PageCount(4))
    pages = list(range(pages_for(len(tokens), 16)))
    got = model.forward(Batch.of([SequenceSlice(tokens, 0, pages)]), cache)
    expected = forward(shared, torch.tensor([tokens]))[0, -1:]
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)  # KV is bf16
