"""Checkpoints as the codes that made them write them, read back as ours."""

import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig

from runtime.attention.base import Batch, SequenceSlice
from runtime.checkpoint import (
    Checkpoint,
    Dense,
    FactorPair,
    LayerWeights,
    load_checkpoint,
    write_checkpoint,
)
from runtime.checkpoint.assemble import PROJECTIONS, layer_prefix, named_tensors
from runtime.checkpoint.huggingface_config import to_huggingface
from runtime.checkpoint.sharing import basis_groups
from runtime.checkpoint.weights import linears_of, parameters_kept
from runtime.compress.forward import forward
from runtime.convert import Family, convert
from runtime.convert.pickled import read_pickled
from runtime.convert.stubs import tensors_of
from runtime.errors import CheckpointError
from runtime.kv.pages import pages_for
from runtime.models.model import Model
from tests.runtime.tiny import CONFIG, tiny_checkpoint

RAGGED = (5, 3, 8, None, 17, 9, 12)
EVEN = (6,) * 7


class Node(nn.Module):
    """A module with the given parameters and modules, of no class that a reader could know."""

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
    """Pickled beside the model; nobody asks what it is."""

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


def save_model(checkpoint: Checkpoint, tensors: Iterator[tuple[str, Tensor]], path: Path) -> None:
    model = Node()
    for name, tensor in tensors:
        model.put(name, tensor)
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
    found = dict(tensors)
    if pickled:
        torch.save(found, folder / "pytorch_model.bin")
    else:
        save_file(
            {n: t.clone().contiguous() for n, t in found.items()}, folder / "model.safetensors"
        )


Rename = Callable[[str, str], str]
"""The name of a projection's factor, ``u`` or ``v``, in a family."""


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


def same(made: Checkpoint, expected: Checkpoint) -> None:
    """Equal tensors under equal names, and equal logits of the serving model."""
    theirs = dict(named_tensors(expected))
    ours = dict(named_tensors(made))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].float(), theirs[name].float()) for name in ours)
    assert made.keep == pytest.approx(parameters_kept(expected), abs=1e-4)


