"""OPT and Phi-3: served over pages and by several ranks, and compressed."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.opt import modeling_opt
from transformers.models.phi3 import modeling_phi3

from runtime.attention.base import Batch, SequenceSlice
from runtime.checkpoint import Dense, FactorPair, load_checkpoint, write_checkpoint
from runtime.checkpoint.assemble import nbytes
from runtime.checkpoint.slices import rank_checkpoint
from runtime.checkpoint.weights import Checkpoint, linears_of
from runtime.engine import Add
from runtime.errors import CheckpointError
from runtime.gemm.model import build_gemm_model, unsupported_by_gemm
from runtime.kv import fdc, palu, shard
from runtime.kv.calibration import Artifact, KVMoments
from runtime.kv.registry import COMPRESSED
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.offline.compress import Method, compress
from runtime.offline.compress.forward import forward
from runtime.offline.compress.kv_moments import kv_moments
from runtime.pages.plan import PageCount
from runtime.parallel.partition import Partition, Scheme
from tests.runtime.checkpoint.samples import (
    LONGROPE,
    change_config,
    change_weights,
    phi3,
    save_random,
    save_with_noise,
)
from tests.runtime.device import DEVICE
from tests.runtime.rank_threads import ThreadGroup, on_ranks
from tests.runtime.tiny import drive, engine_of, prompt_of, request_of

SERVED = ["opt", "opt-untied", "phi3", "phi3-short", "phi3-long"]
VOCAB = 97
PROMPT, DECODED = 50, 12
"""Tokens of the prompt and of the output. ``phi3-long`` extends a context of 32 tokens."""
CALIBRATIONS: dict[str, Callable[[Iterable[KVMoments], str], Artifact]] = {
    "fdc": lambda moments, model: fdc.calibrate(moments, fdc.FdcOptions(), model),
    "palu": lambda moments, model: palu.calibrate(moments, palu.PaluOptions(), model),
    "shard": lambda moments, model: shard.calibrate(moments, shard.ShardOptions(), model),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns the folder of a model."""
    root = tmp_path_factory.mktemp("models")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            save_random(name, root / name)
        return root / name

    return folder


