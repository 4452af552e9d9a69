"""Ranks that divide the vocabulary sample the tokens of one rank."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from runtime.core.request import SamplingParams
from runtime.layers.vocabulary import Vocabulary
from runtime.parallel.group import ONE_RANK, RankGroup
from runtime.parallel.partition import Partition
from runtime.sampling.on_device import ALL_FEATURES, DeviceSampler, SamplingFeatures
from runtime.sampling.reference import SamplingRow
from tests.runtime.rank_threads import ThreadGroup, on_ranks
from tests.runtime.sampling.test_on_device import CPU, SAMPLINGS, logits_of, sample_on_device
from tests.runtime.tiny import CONFIG

VOCAB = 1499
"""A prime number of tokens. With equal parts, each rank has fewer than a draw considers."""
TOP = 5
GREEDY = SamplingFeatures.of([])
Parts = tuple[range, ...]


def parts_of(size: int, vocab: int = VOCAB) -> Parts:
    return Partition.of(replace(CONFIG, vocab_size=vocab), 0, size).vocabulary


UNEVEN: Parts = (range(3), range(3, 1200), range(1200, VOCAB))
"""The first rank has fewer tokens than are reported, the second more than a draw considers."""
DIVISIONS = [
    pytest.param(parts_of(2), id="2"),
    pytest.param(parts_of(3), id="3"),
    pytest.param(parts_of(4), id="4"),
    pytest.param(UNEVEN, id="uneven"),
]


class Results(NamedTuple):
    """Results of a sampler after each call: `[calls]`, then `[calls, rows, …]`."""

    unresolved: Tensor
    sampled: Tensor
    logprobs: Tensor
    top_logprobs: Tensor
    top_tokens: Tensor


def results(
    group: RankGroup,
    parts: Parts,
    rows: Sequence[SamplingRow],
    calls: Sequence[Tensor],
    features: SamplingFeatures = ALL_FEATURES,
) -> Results:
    """Sample from each rank's part of the logits of every call, and resolve unresolved rows."""
    vocabulary = Vocabulary(parts, group)
    own = vocabulary.own
    sampler = DeviceSampler(len(rows), vocabulary, CPU, top=TOP)
    sampler.load(range(len(rows)), rows)
    found = []
    for logits in calls:
        rest = sample_on_device(sampler, logits[:, own.start : own.stop], features)
        tensors = sampler.sampled, sampler.logprobs, sampler.top_logprobs, sampler.top_tokens
        found.append([torch.tensor(len(rest)), *(tensor.clone() for tensor in tensors)])
    return Results(*map(torch.stack, zip(*found, strict=True)))


def check(
    parts: Parts,
    rows: Sequence[SamplingRow],
    calls: Sequence[Tensor],
    features: SamplingFeatures = ALL_FEATURES,
) -> tuple[Results, Results]:
    """Compare the results of several ranks with those of one rank. Return both."""
    whole = range(parts[-1].stop)
    expected = results(ONE_RANK, (whole,), rows, calls, features)
    run = partial(results, parts=parts, rows=rows, calls=calls, features=features)
    found, *others = on_ranks(len(parts), run)
    assert all(all(map(torch.equal, found, other)) for other in others)
    assert found.sampled.tolist() == expected.sampled.tolist()
    assert found.unresolved.equal(expected.unresolved)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.top_logprobs, expected.top_logprobs, rtol=0, atol=1e-5)
    return found, expected


def rows_of(samplings: Sequence[SamplingParams]) -> list[SamplingRow]:
    return [SamplingRow(sampling, 0, (7, 9, 700, 3, 1), 4) for sampling in samplings]


def rounded(step: int) -> Tensor:
    """Return logits of which many are equal, also on several ranks."""
    generator = torch.Generator().manual_seed(step)
    return (2 * torch.randn(len(SAMPLINGS), VOCAB, generator=generator)).round()


