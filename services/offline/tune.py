"""`headrace tune`: measure a kernel plan for one model on this machine's GPU."""

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from runtime.checkpoint import Checkpoint, load_checkpoint
from runtime.gemm.model import unsupported_by_gemm
from services.common.errors import SettingsError
from services.common.model_source import resolve_model
from services.offline.output import atomic_file


def tune(model: str, out: Path, ranks: Sequence[int] = (1,)) -> str:
    """Find the fastest kernel for each GEMM and write the kernel plan to ``out``.

    Args:
        model: name or path of a checkpoint.
        out: file to write.
        ranks: numbers of ranks of the workers that will use the plan.

    Returns:
        The plan's hash.

    Raises:
        SettingsError: if there is no GPU, or if the model is not supported.
    """
    if not torch.cuda.is_available():
        raise SettingsError(
            "measuring a kernel plan requires a GPU, and torch finds none on this machine"
        )
    checkpoint = load_checkpoint(resolve_model(model), dtype=None)
    from runtime.offline.bench.plan import measure

    _refuse_unsupported(model, checkpoint, ranks)
    console = Console(stderr=True)
    with torch.inference_mode():
        plan = measure(
            checkpoint, ranks, lambda line: console.print(line, highlight=False, markup=False)
        )
    with atomic_file(out) as draft:
        plan.save(draft)
    return plan.hash


def _refuse_unsupported(model: str, checkpoint: Checkpoint, ranks: Sequence[int]) -> None:
    from runtime.offline.bench.plan import distinct_parts

    try:
        for _, size, part in distinct_parts(checkpoint, ranks):
            if reason := unsupported_by_gemm(part, "cuda:0", torch.bfloat16):
                raise SettingsError(
                    f"kernel plans do not support {model} with --tp {size}: {reason}"
                )
    except ValueError as error:
        raise SettingsError(f"{model} cannot be divided: {error}") from error
