"""Encoders on a GPU."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from runtime.encoder.batch import EncoderInput, RaggedBatch
from runtime.encoder.bert import BertBackbone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


SHORT, FULL = (1, 512, 65, 64, 130), (512,) * 30 + (1, 300, 511)
"""Lengths of inputs. The second list fills the GPU."""


@pytest.mark.parametrize("keep", [None, 0.5])
@pytest.mark.parametrize("lengths", [SHORT, FULL], ids=["short", "full"])
@pytest.mark.parametrize(
    "variant",
    [{}, {"fused_mlp": False, "batched_qkv": False}, {"attention_tokens": 1000, "mlp_tokens": 999}],
    ids=str,
)
def test_kernels_in_bf16_agree_with_torch_in_fp32(
    keep: float | None, lengths: tuple[int, ...], variant: dict[str, Any]
) -> None:
    from runtime.encoder.packed import PackedEncoderLayers, Passes
    from runtime.offline.bench.encoder import SHAPES, random_encoder

    device = torch.device("cuda")
    checkpoint = random_encoder(SHAPES["bert-base"], keep)
    batch = RaggedBatch.of([EncoderInput(tuple(range(length))) for length in lengths], device)
    with torch.inference_mode():
        passes = Passes(**variant)
        backbone = BertBackbone(checkpoint, device, torch.bfloat16, "auto", passes)
        assert isinstance(backbone.layers, PackedEncoderLayers)
        found = backbone(batch).float()
        expected = BertBackbone(checkpoint, device, torch.float32, "auto")(batch)
    assert functional.cosine_similarity(found, expected).min() > 0.999
