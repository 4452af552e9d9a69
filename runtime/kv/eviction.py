"""Eviction of prompt tokens by Keyformer's scores, and compaction of what is kept.

The score of a token is the attention that the last queries of the prompt pay to it. With logits
x = q·k / √dim of query i of the G query heads of a KV head, and noise ζ,

    score[t] = sum over queries i and heads g of softmax over t of (x[i, g, t] + ζ[t])

(Keyformer's score function with temperature 1, as for prompts). ζ is standard Gumbel noise, which
gives tokens with a small logit a chance to be kept. It is a hash of position and KV head, so that
all workers keep the same tokens. Keyformer evicts in every decode step; this evicts once, when the
prompt is complete.

`runtime.pages.eviction` defines how many tokens are kept. K is stored after RoPE, and therefore
moved without being rotated again.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.errors import KVFormatError
from runtime.kv.compressed import CompressedFormat
from runtime.kv.format import KVFormat

MAX_ELEMENTS = 1 << 24
"""Maximum elements of the keys, and of the logits, of the KV heads that are computed together. It
equals one KV head of 128 dimensions with 131,072 tokens. A single KV head may exceed it."""


def check_eviction(
    kv_format: KVFormat | CompressedFormat, windows: Sequence[int | None] = ()
) -> None:
    """Raise `KVFormatError` if the tokens of a format's pages cannot be moved.

    Formats that undo RoPE assume that the tokens of a page have consecutive positions. After an
    eviction they do not. Formats whose ``keeps_rope`` is None are refused, too. So are models with
    sliding windows, because their pages do not hold the first tokens.

    Args:
        windows: see `ModelConfig`.
    """
    if any(windows):
        raise KVFormatError("kv_eviction does not support models with sliding windows")
    if kv_format.keeps_rope:
        return
    reason = "it does not state keeps_rope"
    if kv_format.keeps_rope is not None:
        reason = (
            "it undoes RoPE by the positions of a page, which are not consecutive after an eviction"
        )
    raise KVFormatError(f"KV format {kv_format.name} does not support kv_eviction: {reason}")


def gumbel_noise(positions: int, kv_heads: int, first_head: int = 0) -> NDArray[np.float32]:
    """Return standard Gumbel noise `[kv_heads, positions]`, a hash of position and KV head.

    Args:
        first_head: index of the first head, see `ModelConfig.first_kv_head`.
    """
    index = np.arange(positions, dtype=np.uint32)[None] * np.uint32(0x9E3779B1)
    heads = np.arange(first_head + 1, first_head + kv_heads + 1, dtype=np.uint32)
    head = heads[:, None] * np.uint32(0x85EBCA77)
    x = index ^ head
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # lowbias32 of C. Wellons
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    x ^= x >> np.uint32(16)
    uniform = (x.astype(np.float64) + 0.5) / 2**32
    noise: NDArray[np.float32] = -np.log(-np.log(uniform)).astype(np.float32)
    return noise


def key_scores(queries: Tensor, keys: Tensor, noise: Tensor) -> Tensor:
    """Return the scores of a prompt's tokens, fp32 `[kv_heads, t]`.

    Args:
        queries: `[w, heads, dim]`, queries of the last ``w`` tokens, after RoPE.
        keys: `[kv_heads, t, dim]`, after RoPE.
        noise: fp32 `[kv_heads, t]`, see `gumbel_noise`.
    """
    kv_heads, tokens, dim = keys.shape
    count, heads, _ = queries.shape
    group = heads // kv_heads
    scaled = queries.float() / math.sqrt(dim)
    # [w, kv_heads * group, dim] -> [kv_heads, w, group, dim] -> [kv_heads, w * group, dim]
    by_head = scaled.view(count, kv_heads, group, dim).transpose(0, 1).flatten(1, 2)
    row = torch.arange(count * group, device=keys.device) // group
    # Which of the last w tokens are later than each query.
    later = torch.arange(count, device=keys.device) > row[:, None]
    # Number of KV heads that are computed together.
    each = max(1, MAX_ELEMENTS // (tokens * max(dim, count * group)))
    found = []
    for first in range(0, kv_heads, each):
        own = slice(first, first + each)
        # [kv_heads, w * group, t]
        logits = torch.baddbmm(noise[own, None], by_head[own], keys[own].float().mT)
        logits[:, :, tokens - count :].masked_fill_(later, -math.inf)
        found.append(logits.softmax(-1).sum(1))
    return torch.cat(found)


def kept_tokens(scores: Tensor, count: int) -> Tensor:
    """Return the ``count`` tokens with the largest scores, in order of position.

    Args:
        scores: `[kv_heads, t]`. Of equal scores, the first is preferred.

    Returns:
        int64 `[kv_heads, count]`.
    """
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    return best.sort(dim=1).values


def compact(
    layers: Sequence[tuple[Tensor, ...]],
    pages: Tensor,
    kept: Tensor,
    first: int,
    first_head: int = 0,
) -> None:
    """Move tokens of consecutive KV heads to consecutive slots.

    Args:
        layers: planes of each layer, `[page, kv_heads, slot, dim]` each, updated.
        pages: int64 `[p]`, pages of the sequence.
        kept: int64 `[layers, heads, count]`, indices of the tokens to move.
        first: slot to which the first token is moved, counted from the start of the sequence.
        first_head: index of the first of the KV heads.
    """
    size = layers[0][0].shape[2]
    head = first_head + torch.arange(kept.shape[1], device=pages.device)[:, None]
    sources, slots = pages[kept // size], kept % size
    target = first + torch.arange(kept.shape[2], device=pages.device)
    target_pages, target_slots = pages[target // size], target % size
    for planes, page, slot in zip(layers, sources, slots, strict=True):
        for plane in planes:
            moved = plane[page, head, slot]  # [heads, count, dim], a copy
            plane[target_pages, head, target_slots] = moved
