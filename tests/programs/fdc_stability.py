"""Stability of the bases of KV format `fdc` over the amount and the kind of calibration text.

``python -m tests.programs.fdc_stability [--model NAME|PATH] [--rank 48]`` calibrates on 1,024 to
8,192 tokens of documentation, on as many of chats, and on both. The overlap of two bases R and S of
rank m is ‖RᵀS‖² / m: 1 for the same subspace, m / d for random ones. It is compared with the basis
of the most tokens of documentation. The perplexity is that of held-out text of both kinds, relative
to exact KV.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from torch import Tensor

from runtime.checkpoint import load_checkpoint
from runtime.checkpoint.weights import Checkpoint
from runtime.config import ModelConfig
from runtime.kv.calibration import Artifact, KVMoments
from runtime.kv.fdc import FdcFormat, FdcOptions, calibrate
from runtime.models.build import build_model
from runtime.offline.compress import cut_rows, documentation
from runtime.offline.compress.kv_moments import kv_moments
from runtime.offline.compress.text import docstrings
from runtime.offline.quality.search import Evaluator
from runtime.pages.plan import PAGE_SIZE
from services.common.model_source import DEFAULT_MODEL, resolve_model
from services.tokenizer.loading import load_tokenizer
from services.tokenizer.tokenizer import Tokenizer

ROW = 1024
HELD_OUT = 768
TASK = "Explain this to somebody who is new to programming."
_SUMS = ("queries", "keys", "values", "unrotated_keys", "unrotated_sum")

Layers = list[KVMoments]


@dataclass(frozen=True)
class Overlap:
    """Overlap of the bases of two artifacts: mean over layers and KV heads, and the least."""

    mean: float
    least: float


def overlap(first: Artifact, second: Artifact, plane: str) -> Overlap:
    """Return the overlap of the bases of a plane, which have equal ranks in both artifacts."""
    prefix = f"{plane}_basis."
    found = []
    for name, basis in first.tensors.items():
        if name.startswith(prefix):
            product = basis.mT @ second.tensors[name]  # [kv_heads, m, m]
            found.append(product.square().sum((1, 2)) / basis.shape[-1])
    values = torch.cat(found)
    return Overlap(float(values.mean()), float(values.min()))


def sum_of_moments(first: Layers, second: Layers, config: ModelConfig) -> Layers:
    """Return the moments of the texts of both."""
    layers = []
    for one, other in zip(first, second, strict=True):
        total = KVMoments.of(config)
        for name in _SUMS:
            setattr(total, name, getattr(one, name) + getattr(other, name))
        total.tokens = one.tokens + other.tokens
        layers.append(total)
    return layers


def chat_text(tokenizer: Tokenizer) -> list[int]:
    """Return tokens of chats about docstrings of the standard library."""
    ids = tokenizer.encode(docstrings())
    turn = tokenizer.encode(f"<|im_start|>user\n{TASK}\n\n")
    answer = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n")
    size = 256
    found: list[int] = []
    for start in range(0, len(ids) - size, size):
        passage = ids[start : start + size]
        found += [*turn, *passage[: size // 2], *answer, *passage[size // 2 :]]
    return found


def growing(
    checkpoint: Checkpoint, ids: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[int, Layers]]:
    """Yield the moments of the first tokens of a text, for each size; each token is used once."""
    total: Layers | None = None
    start = 0
    for size in sizes:
        rows = cut_rows(ids[start:size], min(ROW, size - start), (size - start) // ROW or 1)
        piece = list(kv_moments(checkpoint, rows))
        total = piece if total is None else sum_of_moments(total, piece, checkpoint.config)
        start = size
        yield size, total


def measure(
    model: str, sizes: Sequence[int], rank: int, console: Console
) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table, its head first."""
    source = resolve_model(model)
    checkpoint = load_checkpoint(source, dtype=torch.float32)
    tokenizer = load_tokenizer(source)
    train, held_out = (tokenizer.encode(part) for part in documentation())
    chat = chat_text(tokenizer)
    domains = {"documentation": train, "chats": chat[: -2 * HELD_OUT]}
    unseen = {"documentation": held_out[:HELD_OUT], "chats": chat[-HELD_OUT:]}
    moments: dict[str, Layers] = {}
    for domain, ids in domains.items():
        for size, layers in growing(checkpoint, ids, sizes):
            console.print(f"{domain}: {size:,} tokens measured")
            if domain == "documentation" or size == sizes[-1]:
                moments[f"{domain}, {size:,}"] = layers
    reference = f"documentation, {sizes[-1]:,}"
    both = sum_of_moments(moments[reference], moments[f"chats, {sizes[-1]:,}"], checkpoint.config)
    moments[f"both, {2 * sizes[-1]:,}"] = both
    options = FdcOptions(rank=rank)
    artifacts = {name: calibrate(layers, options, "") for name, layers in moments.items()}
    evaluators = _evaluators(checkpoint, unseen)
    yield "calibration, tokens", "K mean", "K least", "V mean", "V least", *unseen
    for name, artifact in artifacts.items():
        cells = []
        for plane in ("k", "v"):
            found = overlap(artifacts[reference], artifact, plane)
            cells += [f"{found.mean:.4f}", f"{found.least:.4f}"]
        kv_format = FdcFormat(checkpoint.config, artifact)
        for evaluate in evaluators.values():
            quality = evaluate(kv_format)
            cells.append(
                f"{quality.perplexity_change:+.2%} "
                f"({quality.change_low:+.2%} to {quality.change_high:+.2%})"
            )
        console.print(name, *cells)
        yield name, *cells


def _evaluators(checkpoint: Checkpoint, texts: Mapping[str, Sequence[int]]) -> dict[str, Evaluator]:
    model = build_model(checkpoint, dtype=torch.float32, page_size=PAGE_SIZE)
    return {name: Evaluator(model, _row(ids)) for name, ids in texts.items()}


def _row(ids: Sequence[int]) -> Tensor:
    return torch.tensor([list(ids)])


def main() -> None:
    arguments = argparse.ArgumentParser(prog="python -m tests.programs.fdc_stability")
    arguments.add_argument("--model", default=DEFAULT_MODEL, help="name or path of a checkpoint")
    arguments.add_argument("--tokens", type=int, nargs="+", default=(1024, 2048, 4096, 8192))
    arguments.add_argument("--rank", type=int, default=48, help="rank of K and V of all heads")
    own = arguments.parse_args()
    table = list(measure(own.model, own.tokens, own.rank, Console(stderr=True)))
    for row in (table[0], ("---",) * len(table[0]), *table[1:]):
        Console().print("| " + " | ".join(row) + " |", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
