"""Measure the time and the perplexity of factorized checkpoints.

    OMP_NUM_THREADS=1 python -m runtime.offline.compress.bench --keep 0.95 0.9 0.8

Calibrates on one part of Python's documentation. Perplexity is measured on another part of it and
on text of another kind, docstrings of the standard library. Results are in BENCHMARKS.md.
"""

import argparse
import csv
import itertools
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from runtime.checkpoint import Checkpoint, checkpoint_path, load_checkpoint
from runtime.checkpoint.weights import parameters_kept
from runtime.offline.compress.decomposed import decompose_model
from runtime.offline.compress.factorize import ranks_of, truncate_model
from runtime.offline.compress.methods import Allocation, Method
from runtime.offline.compress.perplexity import perplexity
from runtime.offline.compress.text import cut_rows, docstrings, documentation
from runtime.offline.compress.tokenizer import text_tokenizer


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        keep: requested fraction of the linears' parameters.
        parameters_kept: fraction that remains with the chosen ranks.
        factorized: number of factor pairs.
        held_out, docstrings: perplexity of the held-out documentation, and of docstrings.
        seconds: processor time of factorization in seconds.
    """

    method: str
    keep: float
    parameters_kept: float
    factorized: int
    held_out: float
    docstrings: float
    seconds: float


def main() -> None:
    arguments = _arguments()
    path = checkpoint_path(arguments.model)
    checkpoint = load_checkpoint(path, dtype=None)
    tokenizer = text_tokenizer(path)
    calibration_text, held_out_text = documentation()
    calibration = cut_rows(tokenizer.encode(calibration_text).ids, 512, arguments.rows)
    texts = [
        cut_rows(tokenizer.encode(text).ids, 1024, 8) for text in (held_out_text, docstrings())
    ]
    print(
        f"{path.name}: {arguments.device}, {torch.get_num_threads()} thread(s) on "
        f"{os.cpu_count()} CPUs, calibration "
        f"{calibration.numel()} tokens, perplexity on {texts[0].numel()} and {texts[1].numel()}"
    )
    device = arguments.device
    rows = [Row("dense", 1.0, 1.0, 0, *_perplexities(checkpoint, texts, device), 0.0)]
    _show(rows[0], rows[0])
    for method in arguments.method:
        started = time.process_time()
        model = decompose_model(checkpoint, calibration, method=method, device=device)
        decomposing = time.process_time() - started
        for keep, allocation in itertools.product(arguments.keep, arguments.ranks or [None]):
            started = time.process_time()
            made = truncate_model(model, keep, allocation=allocation)
            seconds = decomposing + time.process_time() - started
            ranks = [r for layer in ranks_of(made) for r in layer.values() if r is not None]
            label = method.label(allocation or method.allocation)
            kept = parameters_kept(made)
            row = Row(label, keep, kept, len(ranks), *_perplexities(made, texts, device), seconds)
            rows.append(row)
            _show(row, rows[0])
    if arguments.csv is not None:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(asdict(rows[0])))
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m", help="model name or path")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.95, 0.9, 0.8])
    parser.add_argument(
        "--method", type=Method, nargs="+", default=[Method.FISHER], choices=list(Method)
    )
    parser.add_argument(
        "--ranks",
        type=Allocation,
        nargs="+",
        choices=list(Allocation),
        help="allocation of ranks; default: the method's own",
    )
    parser.add_argument("--rows", type=int, default=32, help="calibration rows of 512 tokens")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--csv", type=Path, help="write the table to this CSV file")
    return parser.parse_args()


def _perplexities(checkpoint: Checkpoint, texts: list[Tensor], device: str) -> tuple[float, float]:
    held_out, docstrings = (perplexity(checkpoint, tokens, device=device) for tokens in texts)
    return held_out, docstrings


def _show(row: Row, dense: Row) -> None:
    print(
        f"{row.method}, keep {row.keep:.2f} ({row.parameters_kept:.4f}, "
        f"{row.factorized:3d} factor pairs): "
        f"held out {row.held_out:.3f} ({row.held_out / dense.held_out - 1:+.1%}), "
        f"docstrings {row.docstrings:.3f} ({row.docstrings / dense.docstrings - 1:+.1%}), "
        f"made in {row.seconds:.0f} s of CPU",
        flush=True,
    )


if __name__ == "__main__":
    main()
