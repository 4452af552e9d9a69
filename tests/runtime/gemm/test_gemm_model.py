"""Which checkpoints and devices have models over packed weights. Only shapes are read."""

from dataclasses import replace

import pytest
import torch

from runtime.gemm.model import GemmModel, build_fastest_model, unsupported_by_gemm
from runtime.gemm.weights import PackedWeights
from tests.runtime.tiny import CONFIG, tiny_checkpoint


def test_unsupported_by_gemm_returns_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    checkpoint = tiny_checkpoint()
    bf16 = torch.bfloat16
    assert unsupported_by_gemm(checkpoint, "cuda:0", bf16) is None
    assert "cpu" in str(unsupported_by_gemm(checkpoint, "cpu", bf16))
    assert "float32" in str(unsupported_by_gemm(checkpoint, "cuda", torch.float32))
    assert unsupported_by_gemm(tiny_checkpoint(head_norms=True), "cuda", bf16) is None
    odd = tiny_checkpoint(config=replace(CONFIG, head_dim=20))
    assert "heads of 20" in str(unsupported_by_gemm(odd, "cuda", bf16))
    with pytest.raises(ValueError, match="heads of 20"):
        PackedWeights.pack(odd, "cpu")
    capability = (8, 0)
    assert "8.0" in str(unsupported_by_gemm(checkpoint, "cuda", bf16))


def test_fastest_model_on_a_cpu_has_no_packed_weights() -> None:
    model = build_fastest_model(tiny_checkpoint(), device="cpu", dtype=torch.float32)
    assert not isinstance(model, GemmModel)
    assert model.matmul in {"packed", "plain"}
