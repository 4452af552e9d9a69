"""Checkpoints of each supported format, converted to canonical ones."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runtime.checkpoint import Dense, FactorPair, load_checkpoint, write_checkpoint
from runtime.checkpoint.assemble import named_tensors
from runtime.checkpoint.weights import linears_of
from runtime.errors import CheckpointError
from runtime.offline.convert import SourceFormat, convert
from tests.runtime.offline.convert.samples import (
    EVEN,
    RAGGED,
    Rename,
    assert_same,
    asvd,
    basis_sharing,
    dobi,
    module_of,
    renamed,
    save_folder,
    save_model,
    shared_checkpoint,
    svd_llm,
    svd_llm_v2,
)
from tests.runtime.tiny import CONFIG, tiny_checkpoint


@pytest.mark.parametrize("rename", [svd_llm, dobi, asvd])
@pytest.mark.parametrize("ranks", [RAGGED, EVEN])
def test_pickled_models_are_converted(
    rename: Rename, ranks: tuple[int | None, ...], tmp_path: Path
) -> None:
    expected = tiny_checkpoint(ranks=ranks)
    save_model(expected, renamed(expected, rename), tmp_path / "model.pt")
    made, source = convert(tmp_path / "model.pt")
    assert source.format is (
        SourceFormat.SVD_LLM if rename is svd_llm else SourceFormat.LINEAR_PAIR
    )
    assert_same(made, expected)
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
def test_folders_are_converted_in_their_dtype(
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


def test_biases_of_factor_pairs_are_converted(tmp_path: Path) -> None:
    """SVD-LLM stores biases with U, Dobi-SVD with A; biases of B are uninitialized."""
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
        assert_same(made, expected)


def test_factorized_lm_head_becomes_dense(tmp_path: Path) -> None:
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


def test_factorized_lm_head_of_tied_model_is_untied(tmp_path: Path) -> None:
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


def test_dense_hugging_face_folder_is_converted(tmp_path: Path) -> None:
    expected = tiny_checkpoint()
    save_folder(expected, named_tensors(expected), tmp_path / "m", pickled=True)
    made, source = convert(tmp_path / "m")
    assert source.format is SourceFormat.DENSE
    assert_same(made, expected)
    assert all(isinstance(x, Dense) for layer in made.layers for _, x in linears_of(layer))


def test_converted_checkpoint_is_written_and_loaded(tmp_path: Path) -> None:
    expected = tiny_checkpoint(ranks=RAGGED)
    save_model(expected, renamed(expected, svd_llm), tmp_path / "model.pt")
    made, _ = convert(tmp_path / "model.pt")
    write_checkpoint(made, tmp_path / "ours", torch.bfloat16)
    again = load_checkpoint(tmp_path / "ours", dtype=None)
    for (_, ours), (_, theirs) in zip(named_tensors(again), named_tensors(expected), strict=True):
        assert torch.equal(ours, theirs.bfloat16())
    assert again.keep == made.keep
    with pytest.raises(CheckpointError, match="already a canonical checkpoint"):
        convert(tmp_path / "ours")


def test_parameters_with_attributes_are_read(tmp_path: Path) -> None:
    """Transformers sets an attribute on parameters, which torch then pickles differently."""
    expected = tiny_checkpoint(bias=True, ranks=EVEN)
    tensors = dict(renamed(expected, svd_llm))
    for name in list(tensors):
        if name.endswith("_proj.bias"):
            owner = svd_llm(name.removesuffix(".bias"), "u")
            tensors[f"{owner}.bias"] = tensors.pop(name)
    facts: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}
    save_folder(expected, iter(()), tmp_path / "m", pickled=True, **facts)
    for pickled in (nn.Module.state_dict, lambda model: model.state_dict(keep_vars=True)):
        model = module_of(tensors.items())
        for number, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(number % 2 == 0)
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        torch.save(pickled(model), tmp_path / "m" / "pytorch_model.bin")
        made, _ = convert(tmp_path / "m")
        assert_same(made, expected)


def test_ignored_tensors_do_not_affect_the_stored_dtype(tmp_path: Path) -> None:
    expected = tiny_checkpoint(ranks=EVEN)
    tensors = {name: tensor.half() for name, tensor in renamed(expected, svd_llm)}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_folder(expected, iter(tensors.items()), tmp_path / "m", pickled=True)
    assert convert(tmp_path / "m")[1].dtype == torch.float16


def test_tensors_that_share_memory_are_written_separately(tmp_path: Path) -> None:
    expected = tiny_checkpoint(ranks=EVEN)
    tensors = dict(renamed(expected, svd_llm))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_folder(expected, iter(tensors.items()), tmp_path / "m", pickled=True)
    made, _ = convert(tmp_path / "m")
    write_checkpoint(made, tmp_path / "ours")
    again = load_checkpoint(tmp_path / "ours")
    assert torch.equal(again.lm_head, expected.embedding)


@pytest.mark.parametrize("defect", ["mixed", "one factor", "misfit", "v bias", "opt", "copy"])
def test_inconsistent_tensors_are_refused(defect: str, tmp_path: Path) -> None:
    expected = tiny_checkpoint(ranks=EVEN)
    rename = {"one factor": dobi, "misfit": dobi}.get(defect, svd_llm)
    tensors = dict(renamed(expected, rename))
    owner = "model.layers.0.self_attn.q_proj"
    match defect:
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
