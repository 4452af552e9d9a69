"""KV of workers with several ranks, filled with random numbers instead of those of a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

import codec
from runtime.config import ModelConfig
from runtime.kv.cache import CacheLayout, PagedCache
from runtime.kv.calibration import Artifact
from runtime.kv.dense import DenseFormat
from runtime.kv.format import KVFormat
from runtime.kv.registry import create_format, from_artifact
from runtime.kv.windowed import WindowedFormat
from runtime.pages.sent import SentTokens
from runtime.parallel.partition import Partition
from services.transfer.codecs import Books

PAGE = 16


def format_of(kind: str, config: ModelConfig, artifact: Artifact | None = None) -> KVFormat:
    """Return a format for a model, or for a rank's part of it."""
    if artifact is None:
        return create_format(kind, config, torch.device("cpu"), torch.float32)
    dense = DenseFormat.create(config, torch.device("cpu"), torch.float32)
    return WindowedFormat(dense, from_artifact(kind, artifact, config))


@dataclass(frozen=True)
class RankedKV:
    """The KV caches of the ranks of a worker.

    Attributes:
        whole: cache of a worker of one rank.
        heads: KV heads of each rank.
        caches: cache of each rank.
    """

    whole: PagedCache
    heads: tuple[range, ...]
    caches: tuple[PagedCache, ...]

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        size: int,
        pages: int,
        kind: str = "dense",
        artifact: Artifact | None = None,
    ) -> "RankedKV":
        """Return empty caches of ``size`` ranks."""

        def new(part: ModelConfig) -> PagedCache:
            layout = CacheLayout.of(
                format_of(kind, part, artifact), num_layers=config.num_layers, page_size=PAGE
            )
            return PagedCache(layout, layout.plan.each(pages))

        parts = [Partition.of(config, rank, size).config_of(config) for rank in range(size)]
        return cls(new(config), tuple(part.kv_heads for part in parts), tuple(map(new, parts)))

    def fill(self, seed: int = 0) -> None:
        """Fill all pages with random numbers; copies of a KV head are equal."""
        generator = torch.Generator().manual_seed(seed)
        for plane in self.whole.planes:
            if plane.is_floating_point():
                plane.copy_(torch.randn(plane.shape, generator=generator))
            else:
                plane.random_(0, 256, generator=generator)
        for heads, own in zip(self.heads, self.caches, strict=True):
            for plane, full in zip(own.planes, self.whole.planes, strict=True):
                plane.copy_(full[:, heads.start : heads.stop])

    def holds(self, sender: "RankedKV", sent: SentTokens, pages: Sequence[Sequence[int]]) -> bool:
        """Return whether all ranks have the KV of a sequence that the sender has.

        Args:
            sent: what was sent of the sequence; its page i is in page i of this worker.
            pages: for each page group, the sender's page of each of its pages.
        """
        return all(
            _equal(plane, full[:, heads.start : heads.stop], own.layout, number, sent, pages)
            for heads, own in zip(self.heads, self.caches, strict=True)
            for number, (plane, full) in enumerate(
                zip(own.planes, sender.whole.planes, strict=True)
            )
        )

    def books(self) -> Books:
        """Return a codebook for each encodable plane."""
        return {
            (layer, plane.name): normal_codebook(plane.dtype)
            for layer, plane in self.whole.layout.planes
            if plane.encodable
        }


def _equal(
    plane: Tensor,
    full: Tensor,
    layout: CacheLayout,
    number: int,
    sent: SentTokens,
    pages: Sequence[Sequence[int]],
) -> bool:
    _, described = layout.planes[number]
    group = layout.page_groups.index(described.group)
    for run in sent.pages(group):
        for page in run:
            slots = sent.plan.filled(range(page, page + 1), sent.kept)
            here, there = plane[page, :, :slots], full[pages[group][page], :, :slots]
            if not here.contiguous().view(torch.uint8).equal(there.contiguous().view(torch.uint8)):
                return False
    return True


@cache
def normal_codebook(dtype: torch.dtype) -> codec.Codebook:
    """Return a codebook for normally distributed numbers."""
    numbers = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0))
    return codec.calibrate(numbers, dtype)
