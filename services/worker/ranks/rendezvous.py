"""Joins the processes of a worker's ranks to a group of `torch.distributed`."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import structlog
import torch
from torch import distributed

from runtime.parallel.group import DistributedGroup, RankGroup
from services.common.process_end import end_at_once
from services.worker.device import use_device

log = structlog.get_logger()

_START_S = 600.0
"""Minimum of `Rendezvous.timeout_s`, seconds.

While the ranks warm up, one may compile kernels that another finds in a cache."""
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}  # NCCL takes prefixes


@dataclass(frozen=True)
class Rendezvous:
    """Place where the ranks find one another: a file in memory, open in the first rank's process.

    It has no name in a folder, so that nothing is left when the processes end.

    Attributes:
        path: path of the open file, for processes of the same user.
        size: number of ranks.
        timeout_s: maximum time that a rank waits for the others, to join and in a collective of
            NCCL or gloo, seconds. Collectives through peer memory have no limit of their own.
    """

    path: str
    size: int
    timeout_s: float

    @classmethod
    def create(cls, size: int, *, step_s: float) -> Self:
        """Open a file, which stays open until this process ends.

        Args:
            step_s: maximum time of a step, seconds.
        """
        descriptor = os.memfd_create("headrace-ranks")
        return cls(f"/proc/{os.getpid()}/fd/{descriptor}", size, max(_START_S, step_s))

    def join(self, rank: int, device: torch.device) -> RankGroup:
        """Join the group of all ranks. Blocks until all have joined.

        GPUs use `PeerGroup` and NCCL, CPUs gloo.

        Connections use the loopback interface only. From now on, the process must end at once:
        destructors of communicators, and threads in a collective, may wait for ended ranks.

        Raises:
            RuntimeError: another rank has ended or does not join in time.
        """
        end_at_once()
        os.environ.update(_LOOPBACK)
        on_gpu = device.type == "cuda"
        use_device(device)
        distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=distributed.FileStore(self.path, self.size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=self.size,
            timeout=timedelta(seconds=self.timeout_s),
            device_id=device if on_gpu else None,
        )
        group = distributed.group.WORLD
        assert group is not None, "this process has just joined"
        if not on_gpu:
            return DistributedGroup(group)
        from runtime.parallel.peer_group import join_fastest  # needs Triton

        joined, reason = join_fastest(group, device)
        if reason is not None:
            log.warning("NCCL computes all collectives", rank=rank, reason=reason)
        return joined
