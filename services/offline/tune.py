"""`headrace tune`: a kernel plan for one model on the GPU of this machine."""

from pathlib import Path

import torch
from rich.console import Console

from runtime.checkpoint import load_checkpoint
from runtime.models.model import unsupported_by_gemm
from services.common.errors import SettingsError
from services.common.model_source import resolve_model


def tune(model: str, out: Path) -> str:
    """Measures how each product is computed fastest, and writes it to ``out``; its hash.

    Raises:
        SettingsError: there is nothing to choose for this model on this machine.
    """
    if not torch.cuda.is_available():
        raise SettingsError("a kernel plan is measured on a GPU, and torch sees none here")
    checkpoint = load_checkpoint(resolve_model(model), dtype=torch.bfloat16)
    if reason := unsupported_by_gemm(checkpoint, "cuda:0", torch.bfloat16):
        raise SettingsError(f"the GEMM backend does not support {model}: {reason}")
    from runtime.bench.plan import measure

    console = Console(stderr=True)
    with torch.inference_mode():
        plan = measure(checkpoint, lambda line: console.print(line, highlight=False, markup=False))
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_suffix(".draft")
    plan.save(draft)
    draft.replace(out)
    return plan.hash
