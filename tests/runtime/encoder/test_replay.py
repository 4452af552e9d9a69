"""Graphs of small batches. On the CPU they are computed again at each call, in the same tensors."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from runtime.encoder.batch import EncoderInput, RaggedBatch
from runtime.encoder.replay import BUCKETS, ReplayedBackbone, bucket_of

CPU = torch.device("cpu")
LENGTHS = ((3, 40, 1), (64,), (1,) * 16, (5, 5, 5), (700, 3, 129))


def batch_of(lengths: Sequence[int], *, types: bool = False) -> RaggedBatch:
    inputs = [
        EncoderInput(tuple(range(1, n + 1)), tuple(i % 2 for i in range(n)) if types else ())
        for n in lengths
    ]
    return RaggedBatch.of(inputs)


def hidden_states(batch: RaggedBatch) -> Tensor:
    """Return values that depend on the token and its input, and on nothing of other inputs."""
    rows = torch.arange(len(batch.tokens))
    index = torch.searchsorted(batch.starts[1:-1].long(), rows, right=True)
    types = torch.zeros_like(rows) if batch.types is None else batch.types
    start = batch.starts[index]
    return torch.stack([batch.tokens, batch.positions, types, rows - start], 1).float()


@pytest.mark.parametrize("types", [False, True])
def test_replayed_results_equal_direct_ones(types: bool) -> None:
    backbone = ReplayedBackbone(hidden_states, "test", CPU, None)
    for lengths in (*LENGTHS, *LENGTHS[::-1]):
        batch = batch_of(lengths, types=types and len(lengths) > 1)
        assert torch.equal(backbone(batch), hidden_states(batch)), lengths


def test_larger_batches_are_computed_directly() -> None:
    seen: list[RaggedBatch] = []

    def record(batch: RaggedBatch) -> Tensor:
        seen.append(batch)
        return hidden_states(batch)

    backbone = ReplayedBackbone(record, "test", CPU, None)
    large, small = batch_of([512] * 9), batch_of([60])
    backbone(large)
    backbone(small)
    assert seen[0] is large
    assert len(seen[1].tokens) == 64


@pytest.mark.parametrize(
    ("tokens", "inputs", "bucket"),
    [(1, 1, 64), (64, 16, 64), (65, 1, 128), (64, 17, 384), (4096, 256, 4096), (4096, 257, None)],
)
def test_bucket_holds_tokens_and_inputs(tokens: int, inputs: int, bucket: int | None) -> None:
    assert bucket_of(tokens, inputs) == bucket


def test_no_graph_is_captured_after_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[Callable[[], object]] = []

    def capture(run: Callable[[], object], pool: object) -> Callable[[], object]:
        captures.append(run)
        return run

    monkeypatch.setattr("runtime.encoder.replay.captured", capture)
    backbone = ReplayedBackbone(hidden_states, "test", CPU, None)
    backbone.warm_up()
    assert len(captures) == len(BUCKETS)
    for lengths in LENGTHS:
        backbone(batch_of(lengths))
    assert len(captures) == len(BUCKETS)
