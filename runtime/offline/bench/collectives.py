"""Latency of collectives between ranks: ``python -m runtime.offline.bench collectives --help``.

Times are those of one collective in a CUDA graph of `CHAIN` equal ones. The ratio is the time of
the fastest kernel of `runtime.parallel.push` divided by that of NCCL. Normed sums also compute the
rms of `HIDDEN` elements that the ranks divide (`RankGroup.sum_normed`).
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from runtime.offline.bench.device import captured, describe, milliseconds
from runtime.offline.bench.ranks import over_ranks
from runtime.parallel.group import DistributedGroup, RankGroup

CHAIN = 40
"""Number of collectives in a graph."""
HIDDEN = 8192
WAYS = ("NCCL", "one step", "two steps")


@dataclass(frozen=True)
class Row:
    """Time of a collective in microseconds, for each of `WAYS`; None where one does not apply."""

    name: str
    times: tuple[float | None, ...]

    def __str__(self) -> str:
        cells = " ".join("        –" if each is None else f"{each:9.1f}" for each in self.times)
        nccl, *others = self.times
        best = min(each for each in others if each is not None)
        return f"{self.name:44} {cells} {best / (nccl or best):7.2f}"


def rows(batches: list[int], widths: list[int], runs: int, group: RankGroup) -> Iterator[Row]:
    """Measure all-reduces and all-gathers for each batch and width. All ranks must call it.

    Args:
        batches: numbers of rows.
        widths: numbers of bf16 elements in a row of the result.
    """
    from runtime.parallel import peer_group  # imports Triton

    if not isinstance(group, DistributedGroup):
        raise ValueError("one rank has no collectives")
    device = torch.device("cuda", group.rank)
    peers = peer_group.PeerGroup.join(group.process_group, device)
    for batch in batches:
        for width in widths:
            size = f"{batch} x {width}, {2 * batch * width / 1024:,.0f} KiB"
            x = torch.randn(batch, width, device=device).bfloat16()
            own = torch.randn(batch, HIDDEN // group.size, device=device).bfloat16()
            for name, collective in _sums(x, own).items():
                times = [_us(partial(collective, group), runs)]
                for limit in (1 << 30, 0):
                    peer_group.ONE_STEP_WORDS = limit
                    times.append(_us(partial(collective, peers), runs))
                yield Row(f"T = {group.size}, {name} of {size}", tuple(times))
            part = x[:, : width // group.size].contiguous()
            gathered = [_us(partial(each.all_gather, part), runs) for each in (group, peers)]
            yield Row(f"T = {group.size}, gather of {size}", (*gathered, None))


def _sums(x: Tensor, own: Tensor) -> dict[str, Callable[[RankGroup], Tensor]]:
    """Return the sums of ``x``, without and with the rms of ``own``, by name."""
    return {
        "sum": lambda group: group.all_reduce(x),
        "normed sum": lambda group: group.sum_normed(x, own, HIDDEN, 1e-5),
    }


def _us(call: Callable[[], Tensor], runs: int) -> float:
    def chain() -> None:
        for _ in range(CHAIN):
            call()

    return milliseconds(captured(chain), runs=runs) * 1e3 / CHAIN


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m runtime.offline.bench collectives")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256, 512])
    parser.add_argument(
        "--width", type=int, nargs="+", default=[2432, 3840, 8192],
        help="elements per sequence, such as inner activations or the hidden size",
    )  # fmt: skip
    parser.add_argument("--runs", type=int, default=30)
    args = parser.parse_args()
    print(describe("cuda"))
    print(f"{'us':44} " + " ".join(f"{way:>9}" for way in WAYS) + "   ratio")
    for ranks in args.ranks:
        work = partial(rows, args.batch, args.width, args.runs)
        for row in over_ranks(ranks, "cuda", work):
            print(row, flush=True)


if __name__ == "__main__":
    main()
