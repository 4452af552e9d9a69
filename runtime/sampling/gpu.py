"""Launchers of the kernels of random draws."""

import torch
import triton
from torch import Tensor

from runtime.sampling.kernels import draw_kernel, mask_kernel, partial_sums_kernel
from runtime.sampling.reference import CANDIDATES, Candidates

_BLOCK, _SPLITS = 1024, 32


def find_candidates(logits: Tensor, temperature: Tensor) -> Candidates:
    """Return `Candidates.of` fp32 logits `[m, vocab]`, whose columns are contiguous.

    Args:
        temperature: fp64 `[m, 1]`, contiguous.
    """
    rows, width = logits.shape
    values, tokens = logits.topk(min(CANDIDATES, width), dim=-1)
    partials = torch.empty(rows, _SPLITS, dtype=torch.float64, device=logits.device)
    partial_sums_kernel[(rows, _SPLITS)](
        logits, logits.stride(0), values, values.stride(0), temperature, partials, width,
        SPLITS=_SPLITS, BLOCK=_BLOCK,
    )  # fmt: skip
    return Candidates(values, tokens, partials.sum(dim=-1, keepdim=True).log_())


def mask_rows(logits: Tensor, masks: Tensor, index: Tensor, first: int) -> Tensor:
    """Return a copy of logits in which tokens that masks do not allow are `FORBIDDEN`.

    Args:
        logits: fp32 `[m, width]`, whose columns are contiguous.
        masks: int32 `[n, words]`, whose columns are contiguous.
        index: int32 `[m]`, the mask of each row; -1 if all tokens are allowed.
        first: bit of a mask for the first column.
    """
    rows, width = logits.shape
    masked = torch.empty(rows, width, dtype=logits.dtype, device=logits.device)
    mask_kernel[(rows, triton.cdiv(width, _BLOCK))](
        logits, logits.stride(0), masks, masks.stride(0), index, masked, width, first,
        BLOCK=_BLOCK,
    )  # fmt: skip
    return masked


def draw_rows(
    candidates: Candidates, best: Tensor, words: Tensor, reals: Tensor, sampled: Tensor, vocab: int
) -> None:
    """Draw tokens for the first `m` rows, and advance their output indices.

    The arguments are those of `draw_kernel`.

    Args:
        vocab: size of the vocabulary of all ranks.
    """
    values, tokens, log_sums = (each.contiguous() for each in candidates)
    rows, count = values.shape
    draw_kernel[(rows,)](
        values, tokens, log_sums, best, words, reals, words.shape[1], sampled, vocab, count,
        WIDTH=triton.next_power_of_2(count), num_warps=8,
    )  # fmt: skip
