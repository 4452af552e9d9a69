"""Choice between variants of a model whose kernels or collectives differ: products, and the scheme.

A variant is timed in decode steps of `SEQUENCES`, through equal layers with random weights; its
time is their geometric mean. Steps of several ranks have their collectives, so that they need as
many GPUs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor

from runtime.attention.base import Batch
from runtime.checkpoint.slices import rank_checkpoint
from runtime.checkpoint.weights import Checkpoint, FactorPair, layer_shapes, linears_of
from runtime.gemm.model import build_fastest_model
from runtime.gemm.plan import KernelPlan, group_key, multiplied_out
from runtime.gemm.weights import PROJECTION_GROUPS
from runtime.megakernel.decode_step import decode_step
from runtime.models.model import Model
from runtime.offline.bench.device import captured, milliseconds
from runtime.offline.bench.ranks import Collectives, over_ranks
from runtime.offline.bench.shapes import PAGE, with_random_weights
from runtime.pages.plan import pages_for
from runtime.parallel.group import ONE_RANK, RankGroup
from runtime.parallel.partition import Partition, Scheme

LAYERS = 8
"""Number of layers of one shape per measurement. Their weights do not fit into the L2 cache."""
SEQUENCES = (1, 64)
"""Numbers of sequences of the measured steps."""
GAIN = 0.97
"""An alternative is chosen if it takes less than this fraction of the default's time."""
_MAX_SHAPES = 12
"""Maximum number of layer shapes that are measured. Other layers keep their factor pairs."""
_CONTEXT = 512
Log = Callable[[str], None]
Shape = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Variant:
    """A model of `LAYERS` equal layers.

    Attributes:
        layer: the whole layer, on the meta device.
        scheme: how ranks divide it.
    """

    layer: Any
    scheme: Scheme = Scheme.LOW_RANK


StepTimes = Callable[[Checkpoint, Sequence[Variant], int], Sequence[float]]
"""Returns the milliseconds of a step of each variant, with a number of ranks."""


def shape_of(layer: Any) -> Shape:
    """Return rows, rank and columns of each factor pair, and rows and columns of each matrix."""
    return tuple(
        (*linear.u.shape, linear.v.shape[1])
        if isinstance(linear, FactorPair)
        else tuple(linear.weight.shape)
        for _, linear in linears_of(layer)
    )


def with_variants(
    plan: KernelPlan,
    whole: Checkpoint,
    sizes: Sequence[int],
    log: Log,
    times: StepTimes | None = None,
) -> KernelPlan:
    """Return the plan with the products and the scheme that are the fastest.

    A choice holds for all numbers of ranks, so a variant must be faster with each that can be
    measured. A plan for workers of one rank as well has no `Scheme.BASE`, because they refuse
    workers with it (`kernel_plan_hash`).

    Args:
        whole: the model, on the meta device.
        sizes: numbers of ranks that can be measured.
    """
    times = times or step_times
    plan = replace(plan, dense=frozenset(_products(whole, sizes, log, times)))
    schemes = [scheme for scheme in Scheme if scheme is not Scheme.BASE or 1 not in sizes]
    several = [size for size in sizes if size > 1]
    if not several:
        return plan
    if Scheme.BASE not in schemes:
        log("the scheme of several ranks is not base, because the plan is for one rank as well")
    return replace(plan, scheme=_fastest_scheme(plan, whole, several, schemes, log, times))


def _products(whole: Checkpoint, sizes: Sequence[int], log: Log, times: StepTimes) -> Iterator[str]:
    """Yield the keys of projection groups whose factor pairs are slower than their products."""
    pairs: list[Any] = []
    products: dict[str, tuple[int, Any]] = {}  # position in `pairs`, layer with the product
    for layer in _distinct(whole.layers):
        keys = {group_key(layer, names): names for names in PROJECTION_GROUPS}
        new = {key: names for key, names in keys.items() if key and key not in products}
        products |= {key: (len(pairs), multiplied_out(layer, new[key])) for key in new}
        pairs += [layer] if new else []
    if not products:
        return
    slower = set(products)
    variants = [Variant(layer) for layer in (*pairs, *(layer for _, layer in products.values()))]
    for size in sizes:
        found = times(whole, variants, size)
        for (key, (at, _)), ms in zip(products.items(), found[len(pairs) :], strict=True):
            log_times(log, key + over(size), pairs=found[at], dense=ms)
            if ms >= GAIN * found[at]:
                slower.discard(key)
    yield from slower if sizes else ()


