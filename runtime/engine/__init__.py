"""Inference engine: scheduling, chunked prefill and continuous batching over a paged KV cache."""

from runtime.engine.commands import (
    Add,
    Arrived,
    Cancel,
    CancelChoice,
    Command,
    Computed,
    Release,
    Reserve,
    Reserved,
    StepOutput,
)
from runtime.engine.engine import Engine

__all__ = [
    "Add",
    "Arrived",
    "Cancel",
    "CancelChoice",
    "Command",
    "Computed",
    "Engine",
    "Release",
    "Reserve",
    "Reserved",
    "StepOutput",
]
