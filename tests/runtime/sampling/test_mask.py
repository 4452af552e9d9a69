"""Masks forbid tokens on the device as in the reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from runtime.grammar.masks import MaskWords, allowed_tokens
from runtime.sampling.mask import TokenMask
from runtime.sampling.on_device import DeviceSampler
from runtime.sampling.reference import FORBIDDEN, SamplingRow, sample
from tests.runtime.device import DEVICE
from tests.runtime.rank_threads import ThreadGroup, on_ranks
from tests.runtime.sampling.test_on_device import (
    CPU,
    SAMPLINGS,
    VOCAB,
    WHOLE,
    logits_of,
    sample_on_device,
)

ROWS = len(SAMPLINGS)


def random_masks(rows: int, vocab: int, seed: int) -> MaskWords:
    """Return masks that allow from 95 % of the tokens to a few; at least one."""
    random = np.random.default_rng(seed)
    bits = np.zeros((rows, -(-vocab // 32) * 32), np.uint8)
    for row in range(rows):
        bits[row, :vocab] = random.random(vocab) < (0.95, 0.3, 0.05, 0.002)[row % 4]
        bits[row, random.integers(vocab)] = 1
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize("own", [range(1500), range(0, 33), range(33, 1031), range(1031, 1500)])
def test_device_mask_is_the_mask_of_its_tokens(own: range) -> None:
    masks = random_masks(5, VOCAB, 1)
    found = TokenMask(8, own, CPU, kernels=False)
    found.load([6, 1, 3, 0, 2], masks)
    logits = torch.randn(8, len(own))
    masked = found.apply(logits)
    for row, mask in zip([6, 1, 3, 0, 2], masks, strict=True):
        allowed = torch.from_numpy(allowed_tokens(mask, own.start, len(own)))
        assert torch.equal(masked[row][allowed], logits[row][allowed])
        assert (masked[row][~allowed] == FORBIDDEN).all()
    assert torch.equal(masked[[4, 5, 7]], logits[[4, 5, 7]])
    found.allow_all([6, 4])
    assert torch.equal(found.apply(logits)[6], logits[6])
    assert not torch.equal(found.apply(logits)[1], logits[1])
    found.load([7], masks[:1])
    assert torch.equal(found.apply(logits)[:7], logits[:7])
    assert torch.equal(found.apply(logits)[7] == FORBIDDEN, masked[6] == FORBIDDEN)
    found.load([], masks[:0])
    assert torch.equal(found.apply(logits), logits)


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("own", [range(1500), range(33, 1031)])
def test_kernel_equals_the_reference(own: range) -> None:
    masks = random_masks(3, VOCAB, 2)
    logits = torch.randn(4, len(own) + 3)[:, : len(own)].to(DEVICE)
    found, expected = (
        TokenMask(4, own, device, kernels=kernels)
        for device, kernels in ((DEVICE, True), (CPU, False))
    )
    for mask in (found, expected):
        mask.load([0, 3, 1], masks)
    assert torch.equal(found.apply(logits).cpu(), expected.apply(logits.cpu()))


@pytest.mark.parametrize(
    "kernels", [False, pytest.param(True, marks=[pytest.mark.triton, pytest.mark.long])]
)
def test_constrained_tokens_equal_the_reference_over_many_steps(kernels: bool) -> None:
    """Every second row is constrained, with a new mask in each step."""
    device = DEVICE if kernels else CPU
    texts = [[7, 9, 700, 3, number] for number in range(ROWS)]
    samplings = [replace(s, constrained=n % 2 == 0) for n, s in enumerate(SAMPLINGS)]
    constrained = list(range(0, ROWS, 2))
    sampler = DeviceSampler(ROWS, WHOLE, device, kernels=kernels)
    unresolved: set[int] = set()
    for step in range(4 if kernels else 20):
        masks = random_masks(len(constrained), VOCAB, step)
        of_row = dict(zip(constrained, masks, strict=True))
        rows = [
            SamplingRow(s, 1, text, 4, of_row.get(n))
            for n, (s, text) in enumerate(zip(samplings, texts, strict=True))
        ]
        if step == 0:
            sampler.load(range(ROWS), rows)
        sampler.load_masks(constrained, masks)
        drawn = sample(logits_of(step), rows)
        expected = [draw.token for draw in drawn if draw is not None]
        unresolved.update(sample_on_device(sampler, logits_of(step).to(device)))
        assert sampler.tokens.tolist() == expected, step
        for row, mask in of_row.items():
            assert allowed_tokens(mask, 0, VOCAB)[expected[row]]
        for text, token in zip(texts, expected, strict=True):
            text.append(token)
    assert unresolved & set(constrained), "the host has drawn a constrained token"


def test_logprobs_are_those_of_the_model() -> None:
    """They do not depend on the mask, as they do not on a bias."""
    logits = logits_of(0)[:1]
    sampling = replace(SAMPLINGS[0], constrained=True, logprobs=2)
    mask = random_masks(4, VOCAB, 3)[3]
    (draw,) = sample(logits, [SamplingRow(sampling, 0, (1,), 1, mask)])
    assert draw is not None
    assert draw.logprob == pytest.approx(float(logits.log_softmax(-1)[0, draw.token]))
    assert draw.top[0][0] == int(logits.argmax())


@pytest.mark.parametrize(
    "parts", [(range(749), range(749, VOCAB)), (range(3), range(3, 1200), range(1200, VOCAB))]
)
def test_ranks_sample_the_constrained_tokens_of_one(parts: tuple[range, ...]) -> None:
    samplings = [replace(sampling, constrained=True) for sampling in SAMPLINGS]
    masks = random_masks(ROWS, VOCAB, 4)
    rows = [
        SamplingRow(s, 2, [5, 9, n], 2, mask)
        for n, (s, mask) in enumerate(zip(samplings, masks, strict=True))
    ]
    expected = [draw.token for draw in sample(logits_of(1), rows) if draw is not None]

    def tokens(group: ThreadGroup) -> list[int]:
        vocabulary = type(WHOLE)(parts, group)
        sampler = DeviceSampler(ROWS, vocabulary, CPU)
        sampler.load(range(ROWS), rows)
        sampler.load_masks(range(ROWS), masks)
        own = vocabulary.own
        sample_on_device(sampler, logits_of(1)[:, own.start : own.stop])
        return [int(token) for token in sampler.tokens]

    assert on_ranks(len(parts), tokens) == [expected] * len(parts)
