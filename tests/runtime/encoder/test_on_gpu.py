"""Encoders on a GPU."""

import pytest
import torch
from torch.nn import functional

from runtime.encoder.batch import EncoderInput, RaggedBatch
from runtime.encoder.bert import BertBackbone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("keep", [None, 0.5])
def test_kernels_in_bf16_agree_with_torch_in_fp32(keep: float | None) -> None:
    from runtime.encoder.packed import PackedEncoderLayer
    from runtime.offline.bench.encoder import SHAPES, random_encoder

    device = torch.device("cuda")
    checkpoint = random_encoder(SHAPES["bert-base"], keep)
    lengths = [1, 512, 65, 64, 130]
    batch = RaggedBatch.of([EncoderInput(tuple(range(length))) for length in lengths], device)
    with torch.inference_mode():
        backbone = BertBackbone(checkpoint, device, torch.bfloat16, "auto")
        assert isinstance(backbone.layers[0], PackedEncoderLayer)
        found = backbone(batch).float()
        expected = BertBackbone(checkpoint, device, torch.float32, "auto")(batch)
    assert functional.cosine_similarity(found, expected).min() > 0.999
