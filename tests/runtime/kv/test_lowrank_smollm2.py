"""The calibrated formats on activations of a real model for held-out text."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from runtime.checkpoint import load_checkpoint
from runtime.config import ModelConfig
from runtime.kv import fdc, palu, shard
from runtime.kv.calibration import KVMoments
from runtime.kv.compressed import CompressedFormat
from runtime.offline.compress import cut_rows, documentation
from runtime.offline.compress.kv_moments import kv_moments
from runtime.offline.compress.layerwise import LayerwiseModel
from services.common.model_source import ModelSourceError, resolve_model
from services.tokenizer.loading import load_tokenizer
from tests.runtime.kv.lowrank import PAGE, QKV, pages_of, relative_error, round_trip

pytestmark = pytest.mark.slow

LAYERS = 3
"""Layers that are measured; errors of K, V and scores are of the first one alone."""


@dataclass(frozen=True)
class Sample:
    config: ModelConfig
    moments: list[KVMoments]
    held_out: QKV


@pytest.fixture(scope="module")
def sample() -> Sample:
    try:
        path = resolve_model("smollm2-135m")
    except ModelSourceError as missing:
        pytest.skip(str(missing))
    checkpoint = load_checkpoint(path, dtype=torch.float32)
    checkpoint = replace(checkpoint, layers=checkpoint.layers[:LAYERS])
    config = replace(checkpoint.config, num_layers=LAYERS)
    checkpoint = replace(checkpoint, config=config)
    tokenizer = load_tokenizer(path)
    train, held_out = (tokenizer.encode(text) for text in documentation())
    moments = list(kv_moments(checkpoint, cut_rows(train, 512, 12)))
    # Layer 0 of the formats is the last layer of the model: it is the least trivial one.
    return Sample(config, moments[::-1], _last_layer(checkpoint, cut_rows(held_out, 512, 1)))


def _last_layer(checkpoint: object, tokens: Tensor) -> QKV:
    model = LayerwiseModel(checkpoint)  # type: ignore[arg-type]
    hidden = model.embed(tokens)
    found: list[QKV] = []

    def keep(q: Tensor, k: Tensor, v: Tensor) -> None:
        found.append((q[0], k[0], v[0]))

    for index in range(LAYERS):
        model.forward(model.layer(index), hidden, hidden, observe_heads=keep)
    return found[-1]


def errors(kv_format: CompressedFormat, sample: Sample) -> tuple[float, float, float]:
    """Return the relative errors of K, V and scores after the first page."""
    q, k, v = (x[:, PAGE:] for x in sample.held_out)
    keys, values = round_trip(kv_format, pages_of(k), pages_of(v))
    found = keys.transpose(0, 1).flatten(1, 2)
    queries = q.reshape(k.shape[0], -1, k.shape[2])
    scores = relative_error(queries @ found.mT, queries @ k.mT)
    return relative_error(found, k), relative_error(values, pages_of(v)), scores


def fdc_of(sample: Sample, **options: int | bool | float) -> fdc.FdcFormat:
    made = fdc.calibrate(sample.moments, fdc.FdcOptions(**options), "")  # type: ignore[arg-type]
    return fdc.FdcFormat(sample.config, made)


@pytest.mark.long
def test_fdc_with_higher_rank_has_smaller_errors(sample: Sample) -> None:
    low, high, full = (errors(fdc_of(sample, rank=rank), sample) for rank in (32, 48, 64))
    assert all(a < 0.8 * b for a, b in zip(high, low, strict=True)), (low, high)
    assert max(full) < 2**-8, full  # only rounding to bf16


def test_fdc_basis_that_covers_queries_has_smaller_errors_of_scores(sample: Sample) -> None:
    shared = errors(fdc_of(sample, rank=32), sample)
    alone = errors(fdc_of(sample, rank=32, share_r=False), sample)
    assert alone[0] < shared[0]
    assert shared[2] < alone[2]


def test_rope_hides_the_low_rank_of_keys(sample: Sample) -> None:
    """Palu's latents before RoPE keep more of K than FDC's best basis of K at the same bytes."""
    before = palu.calibrate(sample.moments, palu.PaluOptions(rank=32), "")
    palu_errors = errors(palu.PaluFormat(sample.config, before), sample)
    fdc_errors = errors(fdc_of(sample, rank=32, share_r=False), sample)
    assert palu_errors[0] < fdc_errors[0]
    assert palu_errors[1] == pytest.approx(fdc_errors[1])


def test_shard_errors(sample: Sample) -> None:
    """All components are kept, so the only error is that of 4-bit codes, below a fifth."""
    full, part = (
        errors(
            shard.ShardFormat(sample.config, shard.calibrate(sample.moments, options, "")), sample
        )
        for options in (shard.ShardOptions(rank=192), shard.ShardOptions())
    )
    assert full[0] < 0.2
    assert full[0] < part[0] < 0.7
    assert full[1] == part[1] < 0.4
