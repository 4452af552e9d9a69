"""Models of workers with several ranks, which run in threads, against the whole model."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.attention.base import Batch, SequenceSlice
from runtime.checkpoint import Checkpoint, FactorPair
from runtime.checkpoint.slices import rank_checkpoint
from runtime.checkpoint.weights import linears_of
from runtime.config import ModelConfig
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.pages.plan import PageCount
from runtime.parallel.partition import Partition, Scheme
from tests.runtime.rank_threads import ThreadGroup, on_ranks
from tests.runtime.tiny import CONFIG, prompt_of, tiny_checkpoint

TOLERANCE = 5e-4
"""Ranks add in another order, in fp32. Logits are up to about 5."""
PROMPTS = (37, 1, 20)
PAGES = 12

GQA = replace(CONFIG, num_heads=9, num_kv_heads=3)
"""The numbers of heads of SmolLM2, which two and four ranks do not divide."""
MHA = replace(CONFIG, num_heads=4, num_kv_heads=4, tied_embeddings=True)
ONE_KV_HEAD = replace(CONFIG, num_heads=5, num_kv_heads=1, vocab_size=203, intermediate_size=77)

DENSE = (None,) * 7
PAIRS = (12, 5, 9, 20, 16, 30, 24)
MIXED = (None, 12, None, 20, 16, None, None)


Collectives = list[tuple[str, tuple[int, ...]]]


def logits_of(model: Model) -> Tensor:
    """Compute the prompts, then one more token of each."""
    cache = model.new_cache(PageCount(PAGES))
    tables = [range(at * 4, at * 4 + 4) for at in range(len(PROMPTS))]
    tokens = [prompt_of(n + 1, vocab=model.config.vocab_size) for n in PROMPTS]
    prompts = [
        SequenceSlice(each[:-1], 0, table) for each, table in zip(tokens, tables, strict=True)
    ]
    ends = [
        SequenceSlice(each[-1:], len(each) - 1, table)
        for each, table in zip(tokens, tables, strict=True)
    ]
    found = [model.forward(Batch.of(slices), cache) for slices in (prompts, ends)]
    return model.vocabulary.whole(torch.cat(found))


def check_equal(checkpoint: Checkpoint, size: int, scheme: Scheme) -> Collectives:
    """Compare the logits of all ranks with those of the whole model.

    Returns:
        Name of each collective of a rank, and shape of its argument.
    """
    expected = logits_of(build_model(checkpoint))

    def run(group: ThreadGroup) -> tuple[Tensor, Collectives]:
        partition = Partition.of(checkpoint.config, group.rank, size, scheme)
        model = build_model(rank_checkpoint(checkpoint, partition), group=group)
        return logits_of(model), group.calls

    found = on_ranks(size, run)
    for logits, calls in found:
        assert calls == found[0][1]
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)
        assert torch.equal(logits, found[0][0]), "all ranks sample from the same logits"
    return found[0][1]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("config", [GQA, MHA, ONE_KV_HEAD], ids=["gqa", "mha", "one kv head"])
def test_ranks_have_the_logits_of_the_whole_model(config: ModelConfig, size: int) -> None:
    checkpoint = tiny_checkpoint(bias="all", head_norms=True, ranks=MIXED, config=config)
    check_equal(checkpoint, size, Scheme.LOW_RANK)


@pytest.mark.parametrize(
    ("ranks", "size", "scheme"),
    [
        pytest.param(DENSE, 2, Scheme.LOW_RANK, id="dense"),
        pytest.param(PAIRS, 3, Scheme.LOW_RANK, id="pairs"),
        pytest.param(DENSE, 3, Scheme.EVEN, id="dense, even"),
        pytest.param(PAIRS, 3, Scheme.EVEN, id="pairs, even"),
        pytest.param(MIXED, 4, Scheme.EVEN, id="mixed, even"),
        pytest.param(PAIRS, 2, Scheme.EVEN, id="pairs, 2 ranks, even"),
        pytest.param(PAIRS, 4, Scheme.EVEN, id="pairs, 4 ranks, even"),
        pytest.param((*DENSE[:4], 16, 30, 24), 3, Scheme.EVEN, id="dense attention, even"),
        pytest.param((*PAIRS[:4], None, None, None), 3, Scheme.EVEN, id="dense MLP, even"),
        pytest.param(DENSE, 3, Scheme.BASE, id="dense, base"),
        pytest.param(MIXED, 2, Scheme.BASE, id="mixed, base"),
        pytest.param(PAIRS, 4, Scheme.BASE, id="pairs, base"),
    ],
)
def test_schemes_have_the_logits_of_the_whole_model(
    ranks: Sequence[int | None], size: int, scheme: Scheme
) -> None:
    checkpoint = tiny_checkpoint(bias="all", ranks=ranks, config=GQA)
    check_equal(checkpoint, size, scheme)


def test_biases_of_the_residual_stream_are_added_once() -> None:
    checkpoint = tiny_checkpoint(ranks=MIXED)
    layers = [
        replace(
            layer,
            **{
                name: replace(linear, bias=torch.linspace(-1, 1, CONFIG.hidden_size))
                for name, linear in linears_of(layer)
                if name in ("o", "down")
            },
        )
        for layer in checkpoint.layers
    ]
    for scheme in Scheme:
        check_equal(replace(checkpoint, layers=tuple(layers)), 2, scheme)


@pytest.mark.parametrize("k_ranks", [(8, 8), (8, 40)])
def test_basis_shared_by_layers_may_have_other_rows_in_each(k_ranks: tuple[int, int]) -> None:
    """Which rows of q's V a rank holds depends on the ranks of k and v in the same layer."""
    layers = [
        tiny_checkpoint(ranks=(32, k, 8, None, None, None, None)).layers[at]
        for at, k in enumerate(k_ranks)
    ]
    layers[1] = replace(layers[1], q=replace(layers[1].q, v=layers[0].q.v))
    check_equal(replace(tiny_checkpoint(), layers=tuple(layers)), 2, Scheme.LOW_RANK)


