"""A KV format, `dense`, whose creation fails on the second rank in the way that a variable names.

It is loaded by the processes of ranks, in which a test cannot replace functions.
"""

import os
import signal

import torch

from runtime.config import ModelConfig
from runtime.kv.dense import DenseFormat
from runtime.kv.format import KVFormat

VARIABLE = "HEADRACE_TEST_FAULT"
SPEC = f"{__name__}:FaultyFormat"


class FaultyFormat:
    @classmethod
    def create(
        cls,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        *,
        by_halves: bool = False,
    ) -> KVFormat:
        made = DenseFormat.create(config, device, dtype, by_halves=by_halves)
        if config.first_kv_head:
            match os.environ[VARIABLE]:
                case "memory":
                    raise torch.OutOfMemoryError("out of memory")
                case "bug":
                    raise AttributeError("no such attribute")
                case "differs":
                    made.artifact_hash = "another"
                case number:
                    os.kill(os.getpid(), signal.Signals[number])
        return made
