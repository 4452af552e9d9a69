"""Checkpoints in the formats of other factorization projects."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.assemble import named_tensors
from runtime.checkpoint.huggingface_config import to_huggingface
from runtime.checkpoint.weights import parameters_kept
from tests.runtime.tiny import tiny_checkpoint

RAGGED = (5, 3, 8, None, 17, 9, 12)
EVEN = (6,) * 7

Rename = Callable[[str, str], str]
"""Maps a linear's name and a factor, ``u`` or ``v``, to the factor's tensor name in a format."""


class Node(nn.Module):
    """A module of a class unknown to the reader, filled with parameters by dotted name."""

    def put(self, path: str, tensor: Tensor) -> None:
        name, _, rest = path.partition(".")
        if not rest:
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            return
        if name not in self._modules:
            self.add_module(name, Node())
        child = self._modules[name]
        assert isinstance(child, Node)
        child.put(rest, tensor)


class Tokenizer:
    """An object of an unknown class, pickled beside the model."""

    def __init__(self) -> None:
        self.words = {"a": 1}


def huggingface(checkpoint: Checkpoint) -> LlamaConfig:
    facts = to_huggingface(checkpoint.config)
    kept = [
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    ]
    rope = {"rope_type": "default", "rope_theta": facts["rope_parameters"]["rope_theta"]}
    return LlamaConfig(
        **{name: facts[name] for name in kept}, rope_parameters=rope, attention_bias=False
    )


def module_of(tensors: Iterable[tuple[str, Tensor]]) -> Node:
    """Return a module with these parameters."""
    model = Node()
    for name, tensor in tensors:
        model.put(name, tensor)
    return model


def save_model(checkpoint: Checkpoint, tensors: Iterator[tuple[str, Tensor]], path: Path) -> None:
    model = module_of(tensors)
    model.config = huggingface(checkpoint)
    model.register_buffer("rotary", torch.ones(3), persistent=False)
    torch.save({"model": model, "tokenizer": Tokenizer()}, path)


def save_folder(
    checkpoint: Checkpoint,
    tensors: Iterator[tuple[str, Tensor]],
    folder: Path,
    *,
    architecture: str = "LlamaForCausalLM",
    pickled: bool = False,
    **facts: object,
) -> None:
    folder.mkdir(parents=True)
    config = {**to_huggingface(checkpoint.config), "architectures": [architecture], **facts}
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(module_of(tensors).state_dict(), folder / "pytorch_model.bin")
    else:
        separate = {name: tensor.clone().contiguous() for name, tensor in tensors}
        save_file(separate, folder / "model.safetensors")


def renamed(checkpoint: Checkpoint, rename: Rename) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in named_tensors(checkpoint):
        for factor in ("u", "v"):
            if name.endswith(f".{factor}.weight"):
                yield rename(name.removesuffix(f".{factor}.weight"), factor) + ".weight", tensor
                break
        else:
            yield name, tensor


def svd_llm(owner: str, factor: str) -> str:
    return owner.removesuffix("_proj") + f"_{factor}_proj"


def svd_llm_v2(owner: str, factor: str) -> str:
    return f"{owner}.{factor}_proj"


def dobi(owner: str, factor: str) -> str:
    return f"{owner}.{'A' if factor == 'v' else 'B'}Linear"


def asvd(owner: str, factor: str) -> str:
    return f"{owner}.{'A' if factor == 'u' else 'B'}Linear"


def shared_checkpoint() -> Checkpoint:
    """Return a model of two layers that share all bases except those of o and down."""
    checkpoint = tiny_checkpoint(ranks=(7, 7, 7, 6, 9, 9, 6))
    first, second = checkpoint.layers
    shared = {
        name: replace(getattr(second, name), v=getattr(first, name).v)
        for name in ("q", "k", "v", "gate", "up")
    }
    return replace(checkpoint, layers=(first, replace(second, **shared)))


def basis_sharing(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Yield the state dict of Basis Sharing: each basis in its layer, and again in a list."""
    for name, tensor in named_tensors(checkpoint):
        if name.endswith(".v.weight"):
            yield name.removesuffix("_proj.v.weight") + "_basis.weight", tensor
            part = name.split(".")
            yield f"model.{part[4].removesuffix('_proj')}_basis.{part[2]}.weight", tensor
        else:
            yield name.replace(".u.weight", ".weight"), tensor


def assert_same(made: Checkpoint, expected: Checkpoint) -> None:
    """Check that both checkpoints have equal tensors under equal names, and equal ``keep``."""
    theirs = dict(named_tensors(expected))
    ours = dict(named_tensors(made))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].float(), theirs[name].float()) for name in ours)
    assert made.keep == pytest.approx(parameters_kept(expected), abs=1e-4)