@pytest.mark.parametrize("rename", [svd_llm, dobi, asvd])
@pytest.mark.parametrize("ranks", [RAGGED, EVEN])
def test_pickled_models(rename: Rename, ranks: tuple[int | None, ...], tmp_path: Path) -> None:
    expected = tiny_checkpoint(ranks=ranks)
    save_model(expected, renamed(expected, rename), tmp_path / "model.pt")
    made, source = convert(tmp_path / "model.pt")
    assert source.family is (Family.SVD_LLM if rename is svd_llm else Family.LINEAR_PAIR)
    same(made, expected)
    assert made.config == replace(expected.config, eos_token_ids=made.config.eos_token_ids)


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize(
    ("rename", "architecture"),
    [
        (svd_llm_v2, "LlamaForCausalLM"),
        (asvd, "ASVDLlamaForCausalLM"),
        (svd_llm, "LlamaForCausalLM"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_folders(
    rename: Rename, architecture: str, pickled: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    expected = tiny_checkpoint(ranks=RAGGED)
    tensors = ((name, tensor.to(dtype)) for name, tensor in renamed(expected, rename))
    save_folder(expected, tensors, tmp_path / "m", architecture=architecture, pickled=pickled)
    made, source = convert(tmp_path / "m")
    assert source.dtype == dtype
    assert made.embedding.dtype == dtype
    for layer, other in zip(made.layers, expected.layers, strict=True):
        for (_, ours), (_, theirs) in zip(linears_of(layer), linears_of(other), strict=True):
            assert type(ours) is type(theirs)
            if isinstance(ours, FactorPair) and isinstance(theirs, FactorPair):
                assert torch.equal(ours.u, theirs.u.to(dtype))
                assert torch.equal(ours.v, theirs.v.to(dtype))


def shared_checkpoint() -> Checkpoint:
    """Two layers that share the bases of all but o and down, as Basis Sharing pairs them."""
    checkpoint = tiny_checkpoint(ranks=(7, 7, 7, 6, 9, 9, 6))
    first, second = checkpoint.layers
    shared = {
        name: replace(getattr(second, name), v=getattr(first, name).v)
        for name in ("q", "k", "v", "gate", "up")
    }
    return replace(checkpoint, layers=(first, replace(second, **shared)))


def basis_sharing(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Names as in Basis Sharing's state dicts: bases in the layers, and once more in lists."""
    for name, tensor in named_tensors(checkpoint):
        if name.endswith(".v.weight"):
            yield name.removesuffix("_proj.v.weight") + "_basis.weight", tensor
            part = name.split(".")
            yield f"model.{part[4].removesuffix('_proj')}_basis.{part[2]}.weight", tensor
        else:
            yield name.replace(".u.weight", ".weight"), tensor


def bases_of(layer: LayerWeights) -> Iterator[tuple[str, Tensor]]:
    for name, linear in linears_of(layer):
        if isinstance(linear, FactorPair):
            yield name, linear.v


def copied(layer: LayerWeights) -> LayerWeights:
    """The same layer, its bases its own."""
    pairs: dict[str, Any] = {
        name: replace(getattr(layer, name), v=v.clone()) for name, v in bases_of(layer)
    }
    return replace(layer, **pairs)


@pytest.mark.parametrize("pickled", [True, False])
def test_bases_that_layers_share_are_one_tensor(pickled: bool, tmp_path: Path) -> None:
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
    assert source.family is Family.BASIS_SHARING
    assert basis_groups(made) == groups
    same(made, expected)
    write_checkpoint(made, tmp_path / "ours")
    again = load_checkpoint(tmp_path / "ours")
    assert basis_groups(again) == groups
    assert dict(bases_of(again.layers[1]))["q"] is dict(bases_of(again.layers[0]))["q"]
    same(again, expected)
    apart = tmp_path / "apart"
    write_checkpoint(replace(made, layers=tuple(map(copied, made.layers))), apart)
    bases = sum(v.nbytes for name, v in bases_of(made.layers[0]) if name not in ("o", "down"))
    saved = (apart / "model.safetensors").stat().st_size
    assert saved - (tmp_path / "ours" / "model.safetensors").stat().st_size >= bases


def test_a_model_keeps_a_shared_basis_once_and_computes_the_same() -> None:
    shared = shared_checkpoint()
    model = Model(shared)
    first, second = model._layers
    one, other = (vars(layer)["_parts"] for layer in (first, second))
    assert one.qkv._first is other.qkv._first
    assert one.o.product._first is not other.o.product._first
    tokens = list(range(1, 30))
    cache = model.new_cache(4)
    pages = list(range(pages_for(len(tokens), 16)))
    got = model.forward(Batch.of([SequenceSlice(tokens, 0, pages)]), cache)
    expected = forward(shared, torch.tensor([tokens]))[0, -1:]
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)  # KV is bf16


def test_biases_of_a_factor_pair(tmp_path: Path) -> None:
    """SVD-LLM has them on U; Dobi-SVD on the first factor, with one on the second never set."""
    expected = tiny_checkpoint(bias=True, ranks=EVEN)
    facts: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}

    def on_u() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in renamed(expected, svd_llm):
            owner = name.removesuffix(".bias")
            yield (svd_llm(owner, "u") + ".bias" if name.endswith("_proj.bias") else name), tensor

    def on_a() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in renamed(expected, dobi):
            owner = name.removesuffix(".bias")
            if name.endswith("_proj.bias"):
                yield f"{owner}.ALinear.bias", tensor
                yield f"{owner}.BLinear.bias", torch.full_like(tensor, 9.0)
            else:
                yield name, tensor

    for number, tensors in enumerate((on_u(), on_a())):
        save_folder(expected, tensors, tmp_path / str(number), **facts)
        made, _ = convert(tmp_path / str(number))
        same(made, expected)


def test_a_factorized_head_becomes_dense(tmp_path: Path) -> None:
    expected = tiny_checkpoint(ranks=EVEN)
    generator = torch.Generator().manual_seed(3)
    u = torch.randn(CONFIG.vocab_size, 6, generator=generator)
    v = torch.randn(6, CONFIG.hidden_size, generator=generator)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in renamed(expected, asvd):
            if name != "lm_head.weight":
                yield name, tensor
        yield "lm_head.ALinear.weight", u
        yield "lm_head.BLinear.weight", v

    save_folder(expected, tensors(), tmp_path / "m")
    made, _ = convert(tmp_path / "m")
    torch.testing.assert_close(made.lm_head, u @ v)


def test_a_converted_checkpoint_comes_back_from_its_file(tmp_path: Path) -> None:
    expected = tiny_checkpoint(ranks=RAGGED)
    save_model(expected, renamed(expected, svd_llm), tmp_path / "model.pt")
    made, _ = convert(tmp_path / "model.pt", torch.bfloat16)
    write_checkpoint(made, tmp_path / "ours")
    again = load_checkpoint(tmp_path / "ours", dtype=torch.bfloat16)
    same(again, made)
    assert again.model_hash == made.model_hash
    with pytest.raises(CheckpointError, match="canonical checkpoint already"):
        convert(tmp_path / "ours")


def test_dense_models_of_hugging_face(tmp_path: Path) -> None:
    expected = tiny_checkpoint()
    save_folder(expected, named_tensors(expected), tmp_path / "m", pickled=True)
    made, source = convert(tmp_path / "m")
    assert source.family is Family.DENSE
    same(made, expected)
    assert all(isinstance(x, Dense) for layer in made.layers for _, x in linears_of(layer))


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_nothing_that_a_pickle_names_is_run(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pt"
    torch.save({"model": Bomb(tmp_path / "ran"), "weights": torch.ones(3)}, path)
    content = read_pickled(path)
    assert torch.equal(content["weights"], torch.ones(3))
    assert not (tmp_path / "ran").exists()
    with pytest.raises(CheckpointError):
        convert(path)
    assert not (tmp_path / "ran").exists()


def rewritten(path: Path, change: Callable[[str, bytes], bytes | None]) -> None:
    """The same zip file, its members changed or left out."""
    with zipfile.ZipFile(path) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members:
            if (new := change(name, data)) is not None:
                archive.writestr(name, new)


@pytest.mark.parametrize(
    "change",
    [
        lambda name, data: None if name.endswith("/data/0") else data,
        lambda name, data: data[:-4] if name.endswith("/data/0") else data,
        lambda name, data: data[: len(data) // 2] if name.endswith("data.pkl") else data,
        lambda name, data: None if name.endswith("data.pkl") else data,
        lambda name, data: b"big" if name.endswith("byteorder") else data,
        lambda name, data: pickle.dumps(3) if name.endswith("data.pkl") else data,
    ],
)
def test_damaged_pickles_are_refused(
    change: Callable[[str, bytes], bytes | None], tmp_path: Path
) -> None:
    expected = tiny_checkpoint(ranks=EVEN)
    save_model(expected, renamed(expected, svd_llm), tmp_path / "m.pt")
    rewritten(tmp_path / "m.pt", change)
    with pytest.raises(CheckpointError):
        convert(tmp_path / "m.pt")


def test_tensors_outside_of_their_storage_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    torch.save({"x": torch.arange(10.0)[2:8]}, path)
    rewritten(
        path,
        lambda name, data: data.replace(b"K\x06\x85", b"K\x60\x85") if "pkl" in name else data,
    )
    with pytest.raises(CheckpointError, match="storage"):
        read_pickled(path)


@pytest.mark.parametrize("break_it", ["mixed", "one factor", "misfit", "v bias", "opt", "copy"])
def test_what_does_not_fit_is_named(break_it: str, tmp_path: Path) -> None:
    expected = tiny_checkpoint(ranks=EVEN)
    rename = {"one factor": dobi, "misfit": dobi}.get(break_it, svd_llm)
    tensors = dict(renamed(expected, rename))
    owner = layer_prefix(0) + PROJECTIONS["q"]
    match break_it:
        case "mixed":
            tensors[f"{owner}.u_proj.weight"] = torch.ones(96, 6)
        case "one factor":
            del tensors[f"{owner}.BLinear.weight"]
        case "misfit":
            tensors[f"{owner}.BLinear.weight"] = torch.ones(96, 5)
        case "v bias":
            tensors[svd_llm(owner, "v") + ".bias"] = torch.ones(6)
        case "opt":
            tensors["model.decoder.layers.0.fc1_u_proj.weight"] = torch.ones(2, 2)
        case "copy":
            shared = shared_checkpoint()
            tensors = dict(basis_sharing(shared))
            tensors["model.q_basis.1.weight"] = torch.ones(7, 48)
    save_folder(expected, iter(tensors.items()), tmp_path / "m", pickled=True)
    with pytest.raises(CheckpointError):
        convert(tmp_path / "m")


def test_parameters_with_attributes_are_read(tmp_path: Path) -> None:
    """Transformers marks those it has loaded, and torch then pickles them in another way."""
    expected = tiny_checkpoint(bias=True, ranks=EVEN)
    tensors = dict(renamed(expected, svd_llm))
    for name in list(tensors):
        if name.endswith("_proj.bias"):
            owner = svd_llm(name.removesuffix(".bias"), "u")
            tensors[f"{owner}.bias"] = tensors.pop(name)
    for number, name in enumerate(tensors):
        if number % 2:
            tensors[name] = nn.Parameter(tensors[name], requires_grad=False)
        tensors[name]._is_hf_initialized = True  # type: ignore[attr-defined]
    facts: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}
    save_folder(expected, iter(tensors.items()), tmp_path / "m", pickled=True, **facts)
    made, _ = convert(tmp_path / "m")
    same(made, expected)


def test_the_head_of_a_tied_model_that_was_factorized_is_its_own(tmp_path: Path) -> None:
    tied = replace(CONFIG, tied_embeddings=True)
    expected = tiny_checkpoint(ranks=EVEN, config=tied)
    u, v = torch.randn(CONFIG.vocab_size, 6), torch.randn(6, CONFIG.hidden_size)
    tensors = dict(renamed(expected, asvd)) | {
        "lm_head.ALinear.weight": u,
        "lm_head.BLinear.weight": v,
    }
    save_folder(expected, iter(tensors.items()), tmp_path / "m")
    made, _ = convert(tmp_path / "m")
    assert not made.config.tied_embeddings
    torch.testing.assert_close(made.lm_head, u @ v)
    assert torch.equal(made.embedding, expected.embedding)


def test_what_is_left_out_has_no_say_in_the_type(tmp_path: Path) -> None:
    expected = tiny_checkpoint(ranks=EVEN)
    tensors = {name: tensor.half() for name, tensor in renamed(expected, svd_llm)}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_folder(expected, iter(tensors.items()), tmp_path / "m", pickled=True)
    assert convert(tmp_path / "m")[1].dtype == torch.float16


def test_tensors_that_share_memory_are_written_apart(tmp_path: Path) -> None:
    expected = tiny_checkpoint(ranks=EVEN)
    tensors = dict(renamed(expected, svd_llm))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_folder(expected, iter(tensors.items()), tmp_path / "m", pickled=True)
    made, _ = convert(tmp_path / "m")
    write_checkpoint(made, tmp_path / "ours")
    again = load_checkpoint(tmp_path / "ours")
    assert torch.equal(again.lm_head, expected.embedding)


def crafted(path: Path, program: bytes, storage: bytes = b"", *, packed: bool = False) -> Path:
    """A file of torch with this pickle, and one storage."""
    kind = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/data/0", storage)
    return path


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x02}(" + b"(" + b"\x85" * 100_000 + b"K\x01u.",  # a key of tuples in tuples
        b"\x80\x02}\x8a\x09" + b"\xff" * 8 + b"\x00K\x01s.",  # a key beyond 2^48
        b"\x80\x02ctorch._utils\n_rebuild_parameter\n}X\x01\x00\x00\x00aK\x01sb.",  # a state
        b"\x80\x02K\x07)R.",  # a call of a number
        b"\x80\x02K\x07)\x81.",  # an object of a number
        b"\x80\x02(cos\nsystem\nX\x02\x00\x00\x00lso.",  # OBJ
        b"(S'ls'\nios\nsystem\n.",  # INST
        b"\x80\x02\x82\x01.",  # EXT1
        b"\x80\x02Pabc\n.",  # PERSID
        b"\x80\x02]K\x01K\x02s.",  # an item of a list
        b"\x80\x02K\x01Q.",  # a storage that is a number
    ],
)
def test_hostile_pickles_are_refused_at_once(program: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        read_pickled(crafted(tmp_path / "x.pt", program))


def test_a_storage_is_not_unpacked_and_not_stretched(tmp_path: Path) -> None:
    expanded = torch.ones(4).expand(1000, 4)
    torch.save({"x": expanded}, tmp_path / "wide.pt")
    with pytest.raises(CheckpointError, match="more elements than its storage"):
        read_pickled(tmp_path / "wide.pt")
    torch.save({"x": torch.zeros(4)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as archive:
        program = next(archive.read(n) for n in archive.namelist() if n.endswith("data.pkl"))
    crafted(tmp_path / "fine.pt", program, bytes(16))
    assert torch.equal(read_pickled(tmp_path / "fine.pt")["x"], torch.zeros(4))
    crafted(tmp_path / "packed.pt", program, bytes(16), packed=True)
    with pytest.raises(CheckpointError, match="does not have its"):
        read_pickled(tmp_path / "packed.pt")


def test_a_module_within_itself_has_an_end(tmp_path: Path) -> None:
    model = Node()
    model.add_module("inner", model)
    torch.save({"model": model}, tmp_path / "m.pt")
    content = read_pickled(tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="without end"):
        tensors_of(content["model"])
