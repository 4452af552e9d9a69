"""Reads models of the Llama family into canonical weights, and writes factorized ones."""

from runtime.checkpoint.load import load_checkpoint
from runtime.checkpoint.resolve import resolve_model
from runtime.checkpoint.weights import Checkpoint, Dense, FactorPair, LayerWeights, Linear

__all__ = [
    "Checkpoint",
    "Dense",
    "FactorPair",
    "LayerWeights",
    "Linear",
    "load_checkpoint",
    "resolve_model",
]
