"""Logits compared with transformers, and the batch invariance of matmuls."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from runtime.attention.base import Batch, SequenceSlice
from runtime.checkpoint import Checkpoint, Dense, FactorPair, checkpoint_path, load_checkpoint
from runtime.checkpoint.assemble import nbytes
from runtime.checkpoint.weights import moved
from runtime.errors import CheckpointError
from runtime.gemm.weights import PackedWeights
from runtime.layers import stored_weight
from runtime.layers.linear import PackedLinear, Projection
from runtime.models import model as model_module
from runtime.models.build import build_model
from runtime.models.kernel_plan_hash import kernel_plan_hash
from runtime.models.model import Model
from runtime.pages.plan import PageCount, pages_for
from tests.runtime.tiny import CONFIG, tiny_checkpoint, tiny_model

TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome. Water boils at one hundred "
    "degrees Celsius at sea level, but on a high mountain it boils at a lower temperature.",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n"
    "    return a\n\n\nprint([fibonacci(i) for i in range(10)])\n",
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nWhy is the sky "
    "blue? Answer in one sentence.<|im_end|>\n<|im_start|>assistant\nThe sky is blue because the "
    "molecules of the air scatter short wavelengths of sunlight more than long ones.<|im_end|>\n",
    "She opened the letter slowly, as if the paper itself might object. Inside there was a single "
    "line, written in pencil: meet me where the river turns. She read it twice, folded it along "
    "its old creases, and put on her coat. Outside, the first snow of the year had begun to fall.",
    "Entropy is a measure of the number of microscopic configurations that are consistent with "
    "the macroscopic state of a system. The second law of thermodynamics says that the entropy of "
    "an isolated system never decreases; heat flows from hot to cold, and not the other way.",
)


def logits_of(model: Model, tokens: list[int], chunk: int = 1 << 20) -> torch.Tensor:
    """Return logits after every token, `[len(tokens), vocab]`."""
    pages = list(range(pages_for(len(tokens), model.page_size)))[::-1]
    cache = model.new_cache(PageCount(len(pages)))
    parts = []
    for first in range(0, len(tokens), chunk):
        piece = tokens[first : first + chunk]
        batch = Batch.of([SequenceSlice(piece, first, pages)], model.device)
        every = replace(batch, logit_rows=torch.arange(len(piece)))
        parts.append(model.forward(every, cache))
    return torch.cat(parts)


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    try:
        path = checkpoint_path("smollm2-135m")
    except CheckpointError as missing:
        pytest.skip(str(missing))
    return load_checkpoint(path)


@pytest.mark.long
def test_smollm2_agrees_with_transformers_on_real_text(smollm2: Checkpoint) -> None:
    """Tolerances allow for bf16 KV: 99 % equal top-1 tokens; logits within 2 % of the maximum."""
    from runtime.offline.bench.engine import peer_of
    from services.tokenizer.loading import load_tokenizer

    tokenizer = load_tokenizer(checkpoint_path("smollm2-135m"))
    peer = peer_of(smollm2)
    model = build_model(smollm2)
    equal = positions = 0
    worst = 0.0
    for text in TEXTS:
        tokens = list(tokenizer.encode(text))
        ours = logits_of(model, tokens)
        with torch.inference_mode():
            theirs = peer(torch.tensor([tokens])).logits[0]
        equal += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        positions += len(tokens)
        error = (ours - theirs).abs().amax(-1) / theirs.abs().amax(-1)
        worst = max(worst, float(error.max()))
    assert positions > 250
    assert equal >= 0.99 * positions
    assert worst < 0.02, f"top-1 equal at {equal} of {positions}"


@pytest.mark.long
@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="before oneDNN 3.12, bits depend on the number of rows"
)
def test_smollm2_logits_do_not_depend_on_chunks_or_batch(smollm2: Checkpoint) -> None:
    model = build_model(smollm2)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(49152, (75,), generator=generator).tolist()
    whole = logits_of(model, tokens)
    for chunk in (32, 16, 1):
        assert torch.equal(logits_of(model, tokens, chunk), whole)
    others = [SequenceSlice(tokens[n : n + 9], 0, [9 + n]) for n in range(6)]
    batch = Batch.of([*others[:3], SequenceSlice(tokens, 0, [5, 1, 4, 0, 3]), *others[3:]])
    assert torch.equal(model.forward(batch, model.new_cache(PageCount(16)))[3], whole[-1])


def test_kernel_plan_hash_differs_by_dtype_and_factorization_but_not_weights() -> None:
    dense, factorized = tiny_model(), tiny_model(ranks=(5,) * 7)
    half = build_model(tiny_checkpoint(), dtype=torch.bfloat16)
    assert kernel_plan_hash(dense) == kernel_plan_hash(tiny_model(seed=4))
    assert len({kernel_plan_hash(model) for model in (dense, factorized, half)}) == 3


def test_models_name_no_kernels_of_one_kind_of_gpu() -> None:
    for path in Path(model_module.__file__).parent.iterdir():
        if path.suffix in {".py", ".md"}:
            assert not re.search("hopper|megakernel", path.read_text(), re.IGNORECASE), path


def test_bfloat16_model_runs_on_reference_attention() -> None:
    tokens = list(range(40))
    expected = logits_of(tiny_model(), tokens)
    got = logits_of(build_model(tiny_checkpoint(), dtype=torch.bfloat16), tokens)
    assert got.dtype == torch.float32
    # bf16 has 8 bits of precision; logits differ by a few percent of the largest.
    assert (got - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize("shared", [False, True])
def test_layers_packed_one_at_a_time_use_their_own_weights(shared: bool) -> None:
    """Packed weights are cached by tensor id, and a freed tensor's id may be reused."""
    ranks = (9, 5, None, 12, 17, 11, 24)
    checkpoint = tiny_checkpoint(ranks=ranks, config=replace(CONFIG, num_layers=12))
    if shared:
        first = checkpoint.layers[0].down
        assert isinstance(first, FactorPair)
        checkpoint = replace(
            checkpoint,
            layers=tuple(replace(each, down=first) for each in checkpoint.layers),
        )
    rounded: Checkpoint = moved(checkpoint, torch.device("cpu"), torch.bfloat16, {})
    first_logits, second_logits = (
        logits_of(build_model(one, dtype=torch.bfloat16), list(range(20)))
        for one in (checkpoint, rounded)
    )
    assert torch.equal(first_logits, second_logits)


