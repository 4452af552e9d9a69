"""GPUs of this machine, and their assignment to the workers of a local deployment."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from services.common.errors import SettingsError

GPU_SHARE = 0.9
"""Fraction of a GPU's memory that all workers on it use together."""


@dataclass(frozen=True)
class WorkerGpus:
    """GPUs of one worker.

    Attributes:
        names: entries for ``CUDA_VISIBLE_DEVICES``, one for each rank; empty without GPUs.
        share: fraction of each GPU's memory that the worker may use.
    """

    names: tuple[str, ...] = ()
    share: float = GPU_SHARE


def visible_gpus(device: str) -> list[str]:
    """Return the GPUs in ``CUDA_VISIBLE_DEVICES``, or the indices of all GPUs of the machine.

    As for CUDA, the list ends before an entry like -1. A GPU that is listed twice counts once. The
    NVIDIA driver has one folder for each GPU. Importing torch instead would take seconds.

    Args:
        device: auto, cpu or cuda; there are no GPUs for cpu.
    """
    if device == "cpu":
        return []
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        folder = Path("/proc/driver/nvidia/gpus")
        count = len(list(folder.iterdir())) if folder.is_dir() else 0
        return [str(number) for number in range(count)]
    names = []
    for name in map(str.strip, allowed.split(",")):
        if name.startswith("-"):
            break
        if name and name not in names:
            names.append(name)
    return names


def assign_gpus(visible: Sequence[str], ranks: Sequence[int]) -> list[WorkerGpus]:
    """Return the GPUs of each worker, assigned in order.

    A worker of several ranks gets one GPU for each rank, which no other worker uses. Workers of one
    rank get the other GPUs, and share them round-robin if there are fewer GPUs than workers.

    Args:
        visible: names of the GPUs; empty if workers use the CPU.
        ranks: number of ranks of each worker.

    Raises:
        SettingsError: there are not enough GPUs for workers of several ranks, or they are MIG
            instances.
    """
    if not visible:
        return [WorkerGpus() for _ in ranks]
    own = sum(size for size in ranks if size > 1)
    _check(visible, own, shares=1 in ranks)
    single = ranks.count(1)
    shared = min(single, len(visible) - own)
    free = iter(visible)
    pool: list[str] = []
    assigned: list[WorkerGpus] = []
    place = 0
    for size in ranks:
        if size > 1:
            assigned.append(WorkerGpus(tuple(islice(free, size))))
            continue
        if len(pool) < shared:
            pool.append(next(free))
        users = len(range(place, single, shared))
        assigned.append(WorkerGpus((pool[place],), GPU_SHARE / users))
        place = (place + 1) % shared
    return assigned


def _check(visible: Sequence[str], own: int, *, shares: bool) -> None:
    """Check the GPUs for workers of several ranks.

    Args:
        own: number of GPUs that these workers need.
        shares: whether workers of one rank need another GPU.

    Raises:
        SettingsError: as `assign_gpus`.
    """
    if own and any(name.startswith("MIG-") for name in visible):
        raise SettingsError(
            "a worker of several ranks needs whole GPUs, but CUDA_VISIBLE_DEVICES names MIG "
            "instances, of which a process can use only one"
        )
    if own and own + shares > len(visible):
        others = ", and workers of one rank another one" if shares else ""
        raise SettingsError(
            f"the workers need {own + shares} GPUs; visible: {len(visible)} "
            f"({', '.join(visible)}). Each rank of a worker with several ranks needs a GPU of its "
            f"own, {own} in total{others}: reduce --tp or the number of workers, or set "
            "--device cpu"
        )
