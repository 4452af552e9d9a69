"""Makes factorized checkpoints, and measures what they cost in quality."""

from runtime.compress.compress import METHOD, CompressionReport, artifact_key, compress
from runtime.compress.perplexity import Progress, perplexity
from runtime.compress.text import cut_rows, documentation

__all__ = [
    "METHOD",
    "CompressionReport",
    "Progress",
    "artifact_key",
    "compress",
    "cut_rows",
    "documentation",
    "perplexity",
]
