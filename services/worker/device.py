"""The torch device of a worker's rank or an offline command."""

import torch

from services.common.errors import SettingsError


def torch_device(name: str, rank: int = 0) -> torch.device:
    """Return the device for ``auto``, ``cpu`` or ``cuda``; ``auto`` is a GPU if there is one.

    Args:
        rank: rank of a worker. Each rank uses the visible GPU with its number.

    Raises:
        SettingsError: if the name is unknown, if a GPU is requested and torch finds none, or if
            there are fewer GPUs than ranks.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise SettingsError(f"device {name}: must be auto, cpu or cuda")
    if name == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        if rank and rank >= (visible := torch.cuda.device_count()):
            raise SettingsError(
                f"tp of at least {rank + 1} needs a GPU for each rank, but this process sees "
                f"{visible}: lower tp, or change CUDA_VISIBLE_DEVICES"
            )
        return torch.device("cuda", rank)
    if name == "auto":
        return torch.device("cpu")
    build = f"torch {torch.__version__}, built for {torch.version.cuda or 'the CPU only'}"
    raise SettingsError(f"device cuda: {build}, sees no GPU here; set device to auto or cpu")


def use_device(device: torch.device) -> None:
    """Make a GPU the current device of this thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes that this process has allocated on a GPU; 0 for a CPU."""
    return 0 if device.type == "cpu" else torch.cuda.memory_reserved(device)
