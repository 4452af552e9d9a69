"""Times of an engine's passes on the ranks of one process group.

Passes are those of `runtime.steps`, up to the logits: sampling is not part of them. Models have
fewer layers than the whole one; a model of one layer tells the time of a layer from that of the
rest.
"""

import gc
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch

from runtime.attention.base import Batch, SequenceSlice
from runtime.errors import RuntimeFault
from runtime.gemm.model import GemmModel, build_fastest_model
from runtime.models.model import Model
from runtime.offline.bench.deinfer.cases import (
    Case,
    Count,
    Failure,
    Pass,
    Place,
    Result,
    Timing,
    Weights,
)
from runtime.offline.bench.device import milliseconds
from runtime.offline.bench.ranks import (
    Collectives,
    CountedGroup,
    Elements,
    over_ranks,
    rank_part,
)
from runtime.offline.bench.shapes import PAGE, SHAPES, random_checkpoint
from runtime.pages.plan import pages_for
from runtime.parallel.group import DistributedGroup, RankGroup
from runtime.parallel.partition import Partition
from runtime.steps.decode import DecodeReplay
from runtime.steps.mixed import MixedReplay
from runtime.steps.slots import BatchSlots


@dataclass(frozen=True)
class Options:
    """Options of all measurements.

    Attributes:
        device: ``cuda`` or ``cpu``.
        layers: number of layers of the longer model, at least 2.
        runs: timed runs of each pass.
    """

    device: str
    layers: int
    runs: int


@dataclass(frozen=True)
class Measured:
    """The result of a case, sent from the first rank."""

    case: Case
    result: Result


def measure_place(
    place: Place, cases: Sequence[Case], options: Options, deadline: float
) -> Generator[Measured, None, None]:
    """Measure cases of one place, in one process group, in the order of their first weights.

    Args:
        deadline: see `over_ranks`.

    Raises:
        RuntimeError: a rank failed.
    """
    work = partial(measure, sorted(cases, key=_order_of(cases)), options)
    return over_ranks(
        place.ranks,
        options.device,
        work,
        Collectives.FASTEST if place.nvlink else Collectives.NCCL,
        direct=place.nvlink,
        deadline=deadline,
    )


def _order_of(cases: Sequence[Case]) -> Callable[[Case], int]:
    """Return a key that brings cases with equal weights together."""
    order: dict[Weights, int] = {}
    for case in cases:
        order.setdefault(case.system.weights, len(order))
    return lambda case: order[case.system.weights]


def measure(cases: Sequence[Case], options: Options, group: RankGroup) -> Iterator[Measured]:
    """Measure cases on one rank. Cases with the same weights are consecutive."""
    for weights, some in groupby(cases, key=lambda case: case.system.weights):
        own = list(some)
        try:
            bench = WeightsBench(weights, options, group)
        except (RuntimeFault, ValueError) as error:
            yield from (Measured(case, Failure(str(error))) for case in own)
            continue
        for case in own:
            yield Measured(case, bench.result(case))
        del bench
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()