def _fastest_scheme(
    plan: KernelPlan,
    whole: Checkpoint,
    sizes: Sequence[int],
    schemes: Sequence[Scheme],
    log: Log,
    times: StepTimes,
) -> Scheme:
    """Return the scheme with the smallest ratio to the default's time.

    The ratio of a scheme is the largest over all numbers of ranks.
    """
    applied = layer_shapes(plan.multiply_out(whole))
    layers = _distinct(applied)
    counts = [sum(shape_of(each) == shape_of(layer) for each in applied) for layer in layers]
    variants = [Variant(layer, scheme) for scheme in schemes for layer in layers]
    worst = dict.fromkeys(schemes, 0.0)
    for size in sizes:
        found = iter(times(whole, variants, size))
        means = {scheme: sum(n * next(found) for n in counts) / sum(counts) for scheme in schemes}
        log_times(log, "scheme" + over(size), **means)
        for scheme, ms in means.items():
            worst[scheme] = max(worst[scheme], ms / means[Scheme.LOW_RANK])
    best = min(worst, key=worst.__getitem__)
    return best if worst[best] < GAIN else Scheme.LOW_RANK


def _distinct(layers: Sequence[Any]) -> list[Any]:
    """Return one layer of each of the first `_MAX_SHAPES` shapes."""
    return list({shape_of(layer): layer for layer in layers}.values())[:_MAX_SHAPES]


def step_times(whole: Checkpoint, variants: Sequence[Variant], size: int) -> Sequence[float]:
    """Measure each variant with ``size`` ranks, on as many GPUs."""
    work = partial(times_of_rank, replace(whole, layers=()), variants, "cuda")
    if size == 1:
        return list(work(ONE_RANK))
    torch.cuda.empty_cache()  # the first rank is another process, on the same GPU
    return list(over_ranks(size, "cuda", work, Collectives.FASTEST))


def times_of_rank(
    whole: Checkpoint,
    variants: Sequence[Variant],
    device: str,
    group: RankGroup,
    runs: int = 30,
) -> Iterator[float]:
    """Yield the milliseconds of each variant. All ranks of a group call it."""
    for variant in variants:
        model = _model(whole, variant, device, group)
        steps = (_decode_step(model, count, device) for count in SEQUENCES)
        yield geometric_mean(
            milliseconds(captured(step, device=device), device=device, runs=runs) for step in steps
        )


def _model(whole: Checkpoint, variant: Variant, device: str, group: RankGroup) -> Model:
    config = replace(whole.config, num_layers=LAYERS, context_length=_CONTEXT + 1)
    part = replace(whole, config=config, layers=(variant.layer,) * LAYERS)
    if group.size > 1:
        part = rank_checkpoint(part, Partition.of(config, group.rank, group.size, variant.scheme))
    return build_fastest_model(
        with_random_weights(part, device),
        device=device,
        dtype=torch.bfloat16 if device == "cuda" else torch.float32,
        page_size=PAGE,
        group=group,
    )


def _decode_step(model: Model, sequences: int, device: str) -> Callable[[], Tensor]:
    """Return a decode step of sequences with `_CONTEXT` tokens each."""
    pages = pages_for(_CONTEXT + 1, PAGE)
    batch = Batch.static(sequences, pages, device)
    batch.page_table.copy_(torch.arange(sequences * pages).view(sequences, pages))
    batch.positions.fill_(_CONTEXT)
    batch.lengths.fill_(_CONTEXT + 1)
    cache = model.new_cache(model.layout.plan.each(sequences * pages))
    return decode_step(model, batch, cache)


def over(size: int) -> str:
    """Return how a line of the log names several ranks."""
    return "" if size == 1 else f", {size} ranks"


def log_times(log: Log, name: str, **ms: float) -> None:
    """Log the time of each alternative, in microseconds."""
    log(f"{name:72} " + ", ".join(f"{what} {1e3 * time:.1f} us" for what, time in ms.items()))
