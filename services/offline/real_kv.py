"""A model's own KV over real text, page for page as its cache holds it."""

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from runtime.core.limits import Limits
from runtime.core.request import Request, SamplingParams
from runtime.engine import Add, Engine, StepOutput
from runtime.models.model import Model
from services.worker.loading import PAGE_SIZE

SAMPLE_PROMPTS, SAMPLE_TOKENS = 4, 512


def prefill_sample(
    model: Model, tokens: list[int], console: Console
) -> dict[tuple[int, str], Tensor]:
    """Computes a few prompts, evenly spread over a long text.

    Args:
        model: with pages of `PAGE_SIZE` tokens.
        tokens: of the text; prompts do not overlap if it has `SAMPLE_PROMPTS * SAMPLE_TOKENS`.

    Returns:
        (layer, plane name) → ``[page, kv_head, slot, dim]`` in the cache's dtype, full pages only,
        in the cache's order. Planes that the codec does not encode are left out.
    """
    engine = Engine(
        model,
        num_pages=SAMPLE_PROMPTS * SAMPLE_TOKENS // PAGE_SIZE,
        limits=Limits(max_running=SAMPLE_PROMPTS, max_waiting=SAMPLE_PROMPTS),
    )
    stride = len(tokens) // SAMPLE_PROMPTS
    prompts = [tokens[at * stride :][:SAMPLE_TOKENS] for at in range(SAMPLE_PROMPTS)]
    pages = _prefill(engine, prompts, console)
    return {
        (layer, plane.name): tensor[pages]
        for (layer, plane), tensor in zip(model.layout.planes, engine.cache.planes, strict=True)
        if plane.encodable
    }


def _prefill(engine: Engine, prompts: list[list[int]], console: Console) -> Tensor:
    """Computes the prompts; returns the pages that hold their KV, all of them full."""
    commands = [
        Add(Request(str(at), tuple(prompt), len(prompt), SamplingParams(), max_tokens=1), hold=True)
        for at, prompt in enumerate(prompts)
    ]
    pages: list[int] = []
    with Progress(console=console) as progress, torch.inference_mode():
        task = progress.add_task("prefill", total=sum(map(len, prompts)))
        output: StepOutput = engine.step(commands)
        while True:
            for chunk in output.computed:
                pages += chunk.pages[: chunk.num_tokens // PAGE_SIZE]
                progress.advance(task, chunk.num_tokens)
            if not engine.has_work:
                return torch.tensor(pages)
            output = engine.step([])