@pytest.fixture
def rounded_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round K and V to bf16 in transformers, as KV format `dense` does."""
    for module in (modeling_opt, modeling_phi3):
        attend = module.eager_attention_forward

        def rounded(
            layer: Any,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            *more: Any,
            attend: Any = attend,
            **named: Any,
        ) -> Any:
            return attend(layer, q, k.bfloat16().float(), v.bfloat16().float(), *more, **named)

        monkeypatch.setattr(module, "eager_attention_forward", rounded)


def peer_logits(folder: Path, tokens: list[int]) -> Tensor:
    """Return the logits of transformers, `[len(tokens), vocab]`."""
    transformers.logging.disable_progress_bar()
    peer: Any = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    with torch.inference_mode():
        logits: Tensor = peer(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def tokens_of(count: int) -> list[int]:
    return list(prompt_of(count, vocab=VOCAB))


def paged_logits(model: Model, chunk: int = 20) -> Tensor:
    """Return the logits of a prompt that is prefilled in chunks, then decoded token by token."""
    tokens = tokens_of(PROMPT + DECODED)
    cache = model.new_cache(PageCount(6))
    ends = [*range(chunk, PROMPT, chunk), *range(PROMPT, len(tokens) + 1)]
    found = []
    for first, end in zip([0, *ends], ends, strict=False):
        batch = Batch.of([SequenceSlice(tokens[first:end], first, [3, 0, 5, 2])])
        every = replace(batch, logit_rows=torch.arange(end - first))
        found.append(model.vocabulary.whole(model.forward(every, cache)))
    return torch.cat(found)


@pytest.mark.usefixtures("rounded_kv")
@pytest.mark.parametrize("name", SERVED)
def test_paged_logits_equal_those_of_transformers(
    name: str, folders: Callable[[str], Path]
) -> None:
    checkpoint = load_checkpoint(folders(name))
    model = build_model(checkpoint)
    assert model.weight_bytes == nbytes(checkpoint)
    expected = peer_logits(folders(name), tokens_of(PROMPT + DECODED))
    # Both compute in fp32, but add in different orders. A K or V may be rounded to another bf16.
    torch.testing.assert_close(paged_logits(model), expected, rtol=0, atol=5e-3)
    assert (paged_logits(model) - expected).abs().mean() < 1e-3


@pytest.mark.usefixtures("rounded_kv")
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("replay", [False, True])
def test_engine_generates_the_tokens_of_transformers(
    name: str, replay: bool, folders: Callable[[str], Path]
) -> None:
    engine = engine_of(build_model(load_checkpoint(folders(name))), replay=replay)
    lengths = (33, 40, 60)
    requests = [
        replace(request_of(f"r{n}", n, DECODED), tokens=tuple(tokens_of(n))) for n in lengths
    ]
    record = drive(engine, *map(Add, requests))
    for n in lengths:
        output = record.output(f"r{n}")
        logits = peer_logits(folders(name), [*tokens_of(n), *output])[n - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        # Greedy tokens are the best of transformers, or as good within its rounding.
        assert (logits.amax(1) - chosen).max() < 5e-3


@pytest.mark.parametrize("kv_format", [*COMPRESSED, *CALIBRATIONS])
@pytest.mark.parametrize("name", ["opt", "phi3-long"])
def test_compressed_kv_formats_are_close_to_dense(
    name: str, kv_format: str, tmp_path: Path
) -> None:
    """K is stored before RoPE in some of them, and OPT has none."""
    save_random(name, tmp_path)
    change_config(tmp_path, max_position_embeddings=400)
    if name == "opt":
        _longer_positions(tmp_path, 400)
    checkpoint = load_checkpoint(tmp_path)
    request = replace(request_of("r", 200, 8), tokens=tuple(tokens_of(200)))
    dense = drive(engine_of(build_model(checkpoint)), Add(request))
    if kv_format in CALIBRATIONS:
        rows = torch.randint(0, VOCAB, (4, 200), generator=torch.Generator().manual_seed(2))
        moments = kv_moments(checkpoint, rows)
        artifact = CALIBRATIONS[kv_format](moments, checkpoint.model_hash)
        artifact.save(tmp_path / "calibration")
        kv_format = f"{kv_format}:{tmp_path / 'calibration'}"
    model = build_model(checkpoint, kv_format=kv_format)
    found = drive(engine_of(model, pages=32, stored=32), Add(request))
    first, own = dense.tokens["r", 0][0], found.tokens["r", 0][0]
    assert own.token == first.token, "the prompt attends to full precision"
    assert own.logprob == pytest.approx(first.logprob, abs=1e-3)
    equal = sum(a == b for a, b in zip(dense.output("r"), found.output("r"), strict=True))
    assert equal >= 4, "of 8 tokens, which follow from the earlier ones"


def _longer_positions(folder: Path, length: int) -> None:
    def change(weights: dict[str, Tensor]) -> None:
        rows = torch.randn(length + 2, 48, generator=torch.Generator().manual_seed(1))
        weights["model.decoder.embed_positions.weight"] = rows

    change_weights(folder, change)


@pytest.mark.few(5)
@pytest.mark.parametrize("scheme", list(Scheme))
@pytest.mark.parametrize("name", ["opt", "opt-untied", "phi3-long"])
@pytest.mark.parametrize("factorized", [False, True])
def test_two_ranks_have_the_logits_of_one(
    name: str, scheme: Scheme, factorized: bool, folders: Callable[[str], Path]
) -> None:
    checkpoint = load_checkpoint(folders(name))
    if factorized:
        checkpoint = compressed(checkpoint, Method.SVD_LLM)
    expected = paged_logits(build_model(checkpoint))

    def run(group: ThreadGroup) -> Tensor:
        partition = Partition.of(checkpoint.config, group.rank, 2, scheme)
        return paged_logits(build_model(rank_checkpoint(checkpoint, partition), group=group))

    for logits in on_ranks(2, run):
        torch.testing.assert_close(logits, expected, rtol=0, atol=5e-3)


def test_rank_reads_its_part_of_a_folder(folders: Callable[[str], Path]) -> None:
    for name in ("opt", "phi3"):
        whole = load_checkpoint(folders(name))
        part = load_checkpoint(folders(name), part=lambda config: Partition.of(config, 1, 2))
        sliced = rank_checkpoint(whole, Partition.of(whole.config, 1, 2))
        for own, other in zip(part.layers, sliced.layers, strict=True):
            for (_, one), (_, two) in zip(linears_of(own), linears_of(other), strict=True):
                assert isinstance(one, Dense)
                assert isinstance(two, Dense)
                assert torch.equal(one.weight, two.weight)
        biases = [part.layers[0].fc2.bias, part.layers[0].o.bias] if name == "opt" else []
        assert biases == [None] * len(biases), "rank 0 adds the biases of the residual stream"
        assert (part.positions is None) == (name == "phi3")


def compressed(checkpoint: Checkpoint, method: Method) -> Checkpoint:
    rows = torch.randint(0, VOCAB, (8, 40), generator=torch.Generator().manual_seed(2))
    made, _ = compress(checkpoint, rows, 0.7, rank_multiple=2, method=method)
    return made


@pytest.mark.parametrize("name", ["opt", "phi3-long"])
def test_latents_of_a_compressed_model_are_close_to_dense_kv(
    name: str, folders: Callable[[str], Path]
) -> None:
    """OPT has biases of K and V and no RoPE."""
    checkpoint = compressed(load_checkpoint(folders(name)), Method.SVD_LLM)
    expected = paged_logits(build_model(checkpoint))
    found = paged_logits(build_model(checkpoint, kv_format="lowrank"))
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("name", ["opt", "phi3-long"])
def test_compressed_model_is_written_and_loaded(
    name: str, method: Method, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    dense = load_checkpoint(folders(name))
    made = compressed(dense, method)
    assert any(isinstance(each, FactorPair) for _, each in linears_of(made.layers[0]))
    write_checkpoint(made, tmp_path / "made")
    again = load_checkpoint(tmp_path / "made")
    assert again.config == dense.config
    assert again.model_hash == made.model_hash
    tokens = torch.tensor([tokens_of(60)])
    torch.testing.assert_close(forward(again, tokens), forward(made, tokens))
    # KV is rounded to bf16 in pages only.
    served = paged_logits(build_model(again))
    plain = forward(again, torch.tensor([tokens_of(PROMPT + DECODED)]))[0]
    assert (served - plain).abs().max() < 0.05 * plain.abs().max()


def test_calibration_longer_than_the_learned_positions_is_refused(
    folders: Callable[[str], Path],
) -> None:
    rows = torch.zeros(2, 97, dtype=torch.int64)
    with pytest.raises(CheckpointError, match="97 tokens exceed the model's 96 positions"):
        compress(load_checkpoint(folders("opt")), rows, 0.7)


@pytest.mark.parametrize("name", SERVED)
def test_dense_model_is_written_and_loaded(
    name: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    dense = load_checkpoint(folders(name))
    write_checkpoint(dense, tmp_path / "made")
    again = load_checkpoint(tmp_path / "made")
    assert again.config == dense.config
    tokens = torch.tensor([tokens_of(60)])
    assert torch.equal(forward(again, tokens), forward(dense, tokens))


@pytest.mark.triton
@pytest.mark.long
def test_packed_gpu_weights_run_phi3(tmp_path: Path) -> None:
    """Heads have 96 dimensions, as in Phi-3 Mini."""
    factors = [1.0 + at / 24 for at in range(48)]
    rope = LONGROPE | {"short_factor": factors, "long_factor": factors[::-1]}
    torch.manual_seed(3)
    facts = {"hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = phi3(**facts, rope_parameters=rope, original_max_position_embeddings=32)
    save_with_noise(model, tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.config.head_dim == 96
    batch = Batch.of([SequenceSlice(tokens_of(7), 0, (0,))], DEVICE)
    made = (
        build_model(checkpoint, device=DEVICE),
        build_gemm_model(checkpoint, device=DEVICE),
    )
    plain, packed = (model.forward(batch, model.new_cache(PageCount(1))) for model in made)
    # The GEMM kernels compute in bf16, torch in fp32 here: both have errors of 2 to 4 % in bf16.
    assert (packed - plain).norm() < 0.06 * plain.norm()


def test_packed_gpu_weights_refuse_opt(folders: Callable[[str], Path]) -> None:
    checkpoint = load_checkpoint(folders("opt"))
    reason = unsupported_by_gemm(checkpoint, "cuda", torch.bfloat16)
    assert reason == "learned embeddings of positions have no packed GPU weights"
