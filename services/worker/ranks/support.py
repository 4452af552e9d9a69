"""Which settings of a worker allow several ranks."""

import torch

from runtime.kv.names import is_calibrated
from services.common.errors import SettingsError
from services.worker.device import torch_device
from services.worker.settings import WorkerSettings

_NOT_DIVIDED = {
    "shard": "its basis of K spans all KV heads",
    "palu": "its bases of K span groups of KV heads",
    "fdc": "its calibration is not divided by KV head",
    "kvquant": "its calibration is not divided by KV head",
}
"""Why ranks cannot have a part of the KV heads with a format, by name."""


def check_ranks(settings: WorkerSettings) -> None:
    """Check the settings of a worker of several ranks, before any process starts.

    The ranks compare their number with the heads of the model when they read its shape.

    Raises:
        SettingsError: there are fewer GPUs than ranks, or the KV format needs all KV heads.
    """
    if settings.tp == 1:
        return
    device = torch_device(settings.device)
    if device.type == "cuda" and (visible := torch.cuda.device_count()) < settings.tp:
        raise SettingsError(
            f"tp is {settings.tp}, but this process sees {visible} GPUs, and each rank needs one: "
            "lower tp, or change CUDA_VISIBLE_DEVICES"
        )
    name = settings.kv_format.partition(":")[0]
    if is_calibrated(name):
        raise SettingsError(
            f"KV format {name} does not support several ranks (tp {settings.tp}): "
            f"{_NOT_DIVIDED[name]}"
        )
