"""Encoders: ``python -m runtime.offline.bench encoder --help``.

Compares backends on a model of random weights, dense and factorized, with CUDA graphs: time of a
batch, and peak memory from before the weights are loaded. ``naive`` and ``sdpa`` compute each
linear of a padded batch by itself, with materialized scores or torch's attention. ``flashsvd`` and
``flashsvd15`` are the two versions of FlashSVD, as we implemented them from the papers; they need
factor pairs. The floor is the time of all floating-point operations at the measured rate of one
large matmul. ``--paper`` prints the tables of the FlashSVD v1.5 paper with these figures.
"""

import argparse
import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from runtime.checkpoint.weights import Checkpoint, Dense, FactorPair, Linear
from runtime.config import EncoderConfig, RopeConfig
from runtime.encoder.batch import EncoderInput, RaggedBatch
from runtime.encoder.bert import BertBackbone, encoder_family
from runtime.encoder.passes import Passes
from runtime.models.bert import EncoderLayerWeights
from runtime.offline.bench.device import captured, describe, matmul_rate, milliseconds
from runtime.offline.bench.flashsvd.padded import PaddedEncoder
from runtime.offline.bench.flashsvd.rows import Case, Row, Rows
from runtime.offline.bench.flashsvd.tables import TABLES, lines, wanted

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
_TINY = replace(
    _BERT_BASE,
    vocab_size=100,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=32,
)
SHAPES = {"bert-base": _BERT_BASE, "tiny": _TINY}
_PAIRS_ONLY = ("flashsvd", "flashsvd15")
BACKENDS = ("naive", "sdpa", *_PAIRS_ONLY, "ours")


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


@dataclass(frozen=True)
class Measured:
    """Time of a batch in milliseconds, memory in bytes as in `Row`, and the hidden states."""

    ms: float
    peak: int
    weights: int
    activations: int
    output: Tensor


def measure(build: Callable[[], Callable[[], Tensor]], device: str, runs: int = 30) -> Measured:
    """Build a backend, and measure its call under a graph."""
    memory = _Memory(device)
    before = memory.allocated()
    call = build()
    weights = memory.allocated() - before
    output = call().cpu()
    first = memory.peak()
    loaded = memory.allocated()
    call()
    activations = memory.peak() - loaded
    ms = milliseconds(captured(call, device=device), device=device, runs=runs)
    return Measured(ms, max(first, memory.peak()) - before, weights, activations, output)


class _Memory:
    """Allocated bytes of a GPU, from which unused memory is released first; 0 on a CPU."""

    def __init__(self, device: str) -> None:
        self._gpu = device == "cuda"
        gc.collect()
        if self._gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self._gpu else 0

    def peak(self) -> int:
        """Return the maximum of `allocated` since the last call."""
        if not self._gpu:
            return 0
        found = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return found


def ours(
    checkpoint: Checkpoint, tokens: Tensor, each: int, passes: Passes
) -> Callable[[], Callable[[], Tensor]]:
    """Return a builder of our backend, in calls of ``each`` inputs of ``tokens`` `[b, length]`."""

    def build() -> Callable[[], Tensor]:
        backbone = BertBackbone(checkpoint, tokens.device, torch.bfloat16, "auto", passes)
        batches = [
            RaggedBatch.of([EncoderInput(tuple(row)) for row in part.tolist()], tokens.device)
            for part in torch.split(tokens, each)
        ]

        def call() -> Tensor:
            first = [backbone(batch)[batch.starts[:-1].long()] for batch in batches]
            return torch.cat(first)

        return call

    return build


def padded(
    checkpoint: Checkpoint, tokens: Tensor, *, materialize: bool
) -> Callable[[], Callable[[], Tensor]]:
    """Return a builder of `PaddedEncoder`."""

    def build() -> Callable[[], Tensor]:
        model = PaddedEncoder(checkpoint, str(tokens.device), materialize=materialize)
        return lambda: model(tokens)[:, 0]

    return build


def flashsvd(
    checkpoint: Checkpoint, tokens: Tensor, version: str
) -> Callable[[], Callable[[], Tensor]]:
    """Return a builder of a version of FlashSVD: ``flashsvd`` or ``flashsvd15``."""

    def build() -> Callable[[], Tensor]:
        from runtime.offline.bench.flashsvd import model  # optional: Triton

        layer: model.LayerType = (
            model.FlashSVDLayer if version == "flashsvd" else model.FlashSVD15Layer
        )
        encoder = model.FlashSVDEncoder(checkpoint, tokens.device, torch.bfloat16, layer)
        inputs = [EncoderInput(tuple(row)) for row in tokens.tolist()]
        batch = RaggedBatch.of(inputs, tokens.device)
        return lambda: encoder(batch)[:: tokens.shape[1]]

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
                product_size = linear.u.shape[0] * linear.v.shape[1]
                smallest = min(linear.u.numel() + linear.v.numel(), product_size)
                total += 2 * smallest * batch * length
        total += 4 * batch * length * length * checkpoint.config.hidden_size
    return total


