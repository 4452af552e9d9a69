"""The torch device of a worker or an offline command."""

import torch

from services.common.errors import SettingsError


def torch_device(name: str) -> torch.device:
    """Return the device for ``auto``, ``cpu`` or ``cuda``; ``auto`` is a GPU if there is one.

    A process sees at most one GPU.

    Raises:
        SettingsError: if the name is unknown, or if a GPU is requested and torch finds none.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise SettingsError(f"device {name}: must be auto, cpu or cuda")
    if name == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda:0")
    if name == "auto":
        return torch.device("cpu")
    build = f"torch {torch.__version__}, built for {torch.version.cuda or 'the CPU only'}"
    raise SettingsError(f"device cuda: {build}, sees no GPU here; set device to auto or cpu")
