"""Messages of workers that cannot start."""

import pytest
import torch

from services.common.errors import SettingsError
from services.worker.rank_loading import refusing
from services.worker.settings import WorkerSettings


@pytest.mark.parametrize(("tp", "where"), [(1, ""), (2, "rank 1: ")])
def test_model_that_does_not_fit_names_tp(tp: int, where: str) -> None:
    settings = WorkerSettings.load(["--model", "m", "--tp", str(tp)])
    assert isinstance(settings, WorkerSettings)
    with pytest.raises(SettingsError) as refused, refusing(settings, tp - 1):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")
    assert str(refused.value) == (
        f"{where}not enough GPU memory for m, which more GPUs can divide (--tp): "
        "tried to allocate 2 GiB"
    )
