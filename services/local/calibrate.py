"""`headrace calibrate`: codebooks from a model's own KV on real text."""

from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

import codec
from runtime.checkpoint import load_checkpoint
from runtime.compress import documentation
from runtime.engine import Add, Engine, Limits, StepOutput
from runtime.model import Model
from runtime.sequence import Request, Sampling
from services.common.model_source import resolve_model
from services.common.tokenizer import load_tokenizer
from services.common.worker import PAGE_SIZE

SAMPLE_PROMPTS, SAMPLE_TOKENS = 4, 512


def calibrate(model: str, tokenizer: str, out: Path) -> codec.Codebooks:
    """Prefills real text, counts the exponents of each plane, writes the codebooks to ``out``."""
    console = Console(stderr=True)
    with console.status("loading the model, compiling the codec"):
        codec.warm_up()  # the workers find the compiled loops in the cache
        tokens = load_tokenizer(resolve_model(tokenizer)).encode(documentation()[0])
        runtime_model = Model(load_checkpoint(resolve_model(model)), page_size=PAGE_SIZE)
    engine = Engine(
        runtime_model,
        num_pages=SAMPLE_PROMPTS * SAMPLE_TOKENS // PAGE_SIZE,
        limits=Limits(max_running=SAMPLE_PROMPTS, max_waiting=SAMPLE_PROMPTS),
    )
    stride = len(tokens) // SAMPLE_PROMPTS
    prompts = [tokens[at * stride :][:SAMPLE_TOKENS] for at in range(SAMPLE_PROMPTS)]
    pages = _prefill(engine, prompts, console)
    samples = {
        (plane // 2, "kv"[plane % 2]): tensor[pages]
        for plane, tensor in enumerate(engine.cache.planes)
    }
    codebooks = codec.Codebooks.calibrate(samples)
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_suffix(".draft")
    codebooks.save(draft)
    draft.replace(out)
    return codebooks


def _prefill(engine: Engine, prompts: list[list[int]], console: Console) -> torch.Tensor:
    """Computes the prompts; returns the pages that hold their KV, all of them full."""
    commands = [
        Add(Request(str(at), tuple(prompt), len(prompt), Sampling(), max_tokens=1), hold=True)
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
