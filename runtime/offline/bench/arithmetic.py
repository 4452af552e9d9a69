"""Bytes that schemes of several ranks read, and elements that they exchange, from shapes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from runtime.checkpoint.family import LayerLayout
from runtime.checkpoint.slices import norm_after_v, rank_checkpoint
from runtime.checkpoint.weights import FactorPair, layer_shapes, linears_of
from runtime.config import ModelConfig
from runtime.models.registry import model_family
from runtime.offline.bench.ranks import Elements
from runtime.offline.bench.shapes import SHAPES, random_checkpoint, title
from runtime.parallel.partition import LowRankRows, Partition, Scheme


@dataclass(frozen=True)
class Arithmetic:
    """A scheme's costs for one rank.

    Attributes:
        bytes_read: bytes of bf16 weights that a decode step reads, at most over the ranks. Padding,
            norms and the embedding are left out.
        collectives: number of collectives of a layer.
        elements: elements that a layer exchanges for each token.
    """

    bytes_read: int
    collectives: int
    elements: Elements


def arithmetic_of(config: ModelConfig, keep: float, size: int, scheme: Scheme) -> Arithmetic:
    """Return the costs of a scheme for a model of ``size`` ranks.

    Args:
        keep: fraction of parameters that factor pairs keep; 1 for dense matrices.
    """
    layout = model_family(config).layout(config)
    small = replace(config, num_layers=1, vocab_size=size)  # rows of the vocabulary are drawn
    whole = random_checkpoint(small, keep, device="cpu", on_demand=True)
    (layer,) = layer_shapes(whole)
    most = 0
    for rank in range(size):
        part = rank_checkpoint(whole, Partition.of(small, rank, size, scheme))
        (own,) = layer_shapes(part)
        most = max(most, sum(_parameters(linear) for _, linear in linears_of(own)))
    assert part.partition is not None  # `rank_checkpoint` sets it
    exchanged = list(exchanges_of(layer, layout, part.partition))
    head = -(-config.vocab_size // size) * config.hidden_size
    return Arithmetic(
        torch.bfloat16.itemsize * (config.num_layers * most + head),
        len(exchanged),
        sum(exchanged, Elements()),
    )


def _parameters(linear: Any) -> int:
    if isinstance(linear, FactorPair):
        return linear.u.numel() + linear.v.numel()
    count: int = linear.weight.numel()
    return count


def exchanges_of(layer: Any, layout: LayerLayout, partition: Partition) -> Iterator[Elements]:
    """Yield the elements of each collective of a layer for a token.

    Args:
        layer: weights of the whole layer.
    """
    size = partition.size
    for names in layout.groups():
        entry = layout.linears[names[0]]
        linears = [getattr(layer, name) for name in names]
        ranks = [linear.rank for linear in linears if isinstance(linear, FactorPair)]
        residual = partition.residual_rows(entry.inner)
        if partition.scheme is Scheme.BASE:
            yield Elements.of_sum(sum(layout.linears[name].out for name in names))
        elif entry.writes_residual:
            yield Elements.of_sum(sum(ranks or [entry.out]))
        elif residual is not None and norm_after_v(entry, linears):
            yield Elements.of_sum(sum(ranks) + 1)  # and the square
        else:
            if residual is not None:
                yield Elements.of_gather(residual.height, size)
            if ranks:
                yield Elements.of_gather(LowRankRows.of(ranks, 0, size).height, size)


def show_arithmetic(
    shape: str, keeps: Sequence[float], sizes: Sequence[int], schemes: Sequence[Scheme]
) -> None:
    """Print a Markdown table of the costs of schemes."""
    print("| model | T | scheme | GB read on a rank | collectives | elements | on the link |")
    print("|---|---|---|---|---|---|---|")
    for keep in keeps:
        for size in sizes:
            for scheme in schemes if size > 1 else []:
                found = arithmetic_of(SHAPES[shape], keep, size, scheme)
                print(
                    f"| {title(shape, keep)} | {size} | `{scheme}` | {found.bytes_read / 1e9:.1f} "
                    f"| {found.collectives} | {found.elements.once:,} | {found.elements.twice:,} |"
                )
