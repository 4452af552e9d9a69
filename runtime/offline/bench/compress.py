"""Time and memory of factorization at the shape of a real model.

    python -m runtime.offline.bench compress --shape llama-3-8b --layers 4 --keep 0.5

Random weights are written to a temporary folder and factorized from there, as `headrace compress`
does.
"""

import argparse
import json
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from runtime.checkpoint import load_checkpoint, write_checkpoint
from runtime.offline.bench.device import describe
from runtime.offline.bench.shapes import SHAPES, random_checkpoint
from runtime.offline.compress import (
    Method,
    WorkFolder,
    decompose_model,
    parameters_kept,
    perplexity,
    truncate_model,
)

_ONCE = ("head", "other")
"""Parts whose time does not depend on the number of layers."""


@dataclass(frozen=True)
class Figure:
    """Factorization of one model by one method.

    Attributes:
        layers: number of measured layers.
        seconds: elapsed seconds by part.
        total_seconds: sum of the parts, with those that depend on the number of layers extrapolated
            to all layers of the shape.
        device_bytes: peak memory of tensors on the GPU.
        host_bytes: peak resident memory of the process so far, which includes mapped files.
    """

    method: str
    layers: int
    parameters_kept: float
    seconds: dict[str, float]
    total_seconds: float
    device_bytes: int
    host_bytes: int


def main() -> None:
    own = _arguments()
    config = SHAPES[own.shape]
    layers = own.layers or config.num_layers
    print(
        f"{describe(own.device)}; {own.shape}, {layers} of {config.num_layers} layers, "
        f"{own.rows} x {own.length} tokens, keep {own.keep:g}"
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (own.rows, own.length), generator=generator)
    figures = []
    with tempfile.TemporaryDirectory(dir=own.folder) as folder:
        dense = Path(folder) / "dense"
        made = random_checkpoint(replace(config, num_layers=layers), 1, device=own.device)
        write_checkpoint(made, dense)
        del made
        if own.device == "cuda":
            torch.cuda.empty_cache()
        for method in own.method:
            figure = _measure(dense, tokens, method, own.keep, own.device, config.num_layers)
            _show(figure, config.num_layers)
            figures.append(asdict(figure))
    if own.json:
        own.json.write_text(json.dumps(figures, indent=1))


def _measure(
    dense: Path, tokens: Tensor, method: Method, keep: float, device: str, all_layers: int
) -> Figure:
    seconds: dict[str, float] = {}

    @contextmanager
    def measured(part: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        seconds[part] = time.monotonic() - started

    with measured("hashing the dense model"):
        checkpoint = load_checkpoint(dense, dtype=None)
    with WorkFolder(dense.with_name(f"{method}.work"), "") as work:
        with measured("other"):
            model = decompose_model(checkpoint, tokens, method=method, device=device, work=work)
        seconds["other"] -= sum(model.seconds.values())
        seconds |= model.seconds
        with measured("choosing ranks, hashing"):
            made = truncate_model(model, keep)
        with measured("writing"):
            write_checkpoint(made, dense.with_name(method.value))
        work.remove()
        shutil.rmtree(dense.with_name(method.value))
    for name, one in (("dense", checkpoint), ("factorized", made)):
        with measured(f"perplexity, {name}"):
            perplexity(one, tokens[: len(tokens) // 2], device=device)
    layers = checkpoint.config.num_layers
    once = sum(seconds[part] for part in _ONCE if part in seconds)
    return Figure(
        method=method.value,
        layers=layers,
        parameters_kept=parameters_kept(made),
        seconds=seconds,
        total_seconds=once + (sum(seconds.values()) - once) * all_layers / layers,
        device_bytes=model.peak_device_bytes,
        host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _show(figure: Figure, all_layers: int) -> None:
    print(f"{figure.method}, {figure.parameters_kept:.3f} of the parameters kept")
    for part, seconds in figure.seconds.items():
        each = "" if part in _ONCE else f"{seconds / figure.layers:9.3f} s per layer"
        print(f"  {part:28}{seconds:9.2f} s{each}")
    print(f"  {f'total, {all_layers} layers':28}{figure.total_seconds:9.2f} s")
    print(
        f"  peak memory: GPU {figure.device_bytes / 1e9:.2f} GB, "
        f"host {figure.host_bytes / 1e9:.2f} GB with mapped files",
        flush=True,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time of factorization at the shape of a model.")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3-8b")
    parser.add_argument("--layers", type=int, help="layers to measure; default: all of the shape")
    parser.add_argument("--keep", type=float, default=0.5)
    parser.add_argument(
        "--method",
        type=Method,
        nargs="+",
        choices=list(Method),
        default=[Method.FISHER, Method.SVD_LLM],
    )
    parser.add_argument("--rows", type=int, default=32, help="rows of calibration tokens")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
