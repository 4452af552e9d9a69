"""Folders and files that transformers and torch wrote: state dicts, shards, wrappers, modules."""

import json
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from torch import nn

from runtime.checkpoint import Checkpoint, load_checkpoint, write_checkpoint
from runtime.checkpoint.assemble import named_tensors
from runtime.errors import CheckpointError
from runtime.offline.compress.forward import forward
from runtime.offline.convert import SourceFormat, convert
from tests.runtime.checkpoint.samples import change_config, save_random
from tests.runtime.offline.convert.samples import EVEN, module_of, renamed, save_folder, svd_llm
from tests.runtime.tiny import tiny_checkpoint

PICKLED = "pytorch_model.bin"


def saved(name: str, folder: Path) -> Any:
    """Save a model, and remove its safetensors file."""
    model = save_random(name, folder)
    (folder / "model.safetensors").unlink()
    return model


def assert_logits(made: Checkpoint, model: Any) -> None:
    tokens = torch.randint(0, 97, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model.float()(tokens).logits
    torch.testing.assert_close(forward(made, tokens), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_state_dict_of_a_model_has_its_logits(name: str, protocol: int, tmp_path: Path) -> None:
    model = saved(name, tmp_path / "m")
    state = model.state_dict()
    assert type(state) is OrderedDict
    torch.save(state, tmp_path / "m" / PICKLED, pickle_protocol=protocol)
    made, source = convert(tmp_path / "m")
    assert source.format is SourceFormat.DENSE
    assert made.config.tied_embeddings is (name == "llama-tied")
    write_checkpoint(made, tmp_path / "ours")
    assert_logits(load_checkpoint(tmp_path / "ours"), model)


def test_shards_with_an_index_are_read(tmp_path: Path) -> None:
    model = saved("qwen2", tmp_path)
    save_torch_state_dict(
        model.state_dict(), tmp_path, safe_serialization=False, max_shard_size="20KB"
    )
    assert len(list(tmp_path.glob("pytorch_model-*.bin"))) > 2
    assert_logits(convert(tmp_path)[0], model)
    next(tmp_path.glob("pytorch_model-00002*")).unlink()
    with pytest.raises(CheckpointError, match="lists the shard 'pytorch_model-00002"):
        convert(tmp_path)


def test_shards_without_an_index_are_read(tmp_path: Path) -> None:
    model = saved("llama", tmp_path)
    items = list(model.state_dict().items())
    torch.save(dict(items[:5]), tmp_path / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(CheckpointError, match="has no tensor"):
        convert(tmp_path)
    torch.save(dict(items[5:]), tmp_path / "pytorch_model-00002-of-00002.bin")
    assert_logits(convert(tmp_path)[0], model)


def test_single_file_has_precedence_over_shards(tmp_path: Path) -> None:
    model = saved("llama", tmp_path)
    torch.save(model.state_dict(), tmp_path / PICKLED)
    torch.save({"model.norm.weight": torch.ones(48)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    index = {"weight_map": {"model.norm.weight": "pytorch_model-00001-of-00002.bin"}}
    (tmp_path / f"{PICKLED}.index.json").write_text(json.dumps(index))
    assert_logits(convert(tmp_path)[0], model)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: {"state_dict": model.state_dict(), "epoch": 3, "optimizer": {"lr": 1.0}},
        lambda model: {"model": model.state_dict(), "args": Settings()},
        lambda model: {"model": "llama", "module": model.state_dict()},
        lambda model: {"state_dict": {"model": model}},
        lambda model: model,
    ],
)
def test_wrapped_state_dicts_and_modules_are_read(
    wrap: Callable[[Any], Any], tmp_path: Path
) -> None:
    model = saved("llama", tmp_path)
    torch.save(wrap(model), tmp_path / PICKLED)
    assert_logits(convert(tmp_path)[0], model)


@pytest.mark.parametrize(
    "wrappers", [("_orig_mod",), ("module",), ("module", "_orig_mod"), ("_orig_mod", "module")]
)
def test_prefixes_of_compiled_and_distributed_modules_are_removed(
    wrappers: tuple[str, ...], tmp_path: Path
) -> None:
    """`torch.compile` and `DistributedDataParallel` hold the module under these names."""
    model = outer = saved("llama", tmp_path)
    for name in wrappers:
        outer = nn.ModuleDict({name: outer})
    torch.save(outer.state_dict(), tmp_path / PICKLED)
    assert_logits(convert(tmp_path)[0], model)


class Settings:
    """An object of an unknown class beside a state dict."""

    def __init__(self) -> None:
        self.rank = 3


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_pickled_model_of_transformers_is_read_with_its_config(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    for number, content in enumerate(({"model": model, "tokenizer": Settings()}, model)):
        path = tmp_path / f"{number}.pt"
        torch.save(content, path)
        assert_logits(convert(path)[0], model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_views_and_strides_keep_their_values_and_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    model = saved("llama", tmp_path).to(dtype)
    state = model.state_dict()
    stacked = torch.stack([state[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 1)])
    state["model.layers.0.mlp.up_proj.weight"] = stacked[0]
    state["model.layers.1.mlp.up_proj.weight"] = stacked[1]
    column = state["model.layers.0.mlp.down_proj.weight"]
    state["model.layers.0.mlp.down_proj.weight"] = column.t().contiguous().t()
    state["model.norm.weight"] = state["model.norm.weight"].repeat_interleave(2)[::2]
    torch.save(state, tmp_path / PICKLED)
    made, source = convert(tmp_path)
    assert source.dtype == dtype
    stored = dict(named_tensors(made))
    assert stored.keys() == state.keys()
    assert all(torch.equal(stored[name], state[name]) for name in stored)


def test_factorized_state_dict_is_read(tmp_path: Path) -> None:
    expected = tiny_checkpoint(ranks=EVEN)
    save_folder(expected, renamed(expected, svd_llm), tmp_path / "m", pickled=True)
    made, source = convert(tmp_path / "m")
    assert source.format is SourceFormat.SVD_LLM
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(forward(made, tokens), forward(expected, tokens), rtol=0, atol=0)


def test_biases_follow_the_config_in_dense_folders(tmp_path: Path) -> None:
    model = saved("llama-biased", tmp_path)
    torch.save(model.state_dict(), tmp_path / PICKLED)
    assert_logits(convert(tmp_path)[0], model)
    change_config(tmp_path, attention_bias=False)
    with pytest.raises(CheckpointError, match="not part of this architecture"):
        convert(tmp_path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({}, "holds no tensors"),
        (OrderedDict(epoch=3), "holds no tensors"),
        ({"state_dict": {}}, "holds no tensors"),
        (nn.ReLU(), "holds no tensors"),
        ([torch.ones(2)], "neither a state dict nor a module"),
        (torch.ones(2), "neither a state dict nor a module"),
        ({"x": torch.ones(2).to_sparse()}, "x is a _rebuild_sparse_tensor"),
        ({"x": torch.ones(2, device="meta")}, "x is a _rebuild_meta_tensor_no_storage"),
        ({"x": torch.ones(2).to(torch.float8_e4m3fn)}, "storage of an unknown type"),
    ],
)
def test_files_without_usable_tensors_are_refused(
    content: Any, complaint: str, tmp_path: Path
) -> None:
    saved("llama", tmp_path)
    torch.save(content, tmp_path / PICKLED)
    with pytest.raises(CheckpointError, match=complaint):
        convert(tmp_path)


def test_legacy_format_is_refused_with_advice(tmp_path: Path) -> None:
    model = saved("llama", tmp_path)
    torch.save(model.state_dict(), tmp_path / PICKLED, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"older than torch 1\.6 .* save it again"):
        convert(tmp_path)


def test_state_dict_without_a_config_is_refused_with_advice(tmp_path: Path) -> None:
    torch.save(module_of([("x", torch.ones(2))]).state_dict(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"name it pytorch_model\.bin"):
        convert(tmp_path / "model.pt")
    saved("llama", tmp_path / "m")
    shutil.move(tmp_path / "model.pt", tmp_path / "m" / "weights.pt")
    with pytest.raises(CheckpointError, match=r"to convert weights\.pt, pass that file"):
        convert(tmp_path / "m")
