"""Attention over paged KV, and the choice of what computes it."""

from runtime.attention.base import DenseAttention
from runtime.attention.reference import ReferenceAttention


def dense_attention() -> DenseAttention:
    """The backend to use."""
    return ReferenceAttention()
