"""Mixed passes over prompt chunks and decode rows: ``python -m runtime.offline.bench mixed
--help``.

A mixed pass is compared with a pass over the chunk followed by a decode pass, all replayed as in
the engine and without sampling. The floor is the larger of two times: that of all floating-point
operations of the linear layers at the measured rate of one large matmul, and that of reading
weights and KV once at the measured rate of a copy.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from runtime.attention.base import SequenceSlice
from runtime.checkpoint.weights import Checkpoint
from runtime.gemm.model import build_gemm_model
from runtime.gemm.weights import PackedWeights
from runtime.models.model import Model
from runtime.offline.bench.device import copy_rate, describe, matmul_rate, milliseconds
from runtime.offline.bench.shapes import PAGE, SHAPES, kv_bytes, random_checkpoint, title
from runtime.pages.plan import PageCount, pages_for
from runtime.steps.decode import DecodeReplay
from runtime.steps.mixed import MixedReplay
from runtime.steps.slots import BatchSlots

_REPEATED = 8
"""Passes launched for one timing on a GPU, so that the host's work overlaps with the device's."""


@dataclass(frozen=True)
class Figure:
    """Times of one case in milliseconds.

    Attributes:
        mixed_ms: one pass over both.
        chunk_ms, decode_ms: a pass over the chunk, and a decode pass.
    """

    name: str
    mixed_ms: float
    chunk_ms: float
    decode_ms: float
    floor_ms: float

    def __str__(self) -> str:
        separate = self.chunk_ms + self.decode_ms
        return (
            f"{self.name:48} {self.mixed_ms:8.2f} {separate:9.2f} {self.chunk_ms:8.2f} "
            f"{self.decode_ms:8.2f} {self.floor_ms:8.2f} {self.floor_ms / self.mixed_ms:6.1%}"
        )


class MixedBench:
    """A chunk of one prompt, and running sequences with equal contexts."""

    def __init__(self, model: Model, tokens: int, sequences: int, context: int) -> None:
        device = model.device
        chunk, each = pages_for(tokens, PAGE), pages_for(context + 1, PAGE)
        null_page = chunk + sequences * each
        cache = model.new_cache(PageCount(null_page + 1))
        for plane in cache.planes:
            plane.normal_()
        slots = BatchSlots(sequences + 1, max(chunk, each), cache.null_pages, device)
        slots.positions[:sequences] = context
        pages = torch.randperm(null_page)
        slots.page_tables[0, :sequences, :each] = pages[chunk:].view(sequences, each)
        logits = torch.zeros(sequences + 1, model.config.vocab_size, device=device)
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        passes = model, cache, slots, logits, pool
        self._mixed = MixedReplay(*passes, max_rows=tokens + sequences)
        self._decode = DecodeReplay(*passes)
        self._piece = SequenceSlice([1] * tokens, 0, pages[:chunk].tolist())
        self._sequences = sequences

    def mixed(self) -> None:
        """Compute the chunk and all sequences in one pass, with the prompt's last logits."""
        sequences = self._sequences
        self._mixed.run([self._piece], range(sequences), [(sequences, 0)])

    def chunk(self) -> None:
        """Compute the chunk and the prompt's last logits."""
        self._mixed.run([self._piece], completed=[(0, 0)])

    def decode(self) -> None:
        """Decode all sequences."""
        self._decode.run(self._sequences)


def figures(
    shape: str, keeps: Sequence[float], cases: Sequence[str], context: int, device: str, runs: int
) -> Iterator[Figure]:
    """Measure cases such as "512+64": tokens of the chunk, and number of sequences."""
    repeated = _REPEATED if device == "cuda" else 1
    operations_per_ms = matmul_rate(device)
    bytes_per_ms = copy_rate(device)
    for keep in keeps:
        checkpoint = random_checkpoint(SHAPES[shape], keep, 0, device)
        model = build_gemm_model(checkpoint, device=device, page_size=PAGE)
        for case in cases:
            tokens, sequences = map(int, case.split("+"))
            bench = MixedBench(model, tokens, sequences, context)
            mixed, chunk, decode = (
                milliseconds(partial(_repeat, call, repeated), device=device, runs=runs) / repeated
                for call in (bench.mixed, bench.chunk, bench.decode)
            )
            compute = operations(checkpoint, tokens, sequences) / operations_per_ms
            read = bytes_read(checkpoint, sequences, context) / bytes_per_ms
            name = f"{title(shape, keep)}, {case}"
            yield Figure(name, mixed, chunk, decode, max(compute, read))


def operations(checkpoint: Checkpoint, tokens: int, sequences: int) -> int:
    """Return the floating-point operations of the linear layers of a mixed pass."""
    weights = PackedWeights.pack(checkpoint, "meta")
    head = weights.lm_head.weight.nbytes
    return (weights.step_weight_bytes - head) * (tokens + sequences) + head * (sequences + 1)


def bytes_read(checkpoint: Checkpoint, sequences: int, context: int) -> int:
    """Return the bytes of the weights and of the KV of the decoded sequences."""
    weights = PackedWeights.pack(checkpoint, "meta").step_weight_bytes
    return weights + kv_bytes(checkpoint.config, sequences * (context + 1))


def _repeat(call: Callable[[], None], times: int) -> None:
    for _ in range(times):
        call()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m runtime.offline.bench mixed")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b", help="model shape")
    parser.add_argument(
        "--keep",
        type=float,
        nargs="+",
        default=[1.0],
        help="fractions of parameters that factor pairs keep; 1 for dense",
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        default=["448+64", "512+64", "1024+64", "1792+256"],
        help="tokens of the prompt chunk + number of decoded sequences",
    )
    parser.add_argument("--context", type=int, default=1024, help="context of each sequence")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--runs", type=int, default=5, help="timings of each call")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    print(describe(args.device))
    names = ("mixed", "separate", "chunk", "decode", "floor")
    print(f"{'ms':48} " + " ".join(f"{name:>8}" for name in names))
    rows = []
    with torch.inference_mode():
        for figure in figures(
            args.shape, args.keep, args.cases, args.context, args.device, args.runs
        ):
            print(figure, flush=True)
            rows.append(asdict(figure))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
