"""Workers of several ranks generate the tokens of one rank with every KV format."""

from pathlib import Path

import pytest

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.slices import rank_checkpoint
from runtime.engine import Add
from runtime.errors import KVFormatError
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.parallel.partition import Partition, Scheme
from tests.runtime.kv.calibrated import quantized_spec
from tests.runtime.rank_threads import ThreadGroup, on_ranks
from tests.runtime.tiny import CONFIG, drive, engine_of, request_of, tiny_checkpoint

pytestmark = pytest.mark.slow

LENGTHS = (150, 40)
OUTPUTS = 30
"""Some pages leave the windows of sequences that are decoded."""


def tokens_of(model: Model) -> list[list[int]]:
    engine = engine_of(model, stored=64 * model.layout.plan.encodes)
    requests = [request_of(str(length), length, OUTPUTS) for length in LENGTHS]
    record = drive(engine, *map(Add, requests))
    return [record.output(request.id) for request in requests]


def tokens_on_ranks(
    spec: str,
    size: int,
    checkpoint: Checkpoint | None = None,
    scheme: Scheme = Scheme.LOW_RANK,
) -> list[list[list[int]]]:
    """Return the tokens that each rank samples."""
    whole = checkpoint or tiny_checkpoint()

    def run(group: ThreadGroup) -> list[list[int]]:
        part = rank_checkpoint(whole, Partition.of(CONFIG, group.rank, size, scheme))
        return tokens_of(build_model(part, group=group, kv_format=spec))

    return on_ranks(size, run)


@pytest.mark.few(3)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["dense", "fp8", "k4v2", "stream4-qjl", "kvquant", "fdc"])
def test_ranks_generate_the_tokens_of_one_rank(name: str, size: int, tmp_path: Path) -> None:
    """Two of three ranks have the same KV head. The latents of `fdc` are quantized."""
    spec = quantized_spec(name, tmp_path) if name in ("kvquant", "fdc") else name
    expected = tokens_of(build_model(tiny_checkpoint(), kv_format=spec))
    assert [len(tokens) for tokens in expected] == [OUTPUTS] * len(LENGTHS)
    assert tokens_on_ranks(spec, size) == [expected] * size


@pytest.mark.few(5)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", ["dense", "fp8", "int4", "k4v2", "stream4-qjl", "kvquant", "fdc"])
def test_ranks_that_divide_the_residual_stream_generate_the_tokens_of_one_rank(
    name: str, size: int, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(ranks=(12, 8, 16, 20, 16, 30, 24))
    spec = quantized_spec(name, tmp_path) if name in ("kvquant", "fdc") else name
    expected = tokens_of(build_model(checkpoint, kv_format=spec))
    assert tokens_on_ranks(spec, size, checkpoint, Scheme.EVEN) == [expected] * size


def test_a_model_with_a_format_that_ranks_cannot_divide_is_refused(tmp_path: Path) -> None:
    spec = quantized_spec("palu", tmp_path)
    with pytest.raises(KVFormatError, match="KV format palu stores K of groups of 2 KV heads"):
        tokens_on_ranks(spec, 2)