def test_tied_embedding_is_stored_once() -> None:
    whole_lines = replace(CONFIG, hidden_size=64)
    tied = tiny_checkpoint(config=replace(whole_lines, tied_embeddings=True))
    untied = tiny_checkpoint(config=whole_lines)
    for device in ("cpu", "meta"):
        weights = PackedWeights.pack(tied, device)
        assert weights.embedding is weights.lm_head.weight
        weights = PackedWeights.pack(untied, device)
        assert weights.embedding is not weights.lm_head.weight
    assert nbytes(untied) - nbytes(tied) == untied.lm_head.nbytes


@pytest.mark.parametrize("shape", [(1, 1), (33, 1000), (64, 576), (576, 1536), (300, 77)])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_matmul_of_a_row_does_not_depend_on_the_batch(
    shape: tuple[int, int], biased: bool
) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    weight = torch.randn(shape, generator=generator)
    bias = torch.randn(shape[0], generator=generator) if biased else None
    x = torch.randn(130, shape[1], generator=generator)
    packed = PackedLinear(weight, bias)
    whole = packed(x)
    torch.testing.assert_close(whole, functional.linear(x, weight, bias), rtol=1e-4, atol=1e-4)
    for rows in (1, 2, 7, 16, 17, 63, 64, 129):
        for first in (0, 1, 130 - rows):
            part = packed(x[first : first + rows].contiguous())
            assert torch.equal(part, whole[first : first + rows]), (rows, first)


def quantized(kind: str, rows: int, columns: int) -> torch.Tensor:
    """Return weights that Q4_1 or Q8_0 blocks of 32 represent exactly."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns // 32, 32, generator=generator)
    if kind == "q8_0":
        scale = (weight.abs().amax(-1, keepdim=True) / 127).half().float()
        return (scale * (weight / scale).round()).flatten(1)
    low, high = weight.amin(-1, keepdim=True).half().float(), weight.amax(-1, keepdim=True)
    scale = ((high - low) / 15).half().float()
    codes = ((weight - low) / scale).round().clamp(0, 15)
    codes[..., 0], codes[..., 1] = 0, 15
    return (scale * codes + low).flatten(1)


def stored_dtype(weight: torch.Tensor) -> str:
    """Return the dtype in which a weight is stored."""
    return f"{PackedLinear(weight, None).stored.dtype}"


@pytest.mark.parametrize("kind", ["q4_1", "q8_0", "bf16"])
@pytest.mark.parametrize("shape", [(2, 32), (63, 96), (64, 576), (100, 1536)])
def test_codes_and_bf16_weights_give_the_same_bits_for_any_number_of_rows(
    kind: str, shape: tuple[int, int]
) -> None:
    if kind == "bf16":
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    else:
        weight = quantized(kind, *shape)
        weight[0, :32] = 0.0
    assert stored_dtype(weight) == ("uint16" if kind == "bf16" else "uint8")
    bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(2))
    packed = PackedLinear(weight, bias)
    x = torch.randn(40, shape[1], generator=torch.Generator().manual_seed(3))
    whole = packed(x)
    torch.testing.assert_close(whole, functional.linear(x, weight, bias), rtol=1e-4, atol=1e-4)
    for rows in (1, 2, 7, 8, 9, 16, 17):
        assert torch.equal(packed(x[5 : 5 + rows].contiguous()), whole[5 : 5 + rows]), rows


def test_codes_and_bf16_weights_are_used_only_if_lossless() -> None:
    weight = quantized("q4_1", 64, 64)
    weight[63, 63] = torch.nextafter(weight[63, 63], torch.tensor(torch.inf))
    assert stored_dtype(weight) == "float32"
    weight[63, 63] = torch.nan
    assert stored_weight._find_codes(weight) is None
    assert stored_weight._find_codes(torch.randn(8, 40)) is None, "groups have 32 columns"
    assert stored_dtype(torch.randn(8, 40).bfloat16().float()) == "uint16"


@pytest.mark.parametrize("ranks", [(None, None, None), (5, 9, 3), (5, None, 3), (None, 4, None)])
@pytest.mark.parametrize("biases", [(True, True, True), (False, True, False)])
def test_projection_concatenates_the_outputs_of_its_linears(
    ranks: tuple[int | None, ...], biases: tuple[bool, ...]
) -> None:
    generator = torch.Generator().manual_seed(1)
    linears: list[Dense | FactorPair] = []
    x = torch.randn(7, 24, generator=generator)
    parts = []
    for out, rank, biased in zip((16, 8, 9), ranks, biases, strict=True):
        bias = torch.randn(out, generator=generator) if biased else None
        if rank is None:
            weight = torch.randn(out, 24, generator=generator)
            linears.append(Dense(weight, bias))
        else:
            u = torch.randn(out, rank, generator=generator)
            v = torch.randn(rank, 24, generator=generator)
            linears.append(FactorPair(u, v, bias))
            weight = u @ v
        parts.append(functional.linear(x, weight, bias))
    got = Projection(linears)(x)
    torch.testing.assert_close(got, torch.cat(parts, dim=1), rtol=1e-4, atol=1e-4)
