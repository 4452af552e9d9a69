"""Prefill attention on projected keys: ``python -m runtime.offline.bench kv-prefill --help``.

Attention of the last chunk of a prompt in one layer is measured twice: exact, and with queries and
keys projected as in format `fdc`, including the projection of all keys. The floor is the time
of the multiply-adds of both matmuls, causal, at the measured rate of a large matmul.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from runtime.attention.base import Batch, SequenceSlice
from runtime.kv.dense import DenseFormat
from runtime.offline.bench.device import Figure, captured, describe, matmul_rate, milliseconds, show
from runtime.offline.bench.kv import Compared
from runtime.offline.bench.kv_formats import RANKS, random_fdc
from runtime.offline.bench.shapes import PAGE, SHAPES
from runtime.pages.plan import pages_for


def figures(
    shape: str,
    cases: Sequence[tuple[int, int]],
    ranks: Sequence[int],
    *,
    device: str,
    runs: int,
) -> Iterator[Figure]:
    """Measure exact and projected attention.

    Args:
        cases: pairs of prompt length and length of its last chunk.
        ranks: see `random_fdc`.
    """
    rate = matmul_rate(device)
    yield Figure("matmul rate, TFLOP/s", rate / 1e9, rate / 1e9)
    for length, chunk in cases:
        config = replace(SHAPES[shape], num_layers=1, context_length=length)
        layer = random_fdc(config, ranks, device, compressed_prefill=True).layer(0)
        exact = DenseFormat.create(config, torch.device(device), torch.bfloat16).layer(0)
        pages = pages_for(length, PAGE)
        piece = SequenceSlice([0] * chunk, length - chunk, torch.randperm(pages).tolist())
        batch = Batch.of([piece], device)
        kv = pages, config.num_kv_heads, PAGE, config.head_dim
        k, v = (torch.randn(kv, device=device).bfloat16() for _ in range(2))
        q = torch.randn(chunk, config.num_heads, config.head_dim, device=device).bfloat16()
        pairs = chunk * (length - chunk) + chunk * (chunk + 1) // 2
        products = 2 * config.num_heads * pairs / rate
        group = config.num_heads // config.num_kv_heads
        rank = sum(layer.k_ranks) * group / config.num_heads
        title = f"prompt {length}, chunk {chunk}"

        call = captured(lambda: exact.attend(q, (k, v), batch), device=device)  # noqa: B023
        dense_ms = milliseconds(call, device=device, runs=runs)
        yield Compared(f"{title}, exact", dense_ms, 2 * config.head_dim * products, 1.0)
        call = captured(lambda: layer.attend_prompt(q, (k, v), batch), device=device)  # noqa: B023
        ms = milliseconds(call, device=device, runs=runs)
        floor = (rank + config.head_dim) * products
        yield Compared(f"{title}, fdc with mean rank {rank:g}", ms, floor, dense_ms / ms)


def case(text: str) -> tuple[int, int]:
    """Parse ``LxC``: the length of a prompt and of its last chunk.

    Raises:
        ValueError: the text has another form, or the chunk is longer than the prompt.
    """
    length, chunk = map(int, text.split("x"))
    if not 0 < chunk <= length:
        raise ValueError(f"a chunk of {chunk} tokens of {length}")
    return length, chunk


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m runtime.offline.bench kv-prefill")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument(
        "--cases", type=case, nargs="+", metavar="LxC",
        default=[(2048, 2048), (8192, 8192), (8192, 2048), (32_768, 8192)],
        help="lengths of prompts and of their last chunks, in tokens",
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS["fdc"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--runs", type=int, default=30, help="timed runs of each graph")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    with torch.inference_mode():
        rows = figures(args.shape, args.cases, args.ranks, device=args.device, runs=args.runs)
        show(describe(args.device), rows, args.json)
