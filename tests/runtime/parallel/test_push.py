"""Collectives through peer memory, in Triton's interpreter, with one process for each rank."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed

from runtime.offline.bench.ranks import over_ranks
from runtime.parallel import peer_group
from runtime.parallel.group import DistributedGroup, RankGroup
from runtime.parallel.peer_group import PeerGroup
from runtime.parallel.peer_memory import PeerTensor
from runtime.parallel.push import probe_kernel

HALF = 1 << 12
ROWS = (1, 3)


def group_of(folder: Path, group: RankGroup) -> PeerGroup:
    """Return a group whose peer memory consists of files that all ranks map."""
    assert isinstance(group, DistributedGroup)
    memories = [
        torch.from_file(f"{folder}/{rank}", shared=True, size=2 * HALF, dtype=torch.int64)
        for rank in range(group.size)
    ]
    addresses = torch.tensor([memory.data_ptr() for memory in memories])
    own = memories[group.rank].view(2, HALF)
    made = PeerGroup(group.process_group, PeerTensor(own, addresses))
    made.memories = memories  # type: ignore[attr-defined]  # keeps the files mapped
    return made


def inputs(rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator).to(dtype)


def check(folder: Path, one_step: bool, group: RankGroup) -> Iterator[str]:
    """Compare the result of each collective with that of torch, and yield its name."""
    peer_group.ONE_STEP_WORDS = 1 << 17 if one_step else 0
    peer_group._MIN_BLOCK = 64
    made, size = group_of(folder, group), group.size
    probe_kernel[(1,)](made._messages.addresses, made.rank, RANKS=size)
    distributed.barrier(group=made.process_group)
    assert made._messages.own[0, :size].tolist() == [*range(1, size + 1)]
    for rows in ROWS:
        # Two steps need a multiple of 2 * size.
        for width in (8 * size, 400 * size, *[8 * size + 2] * one_step):
            for dtype in (torch.bfloat16, torch.float64):
                parts = [inputs(rank, dtype, rows, width) for rank in range(size)]
                found = made.all_gather(parts[group.rank])
                assert found.equal(torch.cat(parts, dim=1))
                yield f"gather {dtype} {rows} {width}"
            parts = [inputs(rank, torch.bfloat16, rows, width) for rank in range(size)]
            check_sum(made, parts)
            check_normed(made, parts)
            yield f"sum {rows} {width}"
    special = torch.tensor([[torch.inf, torch.nan, 3e38, -0.0] * 2 * size]).bfloat16()
    check_sum(made, [special] * size)
    yield "sum of special numbers"
    parts = [inputs(rank, torch.bfloat16, 2, 2 * HALF) for rank in range(size)]
    found = made.all_reduce(parts[group.rank].clone())
    torch.testing.assert_close(found, sum(parts), rtol=0.02, atol=0.02)
    assert made.all_gather(parts[group.rank]).equal(torch.cat(parts, dim=1))
    assert made.all_reduce(torch.ones(1, 3)).equal(torch.full((1, 3), size).float())
    assert made.add_sum(torch.ones(1, 3), torch.ones(1, 3)).equal(torch.full((1, 3), size + 1.0))
    yield "other collectives"


def check_sum(made: PeerGroup, parts: list[Tensor]) -> None:
    total = parts[0].float()
    for part in parts[1:]:
        total += part.float()
    found, expected = made.all_reduce(parts[made.rank].clone()), total.bfloat16()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert found.signbit().equal(expected.signbit() & ~expected.isnan())
    before = inputs(made.size, torch.bfloat16, *expected.shape)
    found = made.add_sum(before.clone(), parts[made.rank].clone())
    torch.testing.assert_close(found, before + expected, rtol=0, atol=0, equal_nan=True)


def check_normed(made: PeerGroup, parts: list[Tensor]) -> None:
    """Compare with sums in fp32, for fewer and for more elements than programs square at once."""
    total = torch.stack([part.float() for part in parts]).sum(0)
    for columns in (24, 1500):
        inputs_of = [
            inputs(7 + rank, torch.bfloat16, len(total), columns) for rank in range(made.size)
        ]
        mean = torch.cat(inputs_of, dim=1).float().square().mean(1, keepdim=True)
        expected = total * torch.rsqrt(mean + 0.25)
        elements = made.size * columns
        for group in (made, DistributedGroup(made.process_group)):
            addend, x = parts[made.rank].clone(), inputs_of[made.rank]
            found = group.sum_normed(addend, x, elements, 0.25)
            assert found.dtype is torch.bfloat16
            torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=2**-7)
    exact = made.sum_normed(parts[made.rank].clone(), x, elements, 0.25)
    torch.testing.assert_close(exact, expected.bfloat16(), rtol=2**-8, atol=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("one_step", [True, False])
def test_results_equal_those_of_torch(
    size: int, one_step: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for rank in range(size):
        (tmp_path / f"{rank}").write_bytes(bytes(16 * HALF))
    names = list(over_ranks(size, "cpu", partial(check, tmp_path, one_step)))
    assert len(names) == (20 if one_step else 14)
