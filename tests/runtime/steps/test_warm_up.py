"""Warm-up computes a batch for every kernel variant and does not affect later output."""

from typing import Any

import pytest

from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.engine import Add, Engine, LocalExecutor
from runtime.kv.windowed import PageEncoder
from runtime.models.build import build_model
from runtime.pages.plan import PageCount, PagePlan
from runtime.steps.prompts import PromptPageEncoder
from runtime.steps.warm_up import _largest, _small, silent, warm_up_prefill
from tests.runtime.tiny import (
    drive,
    executor_of,
    request_of,
    tiny_checkpoint,
    tiny_model,
)

LIMITS = Limits(max_running=5, max_waiting=8, step_tokens=64, chunk_tokens=32)


def test_prefill_warm_up_reports_all_sizes_and_does_not_change_output() -> None:
    model = tiny_model()
    options = EngineOptions(PageCount(8), LIMITS)
    warm, cold = (Engine(LocalExecutor(model, options)) for _ in range(2))
    progress: list[tuple[str, int]] = []
    cache = executor_of(warm).cache
    encoder = PromptPageEncoder(model, cache)
    warm_up_prefill(model, cache, LIMITS, encoder, lambda *stage: progress.append(stage))
    assert progress == [("prefill", size) for size in (1, 2, 4, 2)]
    assert warm.scheduler.pages.free == (8,)
    requests = [Add(request_of(f"r{n}", 20 + n, seed=n)) for n in range(3)]
    assert drive(warm, *requests).tokens == drive(cold, *requests).tokens


@pytest.mark.parametrize("replay", [False, True])
def test_warm_up_of_a_compressed_format_does_not_change_output(replay: bool) -> None:
    model = build_model(tiny_checkpoint(), kv_format="int4")
    options = EngineOptions(PageCount(20, 10), LIMITS, replay=replay)
    warm, cold = (Engine(LocalExecutor(model, options)) for _ in range(2))
    encode = PageEncoder.encode
    counts = []

    def counted(*args: Any) -> None:
        counts.append(len(args[1]))
        encode(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PageEncoder, "encode", counted)
        executor_of(warm).steps.warm_up(silent)
    assert counts == [1]
    requests = [Add(request_of(f"r{n}", 90 + n, seed=n)) for n in range(2)]
    assert drive(warm, *requests).tokens == drive(cold, *requests).tokens


def test_warm_up_does_nothing_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    engine = Engine(LocalExecutor(model, EngineOptions(PageCount(8), LIMITS)))
    monkeypatch.setattr(model, "forward", None)
    engine.warm_up(silent)


def test_small_batches_cover_all_kernel_specializations() -> None:
    """Page-table widths are 1, a multiple of 16, and another; each sequence has 1 or 2 tokens."""
    kinds = [(len(batch[0].pages), len(batch[0].tokens)) for batch in _small(3, PagePlan(16))]
    assert {width % 16 if width > 1 else "one" for width, _ in kinds} == {"one", 0, 2}
    assert len(set(kinds)) == len(kinds) == 6
    assert all(len(batch) == 3 for batch in _small(3, PagePlan(16)))


@pytest.mark.parametrize(
    ("step_tokens", "chunk_tokens", "context", "each", "sequences"),
    [
        (512, 512, 4096, 512, 1),
        (512, 100, 4096, 100, 5),
        (512, 512, 64, 63, 8),
        (16, 16, 17, 16, 1),
    ],
)
def test_largest_batch_fills_a_step(
    step_tokens: int, chunk_tokens: int, context: int, each: int, sequences: int
) -> None:
    limits = Limits(8, 8, step_tokens=step_tokens, chunk_tokens=chunk_tokens)
    batch = _largest(limits, context, PagePlan(16))
    assert [len(piece.tokens) for piece in batch] == [each] * sequences
    assert all(len(piece.pages) * 16 >= each for piece in batch)
