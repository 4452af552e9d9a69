"""Models over several ranks: ``python -m runtime.offline.bench tp --help``.

Each rank is a process with a device of its own, which draws its weights there. The floor of a
decode step is the time to read the rank's weights and KV once, at the measured rate of a copy, and
that of prefill the time of the rank's floating-point operations at the rate of one large matmul.
Neither contains communication. A step ends with the logits of each rank; sampling and its
collectives are not measured. Times without communication are those of the same model with
collectives that return their argument.

Memory is that of tensors after the model was built, without the KV cache.

Elements are those of a token in all collectives of a layer, by their formula and counted. As in the
DeInfer paper, an all-reduce counts once in the first number; as on the link, twice in the second.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from runtime.attention.base import Batch, SequenceSlice
from runtime.checkpoint.assemble import nbytes
from runtime.checkpoint.family import family_of
from runtime.gemm.model import build_fastest_model
from runtime.gemm.plan import KernelPlan
from runtime.megakernel.decode_step import decode_step, unsupported_by_megakernel
from runtime.offline.bench.arithmetic import exchanges_of, show_arithmetic
from runtime.offline.bench.deinfer import report
from runtime.offline.bench.device import (
    Figure,
    captured,
    copy_rate,
    describe,
    matmul_rate,
    milliseconds,
    show,
)
from runtime.offline.bench.ranks import (
    Collectives,
    CountedGroup,
    Elements,
    over_ranks,
    rank_part,
)
from runtime.offline.bench.shapes import PAGE, SHAPES, random_checkpoint, title
from runtime.pages.plan import PageCount, pages_for
from runtime.parallel.group import RankGroup
from runtime.parallel.partition import Partition, Scheme

MEGAKERNEL = ", megakernel"


@dataclass(frozen=True)
class Case:
    """Measurements of models of one shape, over ``ranks`` ranks."""

    ranks: int
    collectives: Collectives
    shape: str
    layers: int
    keeps: Sequence[float]
    schemes: Sequence[Scheme]
    batches: Sequence[tuple[int, int]]
    prompts: Sequence[int]
    device: str
    runs: int
    plan: Path | None = None


class RankBench:
    """The benchmark of one model, on one rank."""

    def __init__(self, case: Case, group: RankGroup, keep: float, scheme: Scheme | None) -> None:
        config = SHAPES[case.shape]
        if case.layers:
            config = replace(config, num_layers=case.layers)
        before = _allocated(case.device)
        whole = random_checkpoint(config, keep, device=case.device, on_demand=True)
        self.name = f"{title(case.shape, keep)}, T = {group.size}"
        part, computed = whole, Elements()
        if scheme is not None:
            self.name += f", {scheme}" + (f", {case.collectives}" if case.device == "cuda" else "")
            part = rank_part(whole, Partition.of(config, group.rank, group.size, scheme))
            layout = family_of(config.architecture).layout(config)
            assert part.partition is not None  # `rank_part` sets it
            exchanged = exchanges_of(whole.layers[0], layout, part.partition)
            computed = sum(exchanged, Elements())
        self._case = case
        self._group = CountedGroup(group)
        self._model = build_fastest_model(
            part,
            device=case.device,
            dtype=torch.bfloat16 if case.device == "cuda" else torch.float32,
            page_size=PAGE,
            plan=None if case.plan is None else KernelPlan.load(case.plan),
            group=self._group,
        )
        self.bytes_read = self._model.step_weight_bytes
        self._share = nbytes(part, self._model.dtype)
        self._layer_elements = self.bytes_read // self._model.dtype.itemsize - part.lm_head.numel()
        del whole, part
        self._print_memory(_allocated(case.device) - before)
        self._print_sizes(computed)

    def figures(self, copy: float, matmul: float) -> Iterator[Figure]:
        """Measure decode steps and prompts.

        Args:
            copy: bandwidth of a copy, in bytes per millisecond.
            matmul: floating-point operations of a matmul per millisecond.
        """
        for batch, context in self._case.batches:
            yield from self._decode(batch, context, copy)
        for tokens in self._case.prompts:
            yield from self._prefill(tokens, matmul)

    def _decode(self, batch: int, context: int, rate: float) -> Iterator[Figure]:
        model, device = self._model, self._case.device
        pages = pages_for(context + 1, PAGE)
        cache = model.new_cache(model.layout.plan.each(batch * pages))
        inputs = Batch.static(batch, pages, device)
        inputs.page_table.copy_(torch.arange(batch * pages).view(batch, pages))
        inputs.positions.fill_(context)
        inputs.lengths.fill_(context + 1)
        name = f"{self.name}, decode, batch {batch}, context {context}"
        kv_read = cache.layout.page_bytes.of(model.layout.plan.received(context + 1))
        floor = (self.bytes_read + batch * kv_read) / rate
        ways: dict[str, Callable[[], Tensor]] = {"": partial(model.forward, inputs, cache)}
        if device == "cuda" and unsupported_by_megakernel(model) is None:
            ways[MEGAKERNEL] = decode_step(model, inputs, cache)
        for way, step in ways.items():
            yield from self._timed(name + way, step, floor)

    def _prefill(self, tokens: int, rate: float) -> Iterator[Figure]:
        model = self._model
        pages = pages_for(tokens, PAGE)
        cache = model.new_cache(PageCount(pages + 1))
        piece = SequenceSlice([1] * tokens, 0, range(pages))
        attention = 2 * model.config.num_layers * model.config.num_heads * model.config.head_dim
        floor = (2 * self._layer_elements * tokens + attention * tokens**2) / rate
        batch = Batch.of([piece], self._case.device)
        name = f"{self.name}, prefill, {tokens} tokens"
        yield from self._timed(name, partial(model.forward, batch, cache), floor)

    def _timed(self, name: str, step: Callable[[], Tensor], floor: float) -> Iterator[Figure]:
        """Measure a step as a CUDA graph with and without communication, and without a graph."""
        case, group = self._case, self._group
        call = captured(step, device=case.device)
        yield Figure(name, self._milliseconds(call), floor)
        if group.size > 1 and not name.endswith(MEGAKERNEL):
            group.silent = True
            call = captured(step, device=case.device)
            yield Figure(f"{name}, without communication", self._milliseconds(call), floor)
            group.silent = False
        if case.device == "cuda":
            yield Figure(f"{name}, without a graph", self._milliseconds(step), floor)

    def _milliseconds(self, call: Callable[[], object]) -> float:
        return milliseconds(call, device=self._case.device, runs=self._case.runs)

    def _print_memory(self, allocated: int) -> None:
        """Print the GPU memory of the model on each rank, beside its share of the weights."""
        device = self._case.device
        if device != "cuda":
            return
        own = torch.tensor([[allocated, self._share]], device=device)
        sizes = self._group.all_gather(own).view(-1, 2).tolist()
        for rank, (found, share) in enumerate(sizes):
            print(
                f"{self.name}, rank {rank}: {found / 1e9:.3f} GB allocated, "
                f"{share / 1e9:.3f} GB of weights by its part, ratio {found / share:.4f}"
            )

    def _print_sizes(self, computed: Elements) -> None:
        """Print the weights that a rank reads, and the elements that its layers exchange."""
        print(f"{self.name}: {self.bytes_read / 1e9:.3f} GB of weights read on each rank")
        group, config = self._group, self._model.config
        if group.size == 1:
            return
        cache = self._model.new_cache(self._model.layout.plan.each(1))
        inputs = Batch.static(1, 1, self._case.device)
        inputs.lengths.fill_(1)
        group.counted = Elements()
        self._model.forward(inputs, cache)
        counted = group.counted - Elements.of_sum(config.hidden_size)  # the embedding
        if (residual := self._model.residual) is not None:  # the input of the final norm
            counted -= Elements.of_gather(residual.rows.height, group.size)
        for kind, found, per in (
            ("computed", computed, 1),
            ("counted", counted, config.num_layers),
        ):
            print(
                f"{self.name}: {found.once / per:,.0f} elements per token and layer {kind}, "
                f"{found.twice / per:,.0f} on the link"
            )


def _allocated(device: str) -> int:
    """Return the bytes of tensors on the GPU; 0 on the CPU."""
    gc.collect()
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def figures(case: Case, group: RankGroup) -> Iterator[Figure]:
    """Measure all models of a case. Every rank calls it, and takes all figures."""
    copy, matmul = copy_rate(case.device), matmul_rate(case.device)
    for keep in case.keeps:
        for scheme in case.schemes if group.size > 1 else [None]:
            yield from RankBench(case, group, keep, scheme).figures(copy, matmul)


def main() -> None:
    if "--paper" in sys.argv:
        sys.argv.remove("--paper")
        return report.main()
    parser = argparse.ArgumentParser(prog="python -m runtime.offline.bench tp")
    parser.add_argument(
        "--paper",
        action="store_true",
        help="reproduce tables of the DeInfer paper instead; --paper --help lists the options",
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-70b", help="model")
    parser.add_argument("--layers", type=int, default=0, help="number of layers; 0 for all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks")
    parser.add_argument(
        "--keep",
        type=float,
        nargs="+",
        default=[1.0, 0.6, 0.4],
        help="fractions of parameters that factor pairs keep; 1 for dense",
    )
    parser.add_argument(
        "--schemes", type=Scheme, nargs="+", default=[*Scheme], help=", ".join(Scheme)
    )
    parser.add_argument(
        "--collectives",
        type=Collectives,
        nargs="+",
        default=[Collectives.NCCL],
        help="nccl, push, fastest",
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64], help="decoded sequences")
    parser.add_argument("--context", type=int, default=512, help="their length in tokens")
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048], help="prompt lengths")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--runs", type=int, default=20, help="timed runs of each call")
    parser.add_argument("--plan", type=Path, help="kernel plan, of which only tiles are used")
    parser.add_argument(
        "--arithmetic",
        action="store_true",
        help="only print what the schemes read and exchange, which needs no GPU",
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    if args.arithmetic:
        return show_arithmetic(args.shape, args.keep, args.ranks, args.schemes)
    batches = [(batch, args.context) for batch in args.batch]
    cases = (
        Case(
            ranks, collectives, args.shape, args.layers, args.keep, args.schemes, batches,
            args.tokens, args.device, args.runs, args.plan,
        )
        for ranks in args.ranks
        for collectives in args.collectives[: 1 if ranks == 1 else None]
    )  # fmt: skip
    rows = (
        over_ranks(case.ranks, case.device, partial(figures, case), case.collectives)
        for case in cases
    )
    return show(describe(args.device), chain.from_iterable(rows), args.json)
