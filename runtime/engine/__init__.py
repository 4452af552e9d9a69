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
from runtime.engine.pages import PageCount

__all__ = [
    "Add",
    "Arrived",
    "Cancel",
    "CancelChoice",
    "Command",
    "Computed",
    "Engine",
    "PageCount",
    "Release",
    "Reserve",
    "Reserved",
    "StepOutput",
]
