"""What a worker says of a device that it cannot have."""

import pytest
import torch

from services.common.errors import SettingsError
from services.common.worker import load_worker
from services.common.worker_settings import WorkerSettings


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match=r"device cuda: torch .* sees no GPU"):
        load_worker(WorkerSettings.model_validate({"device": "cuda", "codec": "raw"}))
