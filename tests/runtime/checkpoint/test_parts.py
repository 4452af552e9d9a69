"""Reading of the part of one rank, compared with the part of a whole checkpoint in memory."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from runtime.checkpoint import FactorPair, load_checkpoint, write_checkpoint
from runtime.checkpoint.assemble import named_tensors, nbytes
from runtime.checkpoint.hashed_files import HashedFiles
from runtime.checkpoint.load import converted
from runtime.checkpoint.sharing import basis_groups
from runtime.checkpoint.slices import rank_checkpoint
from runtime.checkpoint.weights import Dense, LayersOnDemand, mapped
from runtime.config import ModelConfig
from runtime.errors import CheckpointError
from runtime.parallel.partition import Partition, Scheme
from tests.runtime.checkpoint.gguf_samples import tiny_model, write_gguf
from tests.runtime.checkpoint.samples import change_weights, save_random
from tests.runtime.tiny import CONFIG, tiny_checkpoint

RANKS = 3
PAIRS = (8, 9, None, 10, None, 30, 20)


def canonical(path: Path) -> None:
    write_checkpoint(tiny_checkpoint(ranks=PAIRS, bias=True), path)


def huggingface(path: Path) -> None:
    save_random("qwen2", path, max_shard_size="40KB")


def half(path: Path) -> None:
    write_checkpoint(tiny_checkpoint(ranks=PAIRS), path, torch.float16)


def gguf_file(path: Path, tied: bool = False) -> None:
    write_gguf(tiny_model(tied), path, quantize=gguf.GGMLQuantizationType.Q8_0)


def tied_gguf_file(path: Path) -> None:
    gguf_file(path, tied=True)


def of_rank(rank: int, scheme: Scheme) -> Callable[[ModelConfig], Partition]:
    return lambda config: Partition.of(config, rank, RANKS, scheme)


@pytest.mark.parametrize("scheme", Scheme)
@pytest.mark.parametrize("write", [canonical, huggingface, half, gguf_file, tied_gguf_file])
def test_part_that_is_read_equals_the_part_of_the_whole_checkpoint(
    write: Callable[[Path], None], scheme: Scheme, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    write(path)
    whole = load_checkpoint(path)
    for rank in range(RANKS):
        part = of_rank(rank, scheme)
        expected = rank_checkpoint(whole, part(whole.config))
        stored = load_checkpoint(path, None, part=part)
        assert stored.model_hash == whole.model_hash
        for found in (stored, load_checkpoint(path, part=part)):
            assert found.partition == expected.partition
            assert found.config == expected.config
            assert (found.lm_head is found.embedding) == (whole.lm_head is whole.embedding)
            for ours, theirs in zip(named_tensors(found), named_tensors(expected), strict=True):
                assert ours[0] == theirs[0]
                assert torch.equal(ours[1].float(), theirs[1])
        assert nbytes(stored, torch.float32) == nbytes(expected)


def test_ranks_share_the_slices_of_shared_bases(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(ranks=(None, None, None, None, 16, 16, None))
    base = checkpoint.layers[0].up
    layers = tuple(
        replace(layer, gate=FactorPair(layer.gate.u, base.v), up=FactorPair(layer.up.u, base.v))
        for layer in checkpoint.layers
    )
    write_checkpoint(replace(checkpoint, layers=layers), tmp_path / "model")
    whole = load_checkpoint(tmp_path / "model", None)
    assert len(basis_groups(whole)) == 1
    assert basis_groups(load_checkpoint(tmp_path / "model", torch.bfloat16)) == basis_groups(whole)
    part = load_checkpoint(tmp_path / "model", None, part=of_rank(1, Scheme.BASE))
    assert basis_groups(part) == basis_groups(whole)


def test_each_rank_checks_its_rows_of_the_embedding(tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    partition = Partition.of(load_checkpoint(tmp_path).config, 1, RANKS)

    def damage(weights: dict[str, Tensor]) -> None:
        weights["model.embed_tokens.weight"][partition.tokens.start, 3] = torch.nan

    change_weights(tmp_path, damage)
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        load_checkpoint(tmp_path, part=of_rank(1, Scheme.LOW_RANK))
    load_checkpoint(tmp_path, part=of_rank(0, Scheme.LOW_RANK))
    load_checkpoint(tmp_path, part=of_rank(2, Scheme.LOW_RANK))


def test_all_ranks_have_an_untied_head_if_one_row_differs(tmp_path: Path) -> None:
    save_random("llama-tied", tmp_path)

    def add_head(weights: dict[str, Tensor]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        weights["lm_head.weight"][0] += 1

    assert load_checkpoint(tmp_path, part=of_rank(0, Scheme.LOW_RANK)).config.tied_embeddings
    change_weights(tmp_path, add_head)
    for rank in range(RANKS):
        part = load_checkpoint(tmp_path, part=of_rank(rank, Scheme.LOW_RANK))
        assert not part.config.tied_embeddings


@pytest.mark.parametrize("write", [canonical, huggingface, gguf_file])
def test_more_ranks_than_heads_are_refused_before_the_files_are_hashed(
    write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    write(path)
    heads = load_checkpoint(path).config.num_heads
    monkeypatch.setattr(HashedFiles, "of", lambda *_: pytest.fail("the files were hashed"))
    message = f"{heads + 1} ranks, but the model has only {heads} query heads"
    with pytest.raises(ValueError, match=message):
        load_checkpoint(path, part=lambda config: Partition.of(config, 0, heads + 1))


def test_layer_is_freed_before_the_next_one_is_read() -> None:
    read: list[weakref.ref[Any]] = []

    def layer(number: int) -> Dense:
        assert all(found() is None for found in read)
        made = Dense(torch.full((4,), float(number)))
        read.append(weakref.ref(made.weight))
        return made

    def first_value(layer: Dense) -> float:
        return float(layer.weight[0])

    shapes = (Dense(torch.empty(4, device="meta")),) * 3
    layers = LayersOnDemand(layer, shapes)
    assert list(map(first_value, layers)) == [0, 1, 2]
    assert layers[2] is layers[-1]
    assert len(read) == 3


def test_converted_tensors_of_layers_on_demand_are_not_confused() -> None:
    """Python reuses the ids of freed tensors."""
    checkpoint = tiny_checkpoint(config=replace(CONFIG, num_layers=6))
    on_demand = LayersOnDemand(
        lambda index: mapped(checkpoint.layers[index], Tensor.clone), checkpoint.layers
    )
    made = converted(replace(checkpoint, layers=on_demand), torch.bfloat16).layers
    for found, expected in zip(made, checkpoint.layers, strict=True):
        assert torch.equal(found.gate.weight, expected.gate.weight.bfloat16())
