"""Makes factorized checkpoints, and measures what they cost in quality."""

from runtime.compress.factorize import (
    METHOD,
    CompressionReport,
    DecomposedModel,
    artifact_key,
    compress,
    decompose_model,
    parameters_kept,
    truncate_model,
)
from runtime.compress.perplexity import Progress, perplexity
from runtime.compress.text import cut_rows, documentation

__all__ = [
    "METHOD",
    "CompressionReport",
    "DecomposedModel",
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
