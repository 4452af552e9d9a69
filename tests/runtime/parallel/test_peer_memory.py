"""Ranks agree whether they can access the memory of one another."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import _symmetric_memory

from runtime.errors import PeerAccessError
from runtime.offline.bench.ranks import over_ranks
from runtime.parallel.group import DistributedGroup, RankGroup
from runtime.parallel.peer_group import join_fastest
from runtime.parallel.peer_memory import PeerMemory

CPU = torch.device("cpu")


def join(problem: str, group: RankGroup) -> Iterator[str]:
    """Join with a problem of rank 1, and yield the error of this rank."""
    assert isinstance(group, DistributedGroup)
    second = group.rank == 1
    torch.cuda.can_device_access_peer = lambda *_: not (second and problem == "access")

    def empty(*shape: int, **kinds: Any) -> torch.Tensor:
        if second and problem == "allocation":
            raise RuntimeError("out of memory")
        return torch.empty(*shape, **kinds)

    def rendezvous(own: torch.Tensor, _: str) -> SimpleNamespace:
        if problem == "mapping":
            raise RuntimeError("operation not permitted")
        return SimpleNamespace(buffer_ptrs=[own.data_ptr()] * group.size)

    _symmetric_memory.empty = empty  # type: ignore[assignment]
    _symmetric_memory.rendezvous = rendezvous  # type: ignore[assignment]
    torch.cuda.synchronize = lambda _: None  # type: ignore[assignment,misc]
    try:
        PeerMemory.join(group.process_group, torch.device("cuda", group.rank))
        made = PeerMemory(group.process_group, CPU).zeros(3, dtype=torch.int64)
        yield f"{made.own.tolist()} {len(made.addresses)}"
    except PeerAccessError as error:
        yield str(error)


@pytest.mark.parametrize(
    ("problem", "result"),
    [
        pytest.param("", "[0, 0, 0] 3", marks=pytest.mark.long),
        pytest.param("access", "rank 1: GPU 1 cannot access GPU 0", marks=pytest.mark.long),
        ("allocation", "rank 1: out of memory"),
        pytest.param("mapping", "rank 0: operation not permitted", marks=pytest.mark.long),
    ],
)
def test_problem_of_one_rank_is_raised_on_all(problem: str, result: str) -> None:
    assert list(over_ranks(3, "cpu", partial(join, problem))) == [result]


@pytest.mark.long
def test_nccl_p2p_disable_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    results = list(over_ranks(2, "cpu", partial(join, "")))
    assert results == ["rank 0: NCCL_P2P_DISABLE is 1; rank 1: NCCL_P2P_DISABLE is 1"]


def sum_without_peer_access(group: RankGroup) -> Iterator[str]:
    """Add numbers with the fastest collectives of GPUs without access to one another."""
    assert isinstance(group, DistributedGroup)
    torch.cuda.can_device_access_peer = lambda *_: False
    joined, reason = join_fastest(group.process_group, torch.device("cuda", group.rank))
    yield f"{type(joined).__name__} {joined.all_reduce(torch.ones(2)).tolist()}: {reason}"


def test_workers_without_peer_access_use_nccl_and_have_the_reason() -> None:
    [found] = over_ranks(2, "cpu", sum_without_peer_access)
    reason = "rank 0: GPU 0 cannot access GPU 1; rank 1: GPU 1 cannot access GPU 0"
    assert found == f"DistributedGroup [2.0, 2.0]: {reason}"