@dataclass(frozen=True)
class Setting:
    """Options of the measurement, equal for all cases.

    Attributes:
        shape: key of `SHAPES`.
        backends: some of `BACKENDS`.
        calls: maximum tokens of a call of our backend, with a row for each.
        variants: how our backend divides its calls, by name, with a row for each.
        device: cuda or cpu.
        runs: timed runs.
        rate: floating-point operations per millisecond, for the floor.
    """

    shape: str
    backends: Sequence[str]
    calls: Sequence[int]
    variants: Mapping[str, Passes]
    device: str
    runs: int
    rate: float

    def measure(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Rows]]:
        """Yield the rows of each case. Consecutive cases of the same keep have the same model."""
        keeps = {"dense": None, "full": _FULL}
        for keep, some in groupby(cases, lambda case: case.keep):
            fraction = keeps[keep] if keep in keeps else float(keep)
            checkpoint = random_encoder(SHAPES[self.shape], fraction)
            for case in some:
                yield case, self._rows(case, checkpoint)

    def _rows(self, case: Case, checkpoint: Checkpoint) -> Rows:
        vocabulary = checkpoint.config.vocab_size
        tokens = torch.randint(vocabulary, (case.batch, case.length), device=self.device)
        floor = flops(checkpoint, case.batch, case.length) / self.rate
        found: dict[str, Measured] = {}
        for backend in self.backends:
            if backend == "ours":
                found |= self._ours(case, checkpoint, tokens)
            elif backend in ("naive", "sdpa"):
                materialize = backend == "naive"
                found[backend] = self._measured(padded(checkpoint, tokens, materialize=materialize))
            elif case.keep != "dense":  # one of _PAIRS_ONLY
                found[backend] = self._measured(flashsvd(checkpoint, tokens, backend))
        expected = next(iter(found.values())).output.float()
        cosines = {
            name: functional.cosine_similarity(one.output.float(), expected).min().item()
            for name, one in found.items()
        }
        return {
            name: Row(one.ms, floor, one.peak, one.weights, one.activations, cosines[name])
            for name, one in found.items()
        }

    def _ours(self, case: Case, checkpoint: Checkpoint, tokens: Tensor) -> dict[str, Measured]:
        """Return a row for each number of tokens of a call, and each variant."""
        found: dict[str, Measured] = {}
        for most, (name, passes) in product(self.calls, self.variants.items()):
            inputs = max(1, most // case.length)
            build = ours(checkpoint, tokens, inputs, passes)
            found[f"ours {most} {name}".strip()] = self._measured(build)
        return found

    def _measured(self, build: Callable[[], Callable[[], Tensor]]) -> Measured:
        return measure(build, self.device, self.runs)


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    names = arguments.paper or ()
    cases = wanted(names) or [
        Case(*case)
        for case in product(
            arguments.keep.split(","), _ints(arguments.batch), _ints(arguments.length)
        )
    ]
    if not set(arguments.backends) - set(_PAIRS_ONLY) and any(c.keep == "dense" for c in cases):
        parser.error("FlashSVD needs factor pairs: name other backends too, or no dense model")
    device, rate = arguments.device, matmul_rate(arguments.device)
    print(f"{describe(device)}, {rate / 1e9:.0f} TFLOP/s, {arguments.shape}")
    setting = Setting(
        arguments.shape,
        arguments.backends,
        _ints(arguments.call_tokens),
        {text: _passes(text) for text in arguments.variants},
        device,
        arguments.runs,
        rate,
    )
    found: dict[Case, Rows] = {}
    for case, rows in setting.measure(cases):
        found[case] = rows
        if not names:
            print(*lines(case, rows), sep="\n", flush=True)
        if arguments.json:  # after each case, in case the command is ended
            arguments.json.write_text(json.dumps(document(found), indent=1))
    for name in names:
        table = TABLES[name]
        print(f"\n{name}: {table.about}", *table.lines(table.cases, found), sep="\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m runtime.offline.bench encoder")
    parser.add_argument("--shape", choices=SHAPES, default="bert-base")
    parser.add_argument("--keep", default="dense,0.5,full", help="such as dense,0.5,full")
    parser.add_argument("--batch", default="32")
    parser.add_argument("--length", default="128,512")
    parser.add_argument(
        "--call-tokens", default="16384", help="maximum tokens of a call of our backend"
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        default=[""],
        help="fields of runtime.encoder.passes.Passes, such as mlp_tokens=4096,fused_mlp=0",
    )
    parser.add_argument(
        "--backends", type=_some_of(BACKENDS), default=BACKENDS, help=",".join(BACKENDS)
    )
    parser.add_argument(
        "--paper",
        type=_some_of([*TABLES]),
        help="tables and figures of the FlashSVD v1.5 paper, which replace --keep, --batch and "
        f"--length: all, or some of {','.join(TABLES)}",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--runs", type=int, default=30, help="timed runs of each backend")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


def _passes(text: str) -> Passes:
    parts = (part.partition("=") for part in filter(None, text.split(",")))
    values: dict[str, Any] = {name: int(value) for name, _, value in parts}
    return replace(Passes(), **values)


def _some_of(known: Sequence[str]) -> Callable[[str], Sequence[str]]:
    """Return a parser of names with commas between them, or ``all``."""

    def parse(text: str) -> Sequence[str]:
        names = known if text == "all" else text.split(",")
        if unknown := set(names) - set(known):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
        return names

    return parse


def document(found: Mapping[Case, Rows]) -> list[dict[str, object]]:
    """Return all rows for a JSON file."""
    return [
        {**case._asdict(), "backend": name, **asdict(row), "workspace": row.workspace}
        for case, rows in found.items()
        for name, row in rows.items()
    ]


def _ints(text: str) -> Sequence[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
