"""Factorize checkpoints, and measure their perplexity or the similarity of their embeddings."""

from runtime.checkpoint.weights import parameters_kept
from runtime.offline.compress.decomposed import DecomposedModel, decompose_model
from runtime.offline.compress.factorize import (
    CompressionReport,
    artifact_key,
    compress,
    truncate_model,
)
from runtime.offline.compress.methods import Allocation, Method
from runtime.offline.compress.perplexity import Progress, perplexity
from runtime.offline.compress.similarity import embeddings, similarity
from runtime.offline.compress.text import cut_rows, documentation
from runtime.offline.compress.work import WorkFolder

__all__ = [
    "Allocation",
    "CompressionReport",
    "DecomposedModel",
    "Method",
    "Progress",
    "WorkFolder",
    "artifact_key",
    "compress",
    "cut_rows",
    "decompose_model",
    "documentation",
    "embeddings",
    "parameters_kept",
    "perplexity",
    "similarity",
    "truncate_model",
]
