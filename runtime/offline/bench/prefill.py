"""Prefill of one prompt: ``python -m runtime.offline.bench prefill --help``.

Our prefill runs as in the engine, with CUDA graphs up to 2,048 tokens. It writes K and V into pages
and attends over the pages. It is compared with layers that have the same weights, materialize q, k
and v, and use torch's scaled_dot_product_attention without pages. The floor is the time of all
floating-point operations at the measured rate of one large matmul.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from runtime.attention.base import Batch, SequenceSlice
from runtime.checkpoint.weights import Checkpoint
from runtime.gemm.model import build_gemm_model
from runtime.gemm.plan import KernelPlan
from runtime.gemm.weights import PackedWeights
from runtime.kv.cache import PagedCache
from runtime.layers.rope import cos_sin_table
from runtime.models.build import build_model
from runtime.models.decoder import ServingBuilder
from runtime.models.llama import LLAMA
from runtime.models.model import Model
from runtime.offline.bench.device import Figure, captured, describe, matmul_rate, milliseconds, show
from runtime.offline.bench.shapes import PAGE, SHAPES, random_checkpoint, title
from runtime.pages.plan import PageCount, pages_for
from runtime.steps.mixed import ROWS, MixedReplay
from runtime.steps.slots import BatchSlots


class Materialized:
    """Decoder layers of a checkpoint with materialized q, k and v, and torch's attention."""

    def __init__(self, checkpoint: Checkpoint, tokens: int, device: str) -> None:
        config = checkpoint.config
        self._config = config
        self._layers = [
            LLAMA.parts(ServingBuilder(LLAMA, config, layer, {})) for layer in checkpoint.layers
        ]
        cos, sin = cos_sin_table(config, tokens)
        self._cos, self._sin = (table.to(device)[:, None] for table in (cos, sin))
        self._embedding = checkpoint.embedding

    def __call__(self, tokens: Tensor) -> Tensor:
        config = self._config
        hidden = functional.embedding(tokens, self._embedding)
        for parts in self._layers:
            qkv = parts.qkv(parts.input_norm(hidden)).view(len(tokens), -1, config.head_dim)
            q, k, v = torch.split(
                qkv, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1
            )
            if parts.head_norms is not None:
                q, k = (
                    norm(x.contiguous()) for norm, x in zip(parts.head_norms, (q, k), strict=True)
                )
            attended = functional.scaled_dot_product_attention(
                self._rotated(q).transpose(0, 1)[None],
                self._rotated(k).transpose(0, 1)[None],
                v.transpose(0, 1)[None],
                is_causal=True,
                enable_gqa=config.num_heads != config.num_kv_heads,
            )
            hidden = parts.o(attended[0].transpose(0, 1).flatten(1), hidden)
            hidden = parts.down(parts.gated(parts.post_norm(hidden)), hidden)
        return hidden

    def _rotated(self, x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        rotated = [first * self._cos - second * self._sin, second * self._cos + first * self._sin]
        return torch.cat(rotated, dim=-1).to(x.dtype)


def operations(checkpoint: Checkpoint, tokens: int) -> int:
    """Return the number of floating-point operations of all linear layers and causal attention."""
    config = checkpoint.config
    weights = PackedWeights.pack(checkpoint, "meta")
    elements = (weights.step_weight_bytes - weights.lm_head.weight.nbytes) // 2
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * tokens**2
    return 2 * elements * tokens + attention


def figures(
    shape: str,
    keeps: Sequence[float],
    lengths: Sequence[int],
    device: str,
    runs: int,
    *,
    forced: bool,
    torch_backend: bool,
) -> Iterator[Figure]:
    """Measure our prefill and that of `Materialized`.

    Args:
        forced: also measure a model whose matmuls all use our kernels.
        torch_backend: also measure a model with torch's matmuls.
    """
    rate = matmul_rate(device)
    yield Figure("matmul rate, TFLOP/s", rate / 1e9, rate / 1e9)
    for keep in keeps:
        checkpoint = random_checkpoint(SHAPES[shape], keep, 0, device)
        model = build_gemm_model(checkpoint, device=device, page_size=PAGE)
        kernels = model
        if forced:
            plan = KernelPlan(forced=True)
            kernels = build_gemm_model(checkpoint, device=device, page_size=PAGE, plan=plan)
        by_torch = None
        if torch_backend:
            by_torch = build_model(checkpoint, device=device, dtype=torch.bfloat16, page_size=PAGE)
        for length in lengths:
            pages = pages_for(length, PAGE)
            cache = model.new_cache(PageCount(pages + 1))
            piece = SequenceSlice([1] * length, 0, torch.randperm(pages).tolist())
            floor = operations(checkpoint, length) / rate
            name = f"{title(shape, keep)}, {length} tokens"
            variants = {"": engine_prefill(model, cache, piece)}
            if by_torch is not None:
                variants[", backend torch"] = engine_prefill(by_torch, cache, piece)
            if forced:
                other = partial(kernels.forward, Batch.of([piece], device), cache)
                variants[", all by our kernels"] = captured(other, device=device)
            for variant, call in variants.items():
                took = milliseconds(call, device=device, runs=runs)
                yield Figure(name + variant, took, floor)
            materialized = Materialized(checkpoint, length, device)
            theirs = partial(materialized, torch.ones(length, dtype=torch.int64, device=device))
            took = milliseconds(theirs, device=device, runs=runs)
            yield Figure(f"{name}, materialized and SDPA", took, floor)


def engine_prefill(model: Model, cache: PagedCache, piece: SequenceSlice) -> Callable[[], object]:
    """Return a function that computes one prompt as an engine does."""
    rows = min(len(piece.tokens), ROWS[-1])
    slots = BatchSlots(1, len(piece.pages), cache.null_pages, model.device)
    logits = torch.zeros(1, model.config.vocab_size, device=model.device)
    pool = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None
    replay = MixedReplay(model, cache, slots, logits, pool, max_rows=rows)
    return partial(replay.run, [piece], completed=[(0, 0)])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m runtime.offline.bench prefill")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-7b", help="model shape")
    parser.add_argument(
        "--keep",
        type=float,
        nargs="+",
        default=[0.5, 1.0],
        help="fractions of parameters that factor pairs keep; 1 for dense",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[128, 512, 2048, 8192, 32768],
        help="prompt lengths in tokens",
    )
    parser.add_argument(
        "--forced", action="store_true", help="also measure all matmuls with our kernels"
    )
    parser.add_argument(
        "--torch", action="store_true", help="also measure a model with backend torch"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--runs", type=int, default=10, help="timed runs of each call")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    with torch.inference_mode():
        rows = figures(
            args.shape, args.keep, args.tokens, args.device, args.runs,
            forced=args.forced, torch_backend=args.torch,
        )  # fmt: skip
        show(describe(args.device), rows, args.json)
