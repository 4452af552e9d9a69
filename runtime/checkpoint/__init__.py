"""Read model files into a common form of weights, and write factorized checkpoints."""

from runtime.checkpoint.canonical import write_checkpoint
from runtime.checkpoint.load import load_checkpoint
from runtime.checkpoint.resolve import checkpoint_path
from runtime.checkpoint.weights import (
    Checkpoint,
    Dense,
    Factorization,
    FactorPair,
    LayerWeights,
    Linear,
)

__all__ = [
    "Checkpoint",
    "Dense",
    "FactorPair",
    "Factorization",
    "LayerWeights",
    "Linear",
    "checkpoint_path",
    "load_checkpoint",
    "write_checkpoint",
]
