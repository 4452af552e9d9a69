"""Inference engine: scheduling, chunked prefill and continuous batching over a paged KV cache."""

from runtime.engine.channel import RankProgress, StepChannel, StepReader, follow
from runtime.engine.commands import (
    Add,
    Arrived,
    Cancel,
    CancelChoice,
    Command,
    Computed,
    HistoryArrived,
    Pin,
    Reserve,
    Reserved,
    StepOutput,
)
from runtime.engine.engine import Engine
from runtime.engine.executor import Executor, ExecutorShape
from runtime.engine.local_executor import LocalExecutor
from runtime.engine.ranks import Ranks

__all__ = [
    "Add",
    "Arrived",
    "Cancel",
    "CancelChoice",
    "Command",
    "Computed",
    "Engine",
    "Executor",
    "ExecutorShape",
    "HistoryArrived",
    "LocalExecutor",
    "Pin",
    "RankProgress",
    "Ranks",
    "Reserve",
    "Reserved",
    "StepChannel",
    "StepOutput",
    "StepReader",
    "follow",
]
