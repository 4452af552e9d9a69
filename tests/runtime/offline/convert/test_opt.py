"""Checkpoints of OPT in the formats of other projects."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.checkpoint import Checkpoint, load_checkpoint, write_checkpoint
from runtime.checkpoint.assemble import named_tensors
from runtime.errors import CheckpointError
from runtime.offline.compress import Method, compress
from runtime.offline.convert import SourceFormat, convert
from tests.runtime.checkpoint.samples import save_random
from tests.runtime.offline.convert.samples import (
    Rename,
    assert_same,
    dobi,
    renamed,
    save_folder,
    svd_llm,
    svd_llm_v2,
)

FORMATS: dict[Rename, SourceFormat] = {
    svd_llm: SourceFormat.SVD_LLM,
    svd_llm_v2: SourceFormat.SVD_LLM_V2,
    dobi: SourceFormat.LINEAR_PAIR,
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("opt")
    save_random("opt", folder)
    return load_checkpoint(folder)


@pytest.fixture(scope="module")
def factorized(dense: Checkpoint) -> Checkpoint:
    rows = torch.randint(0, 97, (8, 40), generator=torch.Generator().manual_seed(2))
    made, report = compress(dense, rows, 0.7, rank_multiple=2, method=Method.SVD_LLM)
    assert report.ranks[0].keys() == {"q", "k", "v", "o", "fc1", "fc2"}
    assert None not in report.ranks[0].values()
    return made


def stored(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors with the position embeddings as OPT's files store them."""
    for name, tensor in tensors:
        if name == "model.decoder.positions.weight":
            unused = torch.full((2, tensor.shape[1]), torch.nan)
            yield "model.decoder.embed_positions.weight", torch.cat([unused, tensor])
        else:
            yield name, tensor


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("rename", FORMATS)
def test_factorized_folder_is_converted(
    factorized: Checkpoint, rename: Rename, pickled: bool, tmp_path: Path
) -> None:
    """The names are ``out_u_proj``, ``fc1_u_proj`` and so on; biases are stored with a factor."""

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stored(renamed(factorized, rename)):
            owner = name.removesuffix(".bias")
            if name.endswith(("_proj.bias", "fc1.bias", "fc2.bias")):
                yield rename(owner, "v" if rename is dobi else "u") + ".bias", tensor
            else:
                yield name, tensor

    folder = tmp_path / "m"
    save_folder(factorized, tensors(), folder, architecture="OPTForCausalLM", pickled=pickled)
    made, source = convert(folder)
    assert source.format is FORMATS[rename]
    assert_same(made, factorized)
    with pytest.raises(CheckpointError, match="headrace convert"):
        load_checkpoint(folder)
    write_checkpoint(made, tmp_path / "made")
    assert_same(load_checkpoint(tmp_path / "made"), factorized)


@pytest.mark.parametrize("prefix", ["model.", ""])
@pytest.mark.parametrize("pickled", [False, True])
def test_dense_folder_is_converted(
    dense: Checkpoint, prefix: str, pickled: bool, tmp_path: Path
) -> None:
    """A folder may lack the prefix ``model.`` of all names."""
    folder = tmp_path / "m"
    tensors = (
        (prefix + name.removeprefix("model."), tensor)
        for name, tensor in stored(named_tensors(dense))
    )
    save_folder(dense, tensors, folder, architecture="OPTForCausalLM", pickled=pickled)
    made, source = convert(folder)
    assert source.format is SourceFormat.DENSE
    assert_same(made, dense)
    if not pickled:
        assert_same(load_checkpoint(folder), dense)
