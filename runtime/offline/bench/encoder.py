"""Encoders: ``python -m runtime.offline.bench encoder --help``.

Compares backends on a model of random weights, dense and factorized, with CUDA graphs: time of a
batch, and peak memory from before the weights are loaded. ``naive`` and ``sdpa`` compute each
linear of a padded batch by itself, with materialized scores or torch's attention. The floor is the
time of all floating-point operations at the measured rate of one large matmul.
"""

import argparse
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from runtime.checkpoint.weights import Checkpoint, Dense, FactorPair, Linear, moved
from runtime.config import EncoderConfig, RopeConfig
from runtime.encoder.batch import EncoderInput, RaggedBatch
from runtime.encoder.bert import BertBackbone, encoder_family
from runtime.encoder.packed import Passes
from runtime.models.bert import EncoderLayerWeights
from runtime.offline.bench.device import captured, describe, matmul_rate, milliseconds

_BERT_BASE = EncoderConfig(
    architecture="BertModel",
    vocab_size=30_522,
    hidden_size=768,
    intermediate_size=3072,
    num_layers=12,
    num_heads=12,
    num_kv_heads=12,
    head_dim=64,
    context_length=512,
    rms_norm_eps=1e-12,
    tied_embeddings=True,
    rope=RopeConfig(scaling="none"),
    token_types=2,
)
_RANKS = 16
_FULL = 9.0
"""A fraction with which each factor pair has full rank."""
SHAPES = {"bert-base": _BERT_BASE}