def test_linears_of_one_layer_may_share_a_basis() -> None:
    checkpoint = tiny_checkpoint(ranks=(16, 16, 16, None, None, None, None))
    layers = [
        replace(layer, k=replace(layer.k, v=layer.q.v), v=replace(layer.v, v=layer.q.v))
        for layer in checkpoint.layers
    ]
    check_equal(replace(checkpoint, layers=tuple(layers)), 2, Scheme.LOW_RANK)


def test_layers_that_share_a_basis_share_its_slices() -> None:
    checkpoint = tiny_checkpoint(ranks=(16, 16, 16, None, None, None, None))
    first, second = checkpoint.layers
    shared = replace(second, q=replace(second.q, v=first.q.v))
    checkpoint = replace(checkpoint, layers=(first, shared))
    check_equal(checkpoint, 2, Scheme.LOW_RANK)
    part = rank_checkpoint(checkpoint, Partition.of(CONFIG, 0, 2))
    pairs = [layer.q for layer in part.layers]
    assert all(isinstance(pair, FactorPair) for pair in pairs)
    assert pairs[0].v is pairs[1].v


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        pytest.param(DENSE, [("all_reduce", 48), ("all_reduce", 48)], id="dense"),
        pytest.param(
            PAIRS,  # the padded ranks are 16 + 8 + 16 and 16 + 32
            [("all_gather", 24), ("all_reduce", 20), ("all_gather", 24), ("all_reduce", 24)],
            id="pairs",
        ),
        pytest.param(
            MIXED,
            [("all_gather", 8), ("all_reduce", 20), ("all_gather", 8), ("all_reduce", 48)],
            id="mixed",
        ),
    ],
)
def test_factor_pairs_are_exchanged_in_their_low_rank_space(
    ranks: Sequence[int | None], expected: list[tuple[str, int]]
) -> None:
    calls = check_equal(tiny_checkpoint(ranks=ranks), 2, Scheme.LOW_RANK)
    embedding, *layers = [(name, shape[1]) for name, shape in calls[: 1 + 2 * len(expected)]]
    assert embedding == ("all_reduce", CONFIG.hidden_size)
    assert layers == expected * CONFIG.num_layers


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        pytest.param(
            PAIRS,  # two numbers of each rank are the sums of squares, padded to a multiple of 8
            [
                ("all_reduce", 12 + 5 + 9 + 6),
                ("all_reduce", 20),
                ("all_reduce", 16 + 30 + 10),
                ("all_reduce", 24),
            ],
            id="pairs",
        ),
        pytest.param(
            MIXED,  # the residual stream, then the outputs of V
            [
                *[("all_gather", 24), ("all_gather", 8), ("all_reduce", 20)],
                *[("all_gather", 24), ("all_gather", 8), ("all_reduce", 48)],
            ],
            id="mixed",
        ),
    ],
)
def test_parts_of_the_residual_stream_are_exchanged_in_the_low_rank_space(
    ranks: Sequence[int | None], expected: list[tuple[str, int]]
) -> None:
    calls = check_equal(tiny_checkpoint(ranks=ranks), 2, Scheme.EVEN)
    count = len(expected) * CONFIG.num_layers
    embedding, *layers = [(name, shape[1]) for name, shape in calls[: 2 + count]]
    assert embedding == ("all_reduce", CONFIG.hidden_size)
    assert layers == [*expected * CONFIG.num_layers, ("all_gather", CONFIG.hidden_size // 2)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_of_the_residual_stream_may_differ_in_size(size: int) -> None:
    """44 elements are divided unevenly: the last rank has fewer than the others, or none."""
    config = replace(GQA, hidden_size=44)
    checkpoint = tiny_checkpoint(bias="all", head_norms=True, ranks=PAIRS, config=config)
    check_equal(checkpoint, size, Scheme.EVEN)


def test_model_without_factor_pairs_keeps_the_residual_stream_whole() -> None:
    partition = Partition.of(CONFIG, 0, 2, Scheme.EVEN)
    part = rank_checkpoint(tiny_checkpoint(), partition).partition
    assert part is not None
    assert part.scheme is Scheme.LOW_RANK


def test_layers_with_other_norms_may_share_a_basis() -> None:
    checkpoint = tiny_checkpoint(ranks=(16, 16, 16, 12, None, None, None))
    first, second = checkpoint.layers
    shared = replace(second, q=replace(second.q, v=first.q.v), k=replace(second.k, v=first.k.v))
    check_equal(replace(checkpoint, layers=(first, shared)), 3, Scheme.EVEN)
