"""Checkpoints of other projects that were not converted: servers name the command for each."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import Tensor

from runtime.checkpoint import Checkpoint, load_checkpoint
from runtime.checkpoint.assemble import named_tensors
from runtime.errors import CheckpointError
from runtime.offline.convert import convert
from tests.runtime.offline.convert.samples import (
    EVEN,
    Rename,
    asvd,
    basis_sharing,
    dobi,
    renamed,
    save_folder,
    save_model,
    shared_checkpoint,
    svd_llm,
    svd_llm_v2,
)
from tests.runtime.tiny import tiny_checkpoint

Read = Callable[[Path], object]


def refusal(path: Path, read: Read = load_checkpoint) -> str:
    with pytest.raises(CheckpointError) as error:
        read(path)
    return str(error.value)


def command(model: Path, tokenizer: str = " --tokenizer ORIGINAL_MODEL") -> str:
    return f"convert it with `headrace convert --model {model} --out FOLDER{tokenizer}`"


@pytest.mark.parametrize(
    ("rename", "architecture"),
    [
        (svd_llm, "LlamaForCausalLM"),
        (svd_llm_v2, "LlamaForCausalLM"),
        (dobi, "LlamaForCausalLM"),
        (asvd, "ASVDLlamaForCausalLM"),
    ],
)
def test_factorized_folder_names_the_command(
    rename: Rename, architecture: str, tmp_path: Path
) -> None:
    factorized = tiny_checkpoint(ranks=EVEN)
    folder = tmp_path / "model"
    save_folder(factorized, renamed(factorized, rename), folder, architecture=architecture)
    assert command(folder) in refusal(folder)
    (folder / "tokenizer.json").touch()
    assert command(folder, tokenizer="") in refusal(folder)


def test_folder_with_shared_bases_names_the_command(tmp_path: Path) -> None:
    shared = shared_checkpoint()
    folder = tmp_path / "model"
    save_folder(shared, basis_sharing(shared), folder, architecture="ShareLlamaForCausalLM")
    assert command(folder) in refusal(folder)


def tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    return named_tensors(checkpoint)


def test_pickled_folder_names_what_the_command_reads(tmp_path: Path) -> None:
    """A state dict is read with its folder, and a pickle under another name by itself."""
    dense = tiny_checkpoint()
    folder = tmp_path / "model"
    save_folder(dense, tensors(dense), folder, pickled=True)
    assert command(folder) in refusal(folder)
    convert(folder)
    state_dict = folder / "pytorch_model.bin"
    state_dict.rename(state_dict.with_name("checkpoint.pt"))
    assert command(folder / "checkpoint.pt") in refusal(folder)


@pytest.mark.parametrize("read", [load_checkpoint, convert])
def test_folder_with_nothing_but_a_pickle_names_the_pickle(read: Read, tmp_path: Path) -> None:
    dense = tiny_checkpoint()
    save_model(dense, tensors(dense), tmp_path / "model.pt")
    assert command(tmp_path / "model.pt") in refusal(tmp_path, read)
    convert(tmp_path / "model.pt")


def test_pickle_names_the_command(tmp_path: Path) -> None:
    (tmp_path / "model.pt").touch()
    assert command(tmp_path / "model.pt") in refusal(tmp_path / "model.pt")
