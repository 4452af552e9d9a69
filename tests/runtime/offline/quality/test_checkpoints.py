"""Comparison of checkpoints and of runtimes, with tiny random models."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.weights import moved
from runtime.errors import QualityError
from runtime.offline.quality.checkpoint_report import checkpoint_tables
from runtime.offline.quality.checkpoints import BF16, PAIR, PEER, SERVED, Load, measure_checkpoints
from runtime.offline.quality.measure import describe
from tests.runtime.offline.quality.test_measure import text_of
from tests.runtime.offline.quality.test_needles import ENCODER
from tests.runtime.tiny import CONFIG, prompt_of, tiny_checkpoint

BYTES = replace(CONFIG, vocab_size=256)
TEXTS = torch.tensor([prompt_of(120, 1)])
PROMPTS = [list(prompt_of(length)) for length in (7, 40, 100)]


def loads(checkpoint: Checkpoint) -> Load:
    return lambda dtype: moved(checkpoint, torch.device("cpu"), dtype, {})


def measured(prompts: list[list[int]], **checkpoints: Checkpoint) -> list[Any]:
    return measure_checkpoints(
        {name: loads(one) for name, one in checkpoints.items()},
        ENCODER,
        TEXTS,
        describe("tiny", "", "random", TEXTS),
        prompts,
        12,
    )


def factorized(rank: int) -> Checkpoint:
    return tiny_checkpoint(config=BYTES, ranks=(rank,) * 7)


def test_checkpoints_are_compared_with_the_first_one() -> None:
    dense = tiny_checkpoint(config=BYTES)
    first, same, other = measured(PROMPTS, dense=dense, same=dense, other=factorized(8))
    assert (first.quality, first.outputs) == (None, None)
    assert same.quality.kl_mean == 0
    assert same.outputs.exact == same.outputs.mean_token == 1
    assert same.perplexity == first.perplexity
    assert other.quality.kl_mean > 0.01
    assert other.outputs.mean_token < 1
    assert other.quality.perplexity == other.perplexity != first.perplexity


def test_runtimes_are_compared_with_fp32_of_the_same_checkpoint() -> None:
    _, other = measured(PROMPTS, dense=tiny_checkpoint(config=BYTES), other=factorized(8))
    assert list(other.runtimes) == [SERVED, BF16, PEER, PAIR]
    assert other.runtimes[SERVED].mean_token >= other.runtimes[BF16].mean_token
    assert other.runtimes[BF16].prompts == 3
    shown = [text_of(table) for table in checkpoint_tables([_, other])]
    assert len(shown) == 3
    assert PAIR in shown[2]


def test_transformers_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.offline.quality.checkpoints.find_spec", lambda _: None)
    stages: list[str] = []
    (one,) = measure_checkpoints(
        {"dense": loads(tiny_checkpoint(config=BYTES))},
        *(ENCODER, TEXTS, describe("tiny", "", "random", TEXTS), PROMPTS, 3),
        progress=stages.append,
    )
    assert list(one.runtimes) == [SERVED, BF16]
    assert any("transformers is not installed" in stage for stage in stages)


def test_models_that_transformers_cannot_build_have_no_peer() -> None:
    dense = tiny_checkpoint(config=replace(BYTES, architecture="Qwen2ForCausalLM"))
    (one,) = measured(PROMPTS, dense=dense)
    assert list(one.runtimes) == [SERVED, BF16]


def test_without_prompts_nothing_is_generated() -> None:
    (one,) = measured([], dense=tiny_checkpoint(config=BYTES))
    assert (one.outputs, one.runtimes) == (None, {})
    assert len(checkpoint_tables([one])) == 1


def test_other_vocabularies_are_refused() -> None:
    with pytest.raises(QualityError, match="211 tokens in its vocabulary, the dense model 256"):
        measured([], dense=tiny_checkpoint(config=BYTES), other=tiny_checkpoint())