@pytest.mark.few(2)
@pytest.mark.parametrize("parts", DIVISIONS)
@pytest.mark.parametrize("make", [lambda step: logits_of(step)[:, :VOCAB], rounded])
def test_ranks_sample_the_tokens_of_one_rank(make: Callable[[int], Tensor], parts: Parts) -> None:
    """Each call depends on the tokens that were counted before."""
    calls = [make(step) for step in range(30)]
    found, _ = check(parts, rows_of(SAMPLINGS), calls)
    assert found.unresolved.sum() > 0
    assert bool(found.sampled[:, :, 1:].all())


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_draw_of_a_small_vocabulary_considers_all_tokens(size: int) -> None:
    calls = [logits_of(step)[:, :901] for step in range(20)]
    found, _ = check(parts_of(size, 901), rows_of(SAMPLINGS), calls)
    assert found.unresolved.sum() == 0


@pytest.mark.parametrize("parts", DIVISIONS)
def test_ranks_report_the_most_probable_tokens_of_one_rank(parts: Parts) -> None:
    rows = rows_of([replace(each, logprobs=TOP) for each in SAMPLINGS])
    calls = [logits_of(step)[:, :VOCAB] for step in range(3)]
    found, expected = check(parts, rows, calls)
    assert found.top_tokens.equal(expected.top_tokens)


@pytest.mark.parametrize("parts", DIVISIONS)
@pytest.mark.parametrize("equal", [(1498, 700, 4, 1), (1498, 1300), (2, 1)])
def test_greedy_row_has_the_lowest_of_the_most_probable_tokens(
    equal: tuple[int, ...], parts: Parts
) -> None:
    logits = logits_of(0)[:2, :VOCAB].clone()
    logits[0, list(equal)] = logits.max() + 1
    logits[1] = 0.5
    for features in (GREEDY, ALL_FEATURES):
        found, _ = check(parts, rows_of([SamplingParams()] * 2), [logits], features)
        assert found.sampled[0, :, 0].tolist() == [min(equal), 0]


@pytest.mark.parametrize("parts", DIVISIONS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_of_one_rank_that_are_not_finite_are_reported_by_all(
    value: float, parts: Parts
) -> None:
    logits = torch.zeros(len(parts) + 1, VOCAB)
    for row, part in enumerate(parts):
        logits[row, part[-1]] = value
    rows = rows_of([SamplingParams(1.0, logprobs=1)] * len(logits))
    for features in (GREEDY, ALL_FEATURES):
        run = partial(results, parts=parts, rows=rows, calls=[logits], features=features)
        for found in on_ranks(len(parts), run):
            assert found.sampled[0, :, 1].tolist() == [0] * len(parts) + [1]


@pytest.mark.parametrize(
    ("features", "widths"),
    [
        (GREEDY, [3]),
        (SamplingFeatures(random=True, processing=False, logprobs=False), [4 + 2 * 375]),
        (ALL_FEATURES, [4 + 2 * 375, 2 + 2 * TOP]),
    ],
)
def test_ranks_gather_a_record_for_each_row(features: SamplingFeatures, widths: list[int]) -> None:
    parts = parts_of(4)
    assert max(map(len, parts)) == 375

    def run(group: ThreadGroup) -> list[tuple[str, tuple[int, ...]]]:
        own = parts[group.rank]
        sampler = DeviceSampler(3, Vocabulary(parts, group), CPU, top=TOP)
        sampler(logits_of(0)[:3, own.start : own.stop], features)
        return group.calls

    for calls in on_ranks(4, run):
        assert calls == [("all_gather", (3, width)) for width in widths]


@pytest.mark.parametrize("parts", DIVISIONS)
def test_whole_logits_are_those_of_all_ranks_in_order(parts: Parts) -> None:
    logits = logits_of(0)[:, :VOCAB]

    def run(group: ThreadGroup) -> Tensor:
        vocabulary = Vocabulary(parts, group)
        return vocabulary.whole(logits[:, vocabulary.own.start : vocabulary.own.stop])

    assert all(found.equal(logits) for found in on_ranks(len(parts), run))


@pytest.mark.parametrize("parts", DIVISIONS)
def test_a_rank_has_state_of_its_own_tokens_only(parts: Parts) -> None:
    def state(group: ThreadGroup) -> float:
        sampler = DeviceSampler(7, Vocabulary(parts, group), CPU)
        processor = sampler._processor
        tables = [processor._bias, processor.outputs, processor._flags, sampler._processed]
        return sum(table.nbytes for table in tables) / 13 / 7

    assert on_ranks(len(parts), state) == [len(part) for part in parts]