class WeightsBench:
    """Models with the same weights on one rank, of one layer and of several.

    Raises:
        RuntimeFault, ValueError: the model cannot be built or divided.
    """

    def __init__(self, weights: Weights, options: Options, group: RankGroup) -> None:
        self._options = options
        self._implementations = implementations_of(group, options.device)
        self._group = CountedGroup(group)
        self._whole_layers = SHAPES[weights.shape].num_layers
        self._layers = min(options.layers, self._whole_layers)
        config = replace(SHAPES[weights.shape], num_layers=self._layers)
        part = random_checkpoint(
            config, weights.fraction, device=options.device, on_demand=True, kept=weights.kept
        )
        if group.size > 1:
            part = rank_part(part, Partition.of(config, group.rank, group.size, weights.scheme))
        several = build_fastest_model(
            part,
            device=options.device,
            dtype=torch.bfloat16 if options.device == "cuda" else torch.float32,
            page_size=PAGE,
            kv_format=weights.kv_format,
            group=self._group,
        )
        self._models = with_first_layer(several), several

    def result(self, case: Case) -> Result:
        """Measure a case. All ranks must call it."""
        group = self._implementations.get(case.system.collectives)
        if group is None:
            return Failure(f"no {case.system.collectives} collectives between these GPUs")
        self._group.use(group)
        if isinstance(case.work, Count):
            return self._elements()
        one, several = (self._ms(model, case.work) for model in self._models)
        return Timing.of(one, several, self._layers, self._whole_layers)

    def _elements(self) -> Elements:
        """Count the elements of one token in the layers after the first one."""
        counts = []
        for model in self._models:
            inputs = Batch.static(1, 1, self._options.device)
            inputs.lengths.fill_(1)
            self._group.counted = Elements()
            model.forward(inputs, model.new_cache(model.layout.plan.each(1)))
            counts.append(self._group.counted)
        difference, layers = counts[1] - counts[0], self._layers - 1
        return Elements(difference.once // layers, difference.twice // layers)

    def _ms(self, model: Model, work: Pass) -> float:
        self._group.silent = work.silent
        try:
            call = pass_of(model, work)
            return milliseconds(call, device=self._options.device, runs=self._options.runs)
        finally:
            self._group.silent = False


def implementations_of(group: RankGroup, device: str) -> dict[Collectives, RankGroup]:
    """Return the implementations of collectives between the ranks of a group."""
    if device == "cpu" or group.size == 1:
        return dict.fromkeys(Collectives, group)
    if not isinstance(group, DistributedGroup):
        raise ValueError(f"unknown group of ranks {group}")
    found: dict[Collectives, RankGroup] = {Collectives.NCCL: DistributedGroup(group.process_group)}
    if group.memory is not None:
        found[Collectives.PUSH] = group
    return found


def with_first_layer(model: Model) -> Model:
    """Return a model with the first layer of another one, and its other parts."""
    config = replace(model.config, num_layers=1)
    changes: dict[str, Any] = {"config": config, "layers": model.layers[:1]}
    if isinstance(model, GemmModel):
        changes["weights"] = replace(model.weights, config=config, layers=model.weights.layers[:1])
    return replace(model, **changes)


def pass_of(model: Model, work: Pass) -> Callable[[], object]:
    """Return a function that computes a pass over an otherwise empty cache."""
    device, plan = model.device, model.layout.plan
    prompt_pages, pages = pages_for(work.tokens, PAGE), pages_for(work.context + 1, PAGE)
    decoding = work.decoding * pages
    cache = model.new_cache(plan.each(decoding + work.prompts * prompt_pages + 1))
    count = work.decoding + work.prompts
    slots = BatchSlots(
        count,
        max(prompt_pages, pages),
        cache.null_pages,
        device,
        prompt_groups=plan.prompt_groups,
    )
    slots.positions[: work.decoding] = work.context
    tables = torch.arange(decoding, dtype=torch.int32, device=device)
    slots.page_tables[:, : work.decoding, :pages] = tables.view(work.decoding, pages)
    logits = torch.zeros(count, len(model.vocabulary.own), device=device)
    graphs = work.graph and device.type == "cuda"
    replayed = model, cache, slots, logits, torch.cuda.graph_pool_handle() if graphs else None
    if not work.prompts:
        return partial(DecodeReplay(*replayed).run, count)
    own = [
        range(first, first + prompt_pages)
        for first in range(decoding, decoding + work.prompts * prompt_pages, prompt_pages)
    ]
    more = plan.prompt_groups - 1
    pieces = [SequenceSlice([1] * work.tokens, 0, each, more_pages=[each] * more) for each in own]
    rows = work.prompts * work.tokens + work.decoding
    completed = [(work.decoding + index, index) for index in range(work.prompts)]
    replay = MixedReplay(*replayed, max_rows=rows)
    return partial(replay.run, pieces, range(work.decoding), completed)
