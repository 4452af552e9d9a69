"""Paged sequences with random K and V, and NaN in all unused slots."""

from collections.abc import Sequence

import torch

from runtime.attention.base import Batch, SequenceSlice

PAGE = 16


def pages_of(lengths: list[int]) -> list[list[int]]:
    """Return page ids for sequences of these lengths, in random order and without page 0."""
    counts = [-(-length // PAGE) for length in lengths]
    ids = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)) + 1
    return [part.tolist() for part in torch.split(ids, counts)]


def batch_of(
    lengths: list[int],
    new: int,
    device: torch.device | str = "cpu",
    *,
    evicted: Sequence[int] | None = None,
) -> Batch:
    """Return a batch of the last ``new`` tokens of each sequence.

    Args:
        lengths: tokens in the pages of each sequence.
        evicted: number of tokens of each sequence that are not in its pages; by default 0.
    """
    each = zip(lengths, evicted or [0] * len(lengths), pages_of(lengths), strict=True)
    return Batch.of(
        [
            SequenceSlice(
                [0] * min(new, length), length + gone - min(new, length), pages, evicted=gone
            )
            for length, gone, pages in each
        ],
        device,
    )


def random_pages(
    lengths: list[int], kv_heads: int, dim: int, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V pages with random values for tokens and NaN in all other slots."""
    count = sum(-(-length // PAGE) for length in lengths) + 1
    planes = []
    for seed in (2, 3):
        generator = torch.Generator().manual_seed(seed)
        plane = torch.full((count, kv_heads, PAGE, dim), torch.nan)
        for length, pages in zip(lengths, pages_of(lengths), strict=True):
            for number, page in enumerate(pages):
                used = min(PAGE, length - number * PAGE)
                plane[page, :, :used] = torch.randn(kv_heads, used, dim, generator=generator)
        planes.append(plane.bfloat16().to(device))
    return planes[0], planes[1]
