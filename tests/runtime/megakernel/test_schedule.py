"""The megakernel's pass list, executed by its reference interpreter."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from runtime.attention.base import Batch, SequenceSlice
from runtime.checkpoint.slices import rank_checkpoint
from runtime.config import ModelConfig
from runtime.gemm.weights import PackedWeights
from runtime.megakernel.kernels import opcodes
from runtime.megakernel.launch import unsupported
from runtime.megakernel.reference import Interpreter, Messages, ProtocolError, run_ranks
from runtime.megakernel.schedule import Pass, split_at_attention
from runtime.models.build import build_model
from runtime.pages.plan import PageCount
from runtime.parallel.partition import Partition, Scheme
from tests.runtime.tiny import CONFIG, tiny_checkpoint

RANKS = [(None,) * 7, (9, 5, 8, 12, 17, 11, 24), (9, None, 8, None, 17, None, 24)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("position", [0, 21])
def test_pass_list_matches_the_model(ranks: tuple[int | None, ...], position: int) -> None:
    checkpoint = tiny_checkpoint(ranks=ranks, bias="all")
    model = build_model(checkpoint)
    cache = model.new_cache(PageCount(8))
    text = [(7 * at + 3) % CONFIG.vocab_size for at in range(position + 1)]
    pages = [3, 5]
    if position:
        before = SequenceSlice(text[:-1], 0, pages, want_logits=False)
        model.forward(Batch.of([before]), cache)
    interpreter = Interpreter(PackedWeights.pack(checkpoint, "cpu"), cache.planes, tall=100)
    found = interpreter.run(text[-1], position, pages)
    planes = [plane.clone() for plane in cache.planes]
    expected = model.forward(Batch.of([SequenceSlice(text[-1:], position, pages)]), cache)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0.01 * float(expected.abs().max()))
    for plane, other in zip(planes, cache.planes, strict=True):
        torch.testing.assert_close(plane, other, rtol=0, atol=0.04)


UNEVEN = replace(CONFIG, num_heads=9, num_kv_heads=3)


@pytest.mark.parametrize("pairs", RANKS)
@pytest.mark.parametrize(
    ("config", "size"),
    [(CONFIG, 2), (UNEVEN, 2), (UNEVEN, 3), (UNEVEN, 4)],
    ids=["even-2", "2", "3", "4"],
)
@pytest.mark.parametrize("position", [0, 21])
@pytest.mark.parametrize("scheme", [Scheme.LOW_RANK, Scheme.EVEN])
def test_pass_lists_of_ranks_match_the_model(
    pairs: tuple[int | None, ...], config: ModelConfig, size: int, position: int, scheme: Scheme
) -> None:
    checkpoint = tiny_checkpoint(ranks=pairs, bias="all", config=config)
    model = build_model(checkpoint)
    cache = model.new_cache(PageCount(8))
    text = [(7 * at + 3) % config.vocab_size for at in range(position + 1)]
    pages = [3, 5]
    if position:
        before = SequenceSlice(text[:-1], 0, pages, want_logits=False)
        model.forward(Batch.of([before]), cache)
    interpreters = []
    for rank in range(size):
        part = Partition.of(config, rank, size, scheme)
        heads = slice(part.kv_heads.start, part.kv_heads.stop)
        planes = [plane[:, heads].clone() for plane in cache.planes]
        weights = PackedWeights.pack(rank_checkpoint(checkpoint, part), "cpu")
        interpreters.append(Interpreter(weights, planes, 1, part))
    found = run_ranks(interpreters, text[-1], position, pages)
    expected = model.forward(Batch.of([SequenceSlice(text[-1:], position, pages)]), cache)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0.01 * float(expected.abs().max()))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("programs", [1, 5, 132])
def test_every_matrix_row_belongs_to_exactly_one_program(
    ranks: tuple[int | None, ...], programs: int
) -> None:
    weights = PackedWeights.pack(tiny_checkpoint(ranks=ranks), "cpu")
    planes = [torch.zeros(2, CONFIG.num_kv_heads, 16, CONFIG.head_dim, dtype=torch.bfloat16)] * 4
    for one in Interpreter(weights, planes, tall=1).passes[:-1]:
        bounds = [one.total * number // programs - one.start for number in range(programs + 1)]
        clipped = [min(max(bound, 0), one.units) for bound in bounds]
        assert all(first <= last for first, last in pairwise(clipped))
        assert (clipped[0], clipped[-1]) == (0, one.units)


def test_reference_detects_protocol_errors() -> None:
    messages = Messages(4)
    messages.write(0, torch.ones(4), stage=1, after=0)
    reader = Pass(opcodes.INNER.value, stage=2, after=1)
    assert messages.read(0, 4, reader).tolist() == [1.0] * 4
    with pytest.raises(ProtocolError, match="another stage"):
        messages.read(0, 4, Pass(opcodes.INNER.value, stage=3, after=2))
    with pytest.raises(ProtocolError, match="may still be read"):
        messages.write(0, torch.zeros(4), stage=2, after=1)
    messages.write(0, torch.zeros(4), stage=3, after=2)


@pytest.mark.parametrize("ranks", RANKS)
def test_passes_are_divided_at_attention(ranks: tuple[int | None, ...]) -> None:
    weights = PackedWeights.pack(tiny_checkpoint(ranks=ranks), "cpu")
    planes = [torch.zeros(2, CONFIG.num_kv_heads, 16, CONFIG.head_dim, dtype=torch.bfloat16)] * 4
    *passes, end = Interpreter(weights, planes, tall=1).passes
    lists, stages = split_at_attention([*passes, end])
    assert len(lists) == len(stages) + 1 == CONFIG.num_layers + 1
    joined = [one for own, stage in zip(lists, stages, strict=False) for one in (*own[:-1], stage)]
    attention = [one for one in passes if one.opcode == opcodes.ATTEND.value]
    assert stages == [one.stage for one in attention]
    expected = [one.stage if one in attention else one for one in passes]
    assert [*joined, *lists[-1][:-1]] == expected
    markers = [own[-1] for own in lists]
    assert [(one.stage, one.norm) for one in markers] == [
        (0, end.norm),
        *[(0, -1)] * (len(lists) - 2),
        (end.stage, -1),
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"head_dim": 144}, "heads of 144"),
        ({"num_heads": 34}, "34 query heads for 2 KV heads"),
    ],
)
def test_unsupported_returns_the_reason(changes: dict[str, int], reason: str | None) -> None:
    checkpoint = tiny_checkpoint(config=replace(CONFIG, **changes))  # type: ignore[arg-type]
    found = unsupported(PackedWeights.pack(checkpoint, "cpu"))
    assert found is None if reason is None else reason in str(found)


def test_all_ranks_use_the_megakernel_or_none() -> None:
    """Only the last of three ranks has 32 query heads for its KV head."""
    config = replace(CONFIG, num_heads=64, num_kv_heads=2)
    whole = tiny_checkpoint(config=config)
    for rank in range(3):
        part = Partition.of(config, rank, 3)
        found = unsupported(PackedWeights.pack(rank_checkpoint(whole, part), "cpu"))
        assert "32 query heads for 1 KV heads" in str(found)


def test_rows_that_only_pad_the_stacked_v_are_not_computed() -> None:
    """No message of a program with such rows alone would be waited for."""
    checkpoint = tiny_checkpoint(ranks=(9, 5, 8, 12, 17, 11, 24))
    computed = 0
    for rank in range(4):
        part = Partition.of(CONFIG, rank, 4)
        weights = PackedWeights.pack(rank_checkpoint(checkpoint, part), "cpu")
        heads = part.kv_heads.stop - part.kv_heads.start
        planes = [torch.zeros(2, heads, 16, CONFIG.head_dim, dtype=torch.bfloat16)] * 4
        first = Interpreter(weights, planes, 1, part).passes[0]
        assert first.opcode == opcodes.INNER.value
        computed += first.units
    assert computed == 16 + 8 + 8  # ranks of q, k and v, each padded to a multiple of 8


def test_head_norms_are_packed_but_not_supported_by_the_megakernel() -> None:
    weights = PackedWeights.pack(tiny_checkpoint(head_norms=True), "cpu")
    assert weights.head_norms
    assert "normalize" in str(unsupported(weights))
