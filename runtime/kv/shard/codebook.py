"""Vector quantization of V: 4 elements of a Hadamard-transformed head are one of 256 vectors."""

import math

import torch
from torch import Tensor

from runtime.errors import KVFormatError
from runtime.kv.transforms import hadamard, sum_by_halves

ENTRIES, WIDTH = 256, 4
"""Vectors of a codebook, and elements of each."""
_ITERATIONS = 30
_CHUNK = 1 << 14
"""Vectors that are compared with the codebook at once."""


def train(values: Tensor, seed: int) -> Tensor:
    """Return the codebook of one layer by k-means (Lloyd's algorithm).

    Starting vectors are drawn from the samples. An entry without members keeps its value.

    Args:
        values: ``[kv_heads, n, dim]`` of any floating dtype.

    Returns:
        fp32 ``[256, 4]`` on the CPU, for heads scaled to the norm ``sqrt(dim)``.

    Raises:
        KVFormatError: there are fewer than 256 vectors.
    """
    vectors = _normalized(values)[0].reshape(-1, WIDTH)
    vectors = vectors[vectors.isfinite().all(dim=1)]
    if len(vectors) < ENTRIES:
        raise KVFormatError(f"{len(vectors)} vectors of V are too few for {ENTRIES} entries")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(vectors), generator=generator)[:ENTRIES]
    book = vectors[drawn.to(vectors.device)]
    for _ in range(_ITERATIONS):
        sums, counts = torch.zeros_like(book), book.new_zeros(ENTRIES)
        for chunk in torch.split(vectors, _CHUNK):
            # A matmul sums in the same order on every run, unlike atomic additions on a GPU.
            member = chunk.new_zeros(len(chunk), ENTRIES)
            member.scatter_(1, _nearest(chunk, book)[:, None], 1.0)
            sums += member.T @ chunk
            counts += member.sum(0)
        book = torch.where(counts[:, None] > 0, sums / counts[:, None].clamp_min(1), book)
    return book.cpu()


def quantize(values: Tensor, book: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize heads: normalize them, and choose the nearest entry for each 4 elements.

    Args:
        values: bf16 or fp32 ``[p, kv_heads, n, dim]``.
        book: fp32 ``[256, 4]``.

    Returns:
        Entries, uint8 ``[p, kv_heads, n, dim / 4]``, and norms, bf16 ``[p, kv_heads, n, 1]``. If a
        squared norm is not finite in fp32, the norm is NaN and all entries are 0.
    """
    normalized, norms = _normalized(values)
    vectors = normalized.view(*values.shape[:-1], -1, WIDTH)
    codes = torch.empty(vectors.shape[:-1], dtype=torch.uint8, device=values.device)
    for page, into in zip(vectors, codes, strict=True):  # bits do not depend on other pages
        into.copy_(_nearest(page.reshape(-1, WIDTH), book).view(into.shape))
    return codes * norms.isfinite(), norms


def dequantize(codes: Tensor, norms: Tensor, book: Tensor) -> Tensor:
    """Return the heads, fp32 ``[..., dim]``; all elements are NaN if the norm is."""
    dim = codes.shape[-1] * WIDTH
    return hadamard(book[codes.long()].flatten(-2) * (norms.float() / math.sqrt(dim)))


def _normalized(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return Hadamard transforms scaled to the norm ``sqrt(dim)``, and the norms in bf16."""
    transformed = hadamard(values)
    squared = sum_by_halves(transformed * transformed)
    norms = torch.where(squared.isfinite(), squared.sqrt(), torch.nan).to(torch.bfloat16)
    scale = math.sqrt(values.shape[-1]) / norms.float()
    return transformed * torch.where(norms == 0, 0.0, scale), norms


def _nearest(vectors: Tensor, book: Tensor) -> Tensor:
    """Return the indices ``[n]`` of the nearest entries to vectors ``[n, 4]``."""
    distances = torch.addmm(book.square().sum(1), vectors, book.T, alpha=-2.0)
    return distances.argmin(dim=1)
