"""Encoders on a GPU."""

from functools import cache
from typing import Any

import pytest
import torch
from torch.nn import functional

from runtime.checkpoint.weights import Checkpoint
from runtime.encoder.batch import EncoderInput, RaggedBatch
from runtime.encoder.bert import BertBackbone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


SHORT, FULL = (1, 512, 65, 64, 130), (512,) * 30 + (1, 300, 511)
"""Lengths of inputs. The second list fills the GPU."""


@cache
def bert_base(keep: float | None) -> Checkpoint:
    """Return a model of random weights."""
    from runtime.offline.bench.encoder import SHAPES, random_encoder  # imports Triton

    return random_encoder(SHAPES["bert-base"], keep)


@pytest.mark.parametrize("keep", [None, 0.5])
@pytest.mark.parametrize("lengths", [SHORT, FULL], ids=["short", "full"])
@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"fused_mlp": False},
        {"attention_tokens": 1000, "mlp_tokens": 999},
    ],
    ids=str,
)
def test_kernels_in_bf16_agree_with_torch_in_fp32(
    keep: float | None, lengths: tuple[int, ...], variant: dict[str, Any]
) -> None:
    from runtime.encoder.packed import PackedEncoderLayers
    from runtime.encoder.passes import Passes

    device = torch.device("cuda")
    checkpoint = bert_base(keep)
    batch = RaggedBatch.of([EncoderInput(tuple(range(length))) for length in lengths], device)
    with torch.inference_mode():
        passes = Passes(**variant)
        backbone = BertBackbone(checkpoint, device, torch.bfloat16, "auto", passes)
        assert isinstance(backbone.layers, PackedEncoderLayers)
        found = backbone(batch).float()
        expected = BertBackbone(checkpoint, device, torch.float32, "auto")(batch)
    assert functional.cosine_similarity(found, expected).min() > 0.999


@pytest.mark.parametrize("keep", [None, 0.5])
def test_replayed_batches_equal_the_same_padded_batch(keep: float | None) -> None:
    """One graph serves batches of other lengths. Only matmuls may differ from an unpadded batch."""
    from runtime.encoder.replay import ReplayedBackbone

    device = torch.device("cuda")
    checkpoint = bert_base(keep)
    with torch.inference_mode():
        backbone = BertBackbone(checkpoint, device, torch.bfloat16, "auto")
        replayed = ReplayedBackbone(backbone, "test", device, torch.cuda.graph_pool_handle())
        for lengths in [(3, 500, 65), (400, 300), (64,) * 12, (1, 2, 3), (500, 268)]:
            inputs = [EncoderInput(tuple(range(length))) for length in lengths]
            batch = RaggedBatch.of(inputs, device)
            found = replayed(batch).clone()
            missing = 768 - sum(lengths) if sum(lengths) > 512 else 64 - sum(lengths)
            filler = [EncoderInput((0,) * missing)] if missing else []
            padded = backbone(RaggedBatch.of([*inputs, *filler], device))
            assert torch.equal(found, padded[: len(found)]), lengths
            expected = backbone(batch)
            assert functional.cosine_similarity(found.float(), expected.float()).min() > 0.9999
