"""KV of a model on real text, in the pages of its cache."""

from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from runtime.checkpoint import load_checkpoint
from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.core.request import Request, SamplingParams
from runtime.core.sequence import FREED
from runtime.engine import Add, Engine, LocalExecutor, StepOutput
from runtime.gemm.model import build_fastest_model
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.pages.groups import Part
from runtime.pages.plan import PAGE_SIZE

SAMPLE_PROMPTS, SAMPLE_TOKENS = 4, 512


def load_model(
    path: Path,
    device: torch.device,
    kv_format: str = "dense",
    *,
    build: Callable[..., Model] = build_fastest_model,
) -> Model:
    """Load a model in the dtype that a worker uses on this device.

    Args:
        build: function that prepares the checkpoint; by default that of a worker.

    Raises:
        CheckpointError: if the model cannot be read.
    """
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return build(
        load_checkpoint(path, dtype=dtype),
        device=device,
        dtype=dtype,
        page_size=PAGE_SIZE,
        kv_format=kv_format,
    )


def stream_model(path: Path, device: torch.device, kv_format: str = "dense") -> Model:
    """Prepare a model whose layers are moved to the device one at a time, for `prefill_sample`.

    The model need not fit into the memory of the device. Every forward pass reads all layers from
    the files; `prefill_sample` takes a single pass.

    Raises:
        CheckpointError: if the model cannot be read.
    """
    return build_model(
        load_checkpoint(path, dtype=None),
        device=device,
        dtype=torch.float32 if device.type == "cpu" else torch.bfloat16,
        page_size=PAGE_SIZE,
        kv_format=kv_format,
        streamed=True,
    )


def prefill_sample(
    model: Model, tokens: list[int], console: Console
) -> dict[tuple[int, str], Tensor]:
    """Prefill `SAMPLE_PROMPTS` prompts that are evenly spread over a text, and return their KV.

    Args:
        model: model with pages of `PAGE_SIZE` tokens.
        tokens: token ids of the text. Prompts do not overlap if there are at least
            ``SAMPLE_PROMPTS * SAMPLE_TOKENS``. They are shorter if the model's context is.
        console: console for the progress bar.

    Returns:
        Mapping (layer, plane name) → ``[page, kv_head, slot, dim]`` in the cache's dtype, on the
        CPU. It has full pages only, in the order of the cache. Planes that the codec does not
        encode are left out. If the format encodes pages into encodable planes, all other planes are
        left out as well, because a sequence has few of their pages.
    """
    plan = model.layout.plan
    total = plan.each(plan.full(SAMPLE_PROMPTS * SAMPLE_TOKENS))
    limits = Limits(
        max_running=SAMPLE_PROMPTS,
        max_waiting=SAMPLE_PROMPTS,
        step_tokens=SAMPLE_PROMPTS * SAMPLE_TOKENS,
        chunk_tokens=SAMPLE_TOKENS,
    )
    executor = LocalExecutor(model, EngineOptions(total, limits))
    stride = len(tokens) // SAMPLE_PROMPTS
    longest = min(SAMPLE_TOKENS, model.config.context_length - 1)  # the engine adds a token
    prompts = [tokens[at * stride :][:longest] for at in range(SAMPLE_PROMPTS)]
    pages = _prefill(Engine(executor), prompts, console)
    planes, groups = model.layout.planes, model.layout.page_groups
    encoded = any(plane.encodable and plane.group.part is Part.MIDDLE for _, plane in planes)
    return {
        (layer, plane.name): tensor[pages[groups.index(plane.group)].to(tensor.device)].cpu()
        for (layer, plane), tensor in zip(planes, executor.cache.planes, strict=True)
        if plane.encodable and (plane.group.part is Part.MIDDLE) is encoded
    }


def _prefill(engine: Engine, prompts: list[list[int]], console: Console) -> list[Tensor]:
    """Compute the prompts. Return the ids of their full pages, one tensor for each page group."""
    commands = [
        Add(Request(str(at), tuple(prompt), len(prompt), SamplingParams(), max_tokens=1), hold=True)
        for at, prompt in enumerate(prompts)
    ]
    plan = engine.executor.shape.plan
    pages: list[list[int]] = [[] for _ in plan.groups]
    with Progress(console=console) as progress, torch.inference_mode():
        task = progress.add_task("prefill", total=sum(map(len, prompts)))
        output: StepOutput = engine.step(commands)
        while True:
            for chunk in output.computed:
                full = plan.full(chunk.num_tokens)
                for own, table in zip(pages, chunk.page_tables, strict=True):
                    own += [page for page in table[:full] if page != FREED]
                progress.advance(task, chunk.num_tokens)
            if not engine.has_work:
                return [torch.tensor(own, dtype=torch.int64) for own in pages]
            output = engine.step([])
