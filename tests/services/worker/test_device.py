"""The device of offline commands."""

import pytest
import torch

from services.common.errors import SettingsError
from services.worker.device import torch_device


def test_auto_uses_a_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, device in ((False, "cpu"), (True, "cuda:0")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert str(torch_device("auto")) == device
        assert str(torch_device("cpu")) == "cpu"
    assert str(torch_device("cuda")) == "cuda:0"


def test_missing_gpu_and_unknown_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match="sees no GPU"):
        torch_device("cuda")
    with pytest.raises(SettingsError, match="must be auto, cpu or cuda"):
        torch_device("tpu")


def test_each_rank_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert str(torch_device("auto", rank=1)) == "cuda:1"
    assert str(torch_device("cpu", rank=2)) == "cpu"
    with pytest.raises(SettingsError, match=r"tp of at least 3 needs a GPU .* this process sees 2"):
        torch_device("auto", rank=2)
