"""Factorize checkpoints and measure their perplexity."""

from runtime.checkpoint.weights import parameters_kept
from runtime.compress.factorize import (
    CompressionReport,
    DecomposedModel,
    artifact_key,
    compress,
    decompose_model,
    truncate_model,
)
from runtime.compress.methods import Allocation, Method
from runtime.compress.perplexity import Progress, perplexity
from runtime.compress.text import cut_rows, documentation

__all__ = [
    "Allocation",
    "CompressionReport",
    "DecomposedModel",
    "Method",
    "Progress",
    "artifact_key",
    "compress",
    "cut_rows",
    "decompose_model",
    "documentation",
    "parameters_kept",
    "perplexity",
    "truncate_model",
]
