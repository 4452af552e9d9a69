"""Projection of pages onto a basis, and back."""

import torch
from torch import Tensor


def project_pages(pages: Tensor, basis: Tensor) -> Tensor:
    """Multiply each page by a basis.

    Each page is one batched matmul of fixed shape: its bits do not depend on the other pages.

    Args:
        pages: fp32 ``[p, heads, n, a]``.
        basis: fp32 ``[heads, a, b]``.

    Returns:
        fp32 ``[p, heads, n, b]``.
    """
    out = pages.new_empty(*pages.shape[:3], basis.shape[2])
    for page, into in zip(pages, out, strict=True):
        torch.bmm(page.contiguous(), basis, out=into)
    return out
