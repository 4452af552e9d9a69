"""SmolLM2 over several ranks in threads: its 3 KV heads are uneven or on several ranks."""

import pytest

from runtime.checkpoint import Checkpoint, load_checkpoint
from runtime.checkpoint.resolve import checkpoint_path
from runtime.checkpoint.slices import rank_checkpoint
from runtime.core.request import SampledToken, SamplingParams
from runtime.engine import Add
from runtime.errors import CheckpointError
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.parallel.partition import Partition
from tests.runtime.rank_threads import ThreadGroup, on_ranks
from tests.runtime.tiny import drive, engine_of, request_of

EPSILON = 0.05
"""Difference of the two best log probabilities below which a token may differ, in nats: ranks add
in another order, and KV is rounded to bf16."""
LENGTHS = (1, 40, 100)
Outputs = dict[tuple[str, int], list[SampledToken]]


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    try:
        path = checkpoint_path("smollm2-135m")
    except CheckpointError as error:
        pytest.skip(str(error))
    return load_checkpoint(path, dtype=None)


@pytest.fixture(scope="module")
def expected(smollm2: Checkpoint) -> Outputs:
    return outputs(build_model(smollm2))


def outputs(model: Model) -> Outputs:
    sampling = SamplingParams(logprobs=2)
    requests = [request_of(f"r{n}", n, 24, sampling=sampling) for n in LENGTHS]
    return drive(engine_of(model), *map(Add, requests)).tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "size", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)]
)
def test_greedy_tokens_equal_those_of_one_rank(
    smollm2: Checkpoint, expected: Outputs, size: int
) -> None:
    def run(group: ThreadGroup) -> Outputs:
        partition = Partition.of(smollm2.config, group.rank, size)
        return outputs(build_model(rank_checkpoint(smollm2, partition), group=group))

    first, *others = on_ranks(size, run)
    assert all(other == first for other in others)
    for name, tokens in expected.items():
        for own, one in zip(first[name], tokens, strict=True):
            if own.token != one.token:
                (_, best), (_, second), *_ = one.top
                assert best - second < EPSILON, (name, one.index)
                break
            assert own.logprob == pytest.approx(one.logprob, abs=EPSILON)