def random_encoder(config: EncoderConfig, keep: float | None) -> Checkpoint:
    """Return a model of random weights in bf16.

    Args:
        keep: fraction of the parameters that each factor pair keeps; None for dense matrices. A
            pair has at most full rank. Ranks are multiples of `_RANKS`, since torch's matmuls are
            several times slower with others.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 0.02) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).bfloat16()

    def linear(out: int, inner: int) -> Linear:
        if keep is None:
            return Dense(normal(out, inner), normal(out))
        rank = round(keep * out * inner / (out + inner) / _RANKS) * _RANKS
        rank = max(_RANKS, min(rank, out, inner))
        return FactorPair(
            normal(out, rank, scale=rank**-0.5), normal(rank, inner, scale=0.02), normal(out)
        )

    hidden, inner = config.hidden_size, config.intermediate_size
    ones = torch.ones(hidden).bfloat16()

    def layer() -> EncoderLayerWeights:
        q, k, v, o = (linear(hidden, hidden) for _ in range(4))
        up, down = linear(inner, hidden), linear(hidden, inner)
        return EncoderLayerWeights(
            q, k, v, o, ones, normal(hidden), up, down, ones.clone(), normal(hidden)
        )

    family = encoder_family(config)
    embedding = normal(config.vocab_size, hidden)
    return Checkpoint(
        config=config,
        embedding=embedding,
        layers=[layer() for _ in range(config.num_layers)],
        final_norm=torch.empty(0),
        lm_head=embedding,
        model_hash="random",
        positions=normal(config.context_length, hidden),
        more={
            family.token_types: normal(config.token_types, hidden),
            f"{family.embedding_norm}.weight": ones.clone(),
            f"{family.embedding_norm}.bias": normal(hidden),
        },
    )


class PaddedEncoder:
    """The transformer over a padded batch, one torch operation after another.

    Args:
        materialize: whether scores are materialized; otherwise torch's fused attention is used.
    """

    def __init__(self, checkpoint: Checkpoint, device: str, *, materialize: bool) -> None:
        assert isinstance(checkpoint.config, EncoderConfig)
        self._config = checkpoint.config
        self._materialize = materialize
        family = encoder_family(self._config)
        names = [family.token_types, *(f"{family.embedding_norm}.{n}" for n in ("weight", "bias"))]
        assert checkpoint.positions is not None
        tensors = [checkpoint.embedding, checkpoint.positions, *(checkpoint.more[n] for n in names)]
        self._tokens, self._positions, self._types, self._norm, self._norm_bias = (
            tensor.to(device) for tensor in tensors
        )
        self._layers: list[EncoderLayerWeights] = [
            moved(layer, torch.device(device), torch.bfloat16, {}) for layer in checkpoint.layers
        ]

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the hidden states `[b, length, hidden]` of token ids `[b, length]`."""
        x = functional.embedding(tokens, self._tokens)
        x = self._normed(
            x + self._positions[: tokens.shape[1]] + self._types[0], self._norm, self._norm_bias
        )
        for layer in self._layers:
            attended = _linear(self._attention(x, layer), layer.o)
            x = self._normed(x + attended, layer.attention_norm, layer.attention_norm_bias)
            del attended
            made = _linear(functional.gelu(_linear(x, layer.up)), layer.down)
            x = self._normed(x + made, layer.output_norm, layer.output_norm_bias)
        return x

    def _attention(self, x: Tensor, layer: EncoderLayerWeights) -> Tensor:
        q, k, v = (
            _linear(x, each).view(*x.shape[:2], -1, self._config.head_dim).transpose(1, 2)
            for each in (layer.q, layer.k, layer.v)
        )
        if self._materialize:
            scores = q @ k.transpose(2, 3) / math.sqrt(self._config.head_dim)
            attended = scores.softmax(-1) @ v
        else:
            attended = functional.scaled_dot_product_attention(q, k, v)
        merged: Tensor = attended.transpose(1, 2).flatten(2)
        return merged

    def _normed(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.layer_norm(x, weight.shape, weight, bias, self._config.rms_norm_eps)


def _linear(x: Tensor, linear: Linear) -> Tensor:
    if isinstance(linear, Dense):
        return functional.linear(x, linear.weight, linear.bias)
    return functional.linear(functional.linear(x, linear.v), linear.u, linear.bias)


@dataclass(frozen=True)
class Measured:
    """Time of a batch in milliseconds, peak memory in bytes, and the hidden states."""

    ms: float
    peak: int
    output: Tensor


def measure(build: Callable[[], Callable[[], Tensor]], device: str) -> Measured:
    """Build a backend, and measure its call under a graph."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call = build()
    output = call().cpu()
    ms = milliseconds(captured(call, device=device), device=device)
    return Measured(ms, torch.cuda.max_memory_allocated() - before, output)


def ours(
    checkpoint: Checkpoint, tokens: Tensor, each: int, variant: "Variant"
) -> Callable[[], Callable[[], Tensor]]:
    """Return a builder of our backend, in calls of ``each`` inputs of ``tokens`` `[b, length]`."""

    def build() -> Callable[[], Tensor]:
        backbone = BertBackbone(checkpoint, tokens.device, torch.bfloat16, "auto", variant.passes)
        batches = [
            RaggedBatch.of([EncoderInput(tuple(row)) for row in part.tolist()], tokens.device)
            for part in torch.split(tokens, each)
        ]
        streams = [torch.cuda.Stream() for _ in range(variant.streams - 1)]  # type: ignore[no-untyped-call]

        def call() -> Tensor:
            main = torch.cuda.current_stream()
            used = [main, *streams]
            for stream in streams:
                stream.wait_stream(main)
            first = []
            for index, batch in enumerate(batches):
                with torch.cuda.stream(used[index % len(used)]):
                    first.append(backbone(batch)[batch.starts[:-1].long()])
            for stream in streams:
                main.wait_stream(stream)
            return torch.cat(first)

        return call

    return build


@dataclass(frozen=True)
class Variant:
    """How our backend computes a batch.

    Attributes:
        streams: CUDA streams to which its calls are distributed. Each stream has memory of its own.
    """

    passes: Passes
    streams: int = 1

    @staticmethod
    def parse(text: str) -> "Variant":
        """Parse fields of `Passes` and ``streams``, such as ``attention_tokens=4096,streams=2``."""
        values: dict[str, Any] = {name: int(value) for name, value in _pairs(text)}
        streams = values.pop("streams", 1)
        return Variant(replace(Passes(), **values), streams)


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        yield name, value


def padded(
    checkpoint: Checkpoint, tokens: Tensor, *, materialize: bool
) -> Callable[[], Callable[[], Tensor]]:
    """Return a builder of `PaddedEncoder`."""

    def build() -> Callable[[], Tensor]:
        model = PaddedEncoder(checkpoint, str(tokens.device), materialize=materialize)
        return lambda: model(tokens)[:, 0]

    return build


def flops(checkpoint: Checkpoint, batch: int, length: int) -> float:
    """Return the number of floating-point operations of a batch.

    A factor pair or its product is multiplied, whichever is smaller.
    """
    total = 0.0
    for layer in checkpoint.layers:
        for linear in (layer.q, layer.k, layer.v, layer.o, layer.up, layer.down):
            if isinstance(linear, Dense):
                total += 2 * linear.weight.numel() * batch * length
            else:
                whole = linear.u.shape[0] * linear.v.shape[1]
                smallest = min(linear.u.numel() + linear.v.numel(), whole)
                total += 2 * smallest * batch * length
        total += 4 * batch * length * length * checkpoint.config.hidden_size
    return total


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="bert-base")
    parser.add_argument("--keep", default="dense,0.5,full", help="such as dense,0.5,full")
    parser.add_argument("--batch", default="32")
    parser.add_argument("--length", default="128,512")
    parser.add_argument(
        "--pass-tokens", default="16384,8192,5632", help="tokens of one call of our backend"
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        default=[""],
        help="fields of runtime.encoder.packed.Passes, and streams: mlp_tokens=4096,streams=2",
    )
    parser.add_argument("--peers", default="naive,sdpa")
    arguments = parser.parse_args()
    rate = matmul_rate()
    print(f"{describe('cuda')}, {rate / 1e9:.0f} TFLOP/s")
    passes = _ints(arguments.pass_tokens)
    keeps = {"dense": None, "full": _FULL}
    counts = product(arguments.keep.split(","), _ints(arguments.batch), _ints(arguments.length))
    for keep, batch, length in counts:
        checkpoint = random_encoder(
            SHAPES[arguments.shape], keeps[keep] if keep in keeps else float(keep)
        )
        tokens = torch.randint(0, 30_000, (batch, length), device="cuda")
        floor = flops(checkpoint, batch, length) / rate
        print(f"{arguments.shape}, keep {keep}, {batch} x {length}; floor {floor:.2f} ms")
        rows: dict[str, Measured] = {}
        for peer in arguments.peers.split(","):
            rows[peer] = measure(padded(checkpoint, tokens, materialize=peer == "naive"), "cuda")
        sizes = sorted({min(batch, max(1, n // length)) for n in passes}, reverse=True)
        for inputs, variant in product(sizes, arguments.variants):
            call = ours(checkpoint, tokens, inputs, Variant.parse(variant))
            rows[f"ours {inputs * length} {variant}"] = measure(call, "cuda")
        for name, row in rows.items():
            first = next(iter(rows.values()))
            cosine = functional.cosine_similarity(row.output.float(), first.output.float()).min()
            ratios = " ".join(
                f"{row.ms / other.ms:5.2f}x {row.peak / other.peak:5.2f}x of {peer};"
                for peer, other in rows.items()
                if peer in ("naive", "sdpa")
            )
            print(
                f"  {name:12} {row.ms:8.3f} ms {row.peak / 2**20:7.0f} MiB {floor / row.ms:6.1%} "
                f"{ratios} cosine {cosine:.5f}",
                flush=True,
            )


def _ints(text: str) -> Sequence[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
