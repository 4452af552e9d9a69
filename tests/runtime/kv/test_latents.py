"""Format `lowrank`: logits against dense KV, bytes, refusals, and the hash of the factors."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.attention.base import Batch, SequenceSlice
from runtime.attention.reference import ReferenceAttention
from runtime.checkpoint.slices import rank_checkpoint
from runtime.checkpoint.weights import Checkpoint, FactorPair, LayersOnDemand, shapes_of
from runtime.config import RopeConfig
from runtime.engine import Add
from runtime.errors import KVFormatError
from runtime.gemm.plan import KernelPlan, group_key
from runtime.kv.dense import DenseFormat
from runtime.kv.eviction import check_eviction
from runtime.kv.lowrank import LowRankFormat
from runtime.models.build import build_model
from runtime.models.kernel_plan_hash import kernel_facts
from runtime.models.model import Model
from runtime.pages.plan import PageCount
from runtime.pages.sizes import token_bytes
from runtime.parallel.partition import Partition
from tests.runtime.tiny import (
    CONFIG,
    checkpoint_for,
    drive,
    engine_of,
    prompt_of,
    replayed,
    request_of,
    tiny_checkpoint,
)

RANKS = (13, 11, 19, None, 9, None, 17)
"""Ranks that are not multiples of 8, and differ between K and V."""
TOLERANCE = 0.02
"""Largest difference of logits, relative to the largest logit: rounding of latents to bf16."""
HALF_DENSE = (None, 11, 19, None, None, None, None)


def factorized(**kinds: object) -> Checkpoint:
    return tiny_checkpoint(**{"ranks": RANKS, "bias": True, **kinds})  # type: ignore[arg-type]


def lowrank(**kinds: object) -> Model:
    return build_model(factorized(**kinds), kv_format="lowrank")


def prompt_and_steps(model: Model, lengths: list[int], chunk: int) -> Tensor:
    """Return the logits of chunks of prompts in one batch, then of decode steps.

    The pages of the sequences alternate.
    """
    count = len(lengths)
    pages = [list(range(number, 20 * count, count)) for number in range(count)]
    cache = model.new_cache(PageCount(20 * count))
    done = [0] * count
    found = []
    tokens = [list(prompt_of(length + 3, number)) for number, length in enumerate(lengths)]
    while min(done[n] - len(tokens[n]) for n in range(count)) < 0:
        slices = []
        for number, (whole, length) in enumerate(zip(tokens, lengths, strict=True)):
            first = done[number]
            if first == len(whole):
                continue
            end = min(first + chunk, length) if first < length else first + 1
            slices.append(SequenceSlice(whole[first:end], first, pages[number]))
            done[number] = end
        found.append(model.forward(Batch.of(slices), cache))
    return torch.cat(found)


@pytest.mark.parametrize(
    "kinds",
    [
        {},
        {"bias": False, "ranks": HALF_DENSE},
        {"config": replace(CONFIG, rope=RopeConfig(scaling="none"))},
        {
            "config": replace(
                CONFIG,
                rope=RopeConfig(
                    scaling="yarn", factor=4.0, original_context=100, attention_factor=1.14
                ),
            )
        },
        {"config": replace(CONFIG, rope=RopeConfig(scaling="linear", factor=2.0))},
        {"config": replace(CONFIG, head_dim=20, num_heads=4, num_kv_heads=4)},
    ],
    ids=["ragged", "dense-q", "no-rope", "yarn", "linear", "heads-of-20"],
)
@pytest.mark.parametrize("chunk", [7, 64])
def test_logits_are_those_of_dense_kv(kinds: dict[str, object], chunk: int) -> None:
    checkpoint = factorized(**kinds)
    dense = prompt_and_steps(build_model(checkpoint), [50, 17, 33], chunk)
    found = prompt_and_steps(build_model(checkpoint, kv_format="lowrank"), [50, 17, 33], chunk)
    assert float((found - dense).abs().max()) < TOLERANCE * float(dense.abs().max())
    assert not torch.equal(found, dense)


def test_paged_attention_equals_that_of_contiguous_pages_bit_for_bit() -> None:
    model = lowrank()
    tokens = list(prompt_of(70))
    orders = [[0, 1, 2, 3, 4], [7, 2, 9, 0, 5]]
    found = []
    for pages in orders:
        cache = model.new_cache(PageCount(10))
        prompt = model.forward(Batch.of([SequenceSlice(tokens[:65], 0, pages)]), cache)
        steps = [
            model.forward(Batch.of([SequenceSlice([tokens[n]], n, pages)]), cache)
            for n in range(65, 70)
        ]
        found.append(torch.cat([prompt, *steps]))
    assert torch.equal(*found)


def test_planes_hold_the_latents_of_k_and_v() -> None:
    checkpoint = factorized()
    model = build_model(checkpoint, kv_format="lowrank")
    cache = model.new_cache(PageCount(4))
    tokens = list(prompt_of(20))
    model.forward(Batch.of([SequenceSlice(tokens, 0, [3, 1])]), cache)
    layer = checkpoint.layers[0]
    hidden = checkpoint.embedding[torch.tensor(tokens)]
    normed = torch.nn.functional.rms_norm(
        hidden, (CONFIG.hidden_size,), layer.input_norm, CONFIG.rms_norm_eps
    )
    for plane, pair in zip(cache.layer(0), (layer.k, layer.v), strict=True):
        assert plane.shape == (4, 1, 16, -(-pair.rank // 8) * 8)
        stored = plane[torch.tensor([3, 1]), 0].flatten(0, 1)[: len(tokens)]
        expected = (normed @ pair.v.T).bfloat16()
        torch.testing.assert_close(stored[:, : pair.rank], expected, rtol=2**-7, atol=1e-5)
        assert not stored[:, pair.rank :].any()


def test_bytes_of_a_token_are_those_of_its_latents() -> None:
    model, dense = lowrank(), build_model(factorized())
    assert token_bytes(model.layout.page_bytes) == CONFIG.num_layers * 2 * (16 + 24)
    heads = CONFIG.num_kv_heads * CONFIG.head_dim
    assert token_bytes(dense.layout.page_bytes) == CONFIG.num_layers * 2 * 2 * heads
    assert len(model.layout.page_groups) == 1
    assert model.kv_format.scratch_bytes(16) == 16 * 2 * 2 * heads
    assert dense.kv_format.scratch_bytes(16) == 0
    assert model.kv_format.weight_bytes == sum(
        pair.u.shape[0] * 4 * (-(-pair.rank // 8) * 8 + 1)
        for layer in factorized().layers
        for pair in (layer.k, layer.v)
    )


def test_layers_of_other_ranks_have_planes_of_other_widths() -> None:
    checkpoint = checkpoint_for("lowrank")
    model = build_model(checkpoint, kv_format="lowrank")
    widths = [[plane.shape for plane in planes] for planes in model.layout.layers]
    assert widths == [[(1, 16, 16), (1, 16, 16)], [(1, 16, 8), (1, 16, 24)]]
    dense = prompt_and_steps(build_model(checkpoint), [40, 9], 20)
    found = prompt_and_steps(model, [40, 9], 20)
    assert float((found - dense).abs().max()) < TOLERANCE * float(dense.abs().max())


@pytest.mark.parametrize("rope", ["default", "yarn"])
def test_attention_equals_dense_attention_over_decoded_pages(rope: str) -> None:
    """The oracle of the format: `Rebuild` returns what attention reads."""
    config = replace(CONFIG, rope=RopeConfig(scaling=rope, original_context=100, factor=2.0))  # type: ignore[arg-type]
    checkpoint = factorized(config=config)
    dense = DenseFormat(config, ReferenceAttention)
    device = torch.device("cpu")
    made = LowRankFormat(config, dense, checkpoint.layers, device, torch.float32)
    for index, weights in enumerate(checkpoint.layers):
        made.fold_weights(index, weights)
    layer = made.layer(1)
    generator = torch.Generator().manual_seed(3)
    planes = tuple(
        torch.zeros(6, *plane.shape, dtype=torch.bfloat16) for plane in made.planes(1, 16)
    )
    for plane, pair in zip(planes, (checkpoint.layers[1].k, checkpoint.layers[1].v), strict=True):
        plane[..., : pair.rank] = torch.randn(6, 1, 16, pair.rank, generator=generator)
    q = torch.randn(3, config.num_heads, config.head_dim, generator=generator)
    batch = Batch.of([SequenceSlice([0] * 2, 40, [5, 1, 2]), SequenceSlice([0], 15, [4])])
    pages = torch.tensor([5, 1, 2, 4])
    k, v = torch.zeros(2, 6, config.num_kv_heads, 16, config.head_dim, dtype=torch.bfloat16)
    keys, values = layer.rebuild(planes, pages, torch.tensor([0, 16, 32, 0]))
    k[pages], v[pages] = keys.bfloat16(), values.bfloat16()
    expected = ReferenceAttention().attend(q, k, v, batch)
    assert torch.equal(layer.attend(q, planes, batch), expected)


def test_streamed_model_stores_the_same_latents() -> None:
    checkpoint = factorized()
    layers = checkpoint.layers
    on_demand = replace(
        checkpoint, layers=LayersOnDemand(lambda index: layers[index], shapes_of(layers))
    )
    found = []
    for model in (
        build_model(checkpoint, kv_format="lowrank"),
        build_model(on_demand, kv_format="lowrank", streamed=True),
    ):
        cache = model.new_cache(PageCount(3))
        batch = Batch.of([SequenceSlice(list(prompt_of(40)), 0, [0, 1, 2])])
        logits = [model.forward(batch, cache) for _ in range(2)]
        assert torch.equal(*logits)
        found.append((logits[0], *cache.planes, model.kv_format.artifact_hash))
    assert found[0][-1] == found[1][-1]
    assert all(torch.equal(a, b) for a, b in zip(found[0][:-1], found[1][:-1], strict=True))  # type: ignore[arg-type]


def test_output_after_preemption_continues_the_same_tokens() -> None:
    """Prefill and decode attend to the same latents, so the output may be prefilled again."""
    model = lowrank()
    request = request_of("r", 40, 30)
    whole = drive(engine_of(model), Add(request)).output("r")
    again = drive(engine_of(model), Add(replayed(request, whole[:20]))).output("r")
    assert whole[20:] == again


def test_workers_whose_factors_differ_do_not_match() -> None:
    checkpoint = factorized()
    first = build_model(checkpoint, kv_format="lowrank").kv_format
    assert first.artifact_hash == lowrank().kv_format.artifact_hash
    assert len(first.artifact_hash) == 64
    layer = checkpoint.layers[1]
    turned = torch.linalg.qr(torch.randn(11, 11, generator=torch.Generator().manual_seed(2)))[0]
    same_product = FactorPair(layer.k.u @ turned, turned.T @ layer.k.v, layer.k.bias)
    biased = replace(layer.v, bias=layer.v.bias + 1)
    for changed in (replace(layer, k=same_product), replace(layer, v=biased)):
        other = replace(checkpoint, layers=(checkpoint.layers[0], changed))
        made = build_model(other, kv_format="lowrank").kv_format
        assert made.artifact_hash != first.artifact_hash
        assert (made.name, made.version) == (first.name, first.version) == ("lowrank", 1)


def test_kernel_plan_names_the_format_and_layers_stay_factorized() -> None:
    model = lowrank(ranks=HALF_DENSE)
    assert kernel_facts(model)["kv"] == "compiled-1+lowrank-1"
    assert model.factorized_layers == CONFIG.num_layers


@pytest.mark.parametrize(
    ("ranks", "name"),
    [((None,) * 7, "k"), ((5, None, 9, 5, 5, 5, 5), "k"), ((5, 9, None, 5, 5, 5, 5), "v")],
)
def test_a_layer_without_factors_is_refused(ranks: tuple[int | None, ...], name: str) -> None:
    checkpoint = factorized()
    other = factorized(ranks=ranks)
    mixed = replace(checkpoint, layers=(checkpoint.layers[0], other.layers[1]))
    with pytest.raises(
        KVFormatError, match=rf"{name} of layer 1 is not a factor pair: use a model"
    ):
        build_model(mixed, kv_format="lowrank")


def test_unsupported_models_are_refused() -> None:
    with pytest.raises(KVFormatError, match="normalize key heads"):
        lowrank(head_norms=True)
    with pytest.raises(KVFormatError, match="sliding windows"):
        lowrank(config=replace(CONFIG, windows=(32, None)))
    part = rank_checkpoint(factorized(), Partition.of(CONFIG, 0, 2))
    with pytest.raises(KVFormatError, match=r"does not support workers of several ranks: all KV"):
        build_model(part, kv_format="lowrank")
    with pytest.raises(KVFormatError, match="lowrank"):
        check_eviction(lowrank().kv_format, ())


def test_products_of_a_plan_leave_the_factors_of_k_and_v() -> None:
    """A plan that multiplies out q, k and v does not apply to them with this format."""
    checkpoint = factorized(ranks=(8,) * 7)
    keys = [group_key(checkpoint.layers[0], names) for names in (("q", "k", "v"), ("o",))]
    plan = KernelPlan(dense=frozenset(key for key in keys if key))
    layer = plan.multiply_out(checkpoint, kept=[("q", "k", "v")]).layers[0]
    pairs = [isinstance(getattr(layer, name), FactorPair) for name in ("q", "k", "v", "o", "gate")]
    assert pairs == [True, True, True, False, True]
