"""Requests to a small random model, with the answers of an engine in this process."""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from runtime.core.request import Request, SampledToken, SamplingParams
from runtime.engine import Add, Command, Engine
from services.decode.settings import DecodeSettings
from services.worker.loading import load_worker
from tests.harness.random_model import RandomModel

SEED = int(os.environ.get("FAULT_SEED", "0"))
"""Seed of all prompts and random choices of the fault tests."""
GPU_SHARE = 0.15
"""Fraction of a GPU's memory that each worker uses, and the engine of this process as well."""
_CLEAR = {"cpu": 2e-3, "cuda": 8e-2}
"""Minimum gap of the two best log probabilities, in nats, in fp32 and in bf16. A replay computes KV
in other chunks; its rounding changes the gap by less."""
_SHAPES = {"cpu": "tiny", "cuda": "smollm2-135m"}  # kernels need heads of at least 32 dimensions


@dataclass(frozen=True)
class Case:
    """A greedy request, and the tokens that one process generates for it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@cache
def model_folder(device: str) -> Path:
    """Return the folder of the small model for a device, which is written once."""
    return RandomModel(_SHAPES[device]).ensure()


@cache
def cases(
    name: str, count: int, prompt_tokens: int, max_tokens: int, device: str = "cpu"
) -> tuple[Case, ...]:
    """Return cases whose every token has a clear gap to the second best one.

    Args:
        name: part of the seed.
        device: cpu or cuda, also that of the deployment.
    """
    rng = random.Random(f"{SEED}:{name}:{prompt_tokens}")
    return tuple(_find((), rng, prompt_tokens, max_tokens, device) for _ in range(count))


@cache
def next_turn(case: Case, new_tokens: int, max_tokens: int, device: str = "cpu") -> Case:
    """Return a case whose prompt is another one with its answer, and further tokens.

    Args:
        device: see `cases`.
    """
    history = case.prompt + case.answer
    rng = random.Random(f"{SEED}:{history}:{new_tokens}")
    return _find(history, rng, new_tokens, max_tokens, device)


def _find(
    history: tuple[int, ...], rng: random.Random, new_tokens: int, max_tokens: int, device: str
) -> Case:
    """Return a case with random tokens behind ``history``, whose gaps are clear."""
    while True:
        prompt = history + tuple(rng.randrange(1000, 40_000) for _ in range(new_tokens))
        answer, gap = _generate(_engine(device), prompt, max_tokens)
        if gap >= _CLEAR[device]:
            return Case(prompt, answer)


@cache
def _engine(device: str) -> Engine:
    settings = DecodeSettings.model_validate(
        {
            "model": str(model_folder(device)),
            "device": device,
            "codec": "raw",
            "colocated": True,
            "prefix_cache": False,
            "gpu_memory_utilization": GPU_SHARE,
        }
    )
    return load_worker(settings, decodes=True).engine


def _generate(
    engine: Engine, prompt: tuple[int, ...], max_tokens: int
) -> tuple[tuple[int, ...], float]:
    """Return the tokens after a prompt and their smallest gap, in nats."""
    request = Request("r", prompt, len(prompt), SamplingParams(logprobs=2), max_tokens)
    tokens, gaps = [], []
    with torch.inference_mode():
        for sampled in _steps(engine, request):
            tokens.append(sampled.token)
            best, second = sorted((value for _, value in sampled.top), reverse=True)[:2]
            gaps.append(best - second)
    return tuple(tokens), min(gaps)


def _steps(engine: Engine, request: Request) -> Iterator[SampledToken]:
    commands: list[Command] = [Add(request)]
    while commands or engine.has_work:
        output = engine.step(commands)
        commands = []
        yield from (token for _, token in output.tokens)
