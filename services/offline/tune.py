"""`headrace tune`: measure a kernel plan for one model on this machine's GPU."""

from pathlib import Path

import torch
from rich.console import Console

from runtime.checkpoint import load_checkpoint
from runtime.gemm.model import unsupported_by_gemm
from services.common.errors import SettingsError
from services.common.model_source import resolve_model
from services.offline.output import atomic_file


def tune(model: str, out: Path) -> str:
    """Find the fastest kernel for each GEMM and write the kernel plan to ``out``.

    Args:
        model: name or path of a checkpoint.
        out: file to write.

    Returns:
        The plan's hash.

    Raises:
        SettingsError: if there is no GPU, or if the model is not supported.
    """
    if not torch.cuda.is_available():
        raise SettingsError(
            "measuring a kernel plan requires a GPU, and torch finds none on this machine"
        )
    checkpoint = load_checkpoint(resolve_model(model), dtype=torch.bfloat16)
    if reason := unsupported_by_gemm(checkpoint, "cuda:0", torch.bfloat16):
        raise SettingsError(f"kernel plans do not support {model}: {reason}")
    from runtime.offline.bench.plan import measure

    console = Console(stderr=True)
    with torch.inference_mode():
        plan = measure(checkpoint, lambda line: console.print(line, highlight=False, markup=False))
    with atomic_file(out) as draft:
        plan.save(draft)
    return plan.hash
