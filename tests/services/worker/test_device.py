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
