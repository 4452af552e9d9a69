"""Benchmark of the codec against a memory copy: `python -m codec.bench --help`.

Each row measures one segment of N(0, 1) values in one element type and mode. Its pages are in
random order, and its codebook is calibrated on another sample. The floor is the time to copy the
raw bytes. On the CPU the public calls are measured; `gpu.py` has the GPU benchmark.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import codec
from codec.backend import Backend
from codec.elements import BF16, FLOAT_TYPES, ElementType
from codec.format import Mode
from codec.reference import backend as reference

_MODE_NAMES = {
    Mode.RAW: "raw",
    Mode.TOP16: "top16",
    Mode.INBAND: "in-band",
    Mode.THREE_BIT: "three-bit",
}


@dataclass(frozen=True)
class Shape:
    """Size of a segment: `tokens` tokens in each of `planes` planes `[page, heads, slots, dim]`."""

    name: str
    planes: int
    tokens: int
    heads: int
    slots: int
    dim: int


@dataclass(frozen=True)
class Case:
    """Segment, element type, mode and data to measure.

    Attributes:
        gaps: whether the codebook's exponents have gaps, so that codes need a table.
        random: whether the bit patterns are random and therefore incompressible.
    """

    shape: Shape
    element: ElementType = BF16
    mode: Mode = Mode.TOP16
    gaps: bool = False
    random: bool = False

    @property
    def name(self) -> str:
        notes = [note for note in ("gaps", "random") if getattr(self, note)]
        return " ".join([self.element.name, _MODE_NAMES[self.mode], *notes])

    def codebook(self, generator: torch.Generator) -> codec.Codebook | None:
        if self.mode is Mode.RAW:
            return None
        sample = torch.randn(1 << 16, generator=generator)
        book = codec.calibrate(sample, self.element.dtype, self.mode)
        if not self.gaps:
            return book
        exponents = (0, *book.exponents[1:])
        second = tuple(exponent for exponent in book.second if exponent)
        return codec.Codebook(exponents, self.mode, second, self.element.dtype)

    def planes(self, pages: int, generator: torch.Generator) -> Iterator[Tensor]:
        size = (pages, self.shape.heads, self.shape.slots, self.shape.dim)
        for _ in range(self.shape.planes):
            if self.random:
                wide = (*size[:-1], size[-1] * self.element.size)
                patterns = torch.randint(0, 256, wide, dtype=torch.uint8, generator=generator)
                yield patterns.view(self.element.dtype)
            else:
                yield torch.randn(size, generator=generator).to(self.element.dtype)


@dataclass(frozen=True)
class Row:
    """Measurements of one case.

    Attributes:
        ratio: raw bytes over payload bytes.
        escapes: fraction of elements without a code.
        encode, decode, checksum: seconds of the fastest call.
        floor: seconds of the fastest copy of the raw bytes.
    """

    shape: str
    case: str
    backend: str
    raw_bytes: int
    ratio: float
    escapes: float
    encode: float
    decode: float
    checksum: float
    floor: float

    def speed(self, seconds: float) -> float:
        """Return the speed of a call of this duration, in MB/s (10^6 bytes/s) of raw data."""
        return self.raw_bytes / seconds / 1e6


SEGMENT = Shape("60 planes, 256 tokens, 3 heads of 64", 60, 256, 3, 16, 64)
SMALL = Shape("60 planes, 16 tokens, 3 heads of 64", 60, 16, 3, 16, 64)
LARGE = Shape("4 planes, 4096 tokens, 8 heads of 128", 4, 4096, 8, 16, 128)
CASES = [
    *(
        Case(SEGMENT, element, mode)
        for element in FLOAT_TYPES
        for mode in Mode
        if mode.supports(element)
    ),
    Case(SEGMENT, gaps=True),
    Case(SEGMENT, random=True),
    Case(SMALL),
    Case(LARGE),
]


def best_seconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the shortest duration of `repeats` runs in seconds, after a warm-up run."""

    def once() -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    return min(once() for _ in range(repeats))


def floor_seconds(raw_bytes: int, repeats: int, device: torch.device) -> float:
    """Return the seconds of the fastest copy of `raw_bytes` bytes."""
    source = torch.randint(0, 256, (raw_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return best_seconds(lambda: target.copy_(source), repeats, device)


def measure(case: Case, backend: Backend | None, repeats: int, device: torch.device) -> Row:
    """Measure encode, decode and checksum of one segment.

    Args:
        backend: backend to measure; None for the default backend of the device.
    """
    generator = torch.Generator().manual_seed(0)
    shape = case.shape
    pages, tokens = -(-shape.tokens // shape.slots), shape.tokens
    planes = [plane.to(device) for plane in case.planes(2 * pages, generator)]
    codebooks = [case.codebook(generator)] * shape.planes
    ids = torch.randperm(2 * pages, generator=generator).tolist()
    source, target = ids[:pages], ids[pages:]
    bound = codec.max_segment_bytes(
        shape.planes, shape.heads, shape.dim, tokens, shape.slots, case.element
    )
    out = torch.empty(bound, dtype=torch.uint8, device=device)

    def encode() -> codec.Encoded:
        return codec.encode_pages(planes, codebooks, source, tokens, out, backend=backend)

    encoded = encode()
    payload = out[: encoded.length].clone()

    def decode() -> None:
        codec.decode_pages(payload, planes, codebooks, target, tokens, backend=backend)

    def checksum() -> int:
        return codec.checksum_pages(planes, source, tokens, backend=backend)

    return Row(
        shape=shape.name,
        case=case.name,
        backend="reference" if backend else device.type,
        raw_bytes=encoded.raw_bytes,
        ratio=encoded.raw_bytes / encoded.length,
        escapes=encoded.escapes * case.element.size / encoded.raw_bytes,
        encode=best_seconds(encode, repeats, device),
        decode=best_seconds(decode, repeats, device),
        checksum=best_seconds(checksum, repeats, device),
        floor=floor_seconds(encoded.raw_bytes, repeats, device),
    )


def print_rows(rows: Sequence[Row]) -> None:
    """Print one table for each shape, with speeds in MB/s."""
    shape = ""
    for row in rows:
        if row.shape != shape:
            shape = row.shape
            print(f"\n{shape}\n{'':27}  ratio  escapes   encode   decode  checksum     copy  MB/s")
        speeds = [row.speed(s) for s in (row.encode, row.decode, row.checksum, row.floor)]
        print(
            f"{row.case:17} {row.backend:9} {row.ratio:6.3f} {row.escapes:8.3%}"
            " {:8.0f} {:8.0f} {:9.0f} {:8.0f}".format(*speeds)
        )


def write_json(path: Path, rows: Sequence[Any]) -> None:
    """Write the rows and the environment as JSON."""
    environment = {"torch": torch.__version__, "machine": platform.machine()}
    report = {"environment": environment, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the codec against a memory copy.")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--repeats", type=int, default=20, help="timed runs of each call (20)")
    parser.add_argument("--reference", action="store_true", help="also measure the torch reference")
    parser.add_argument("--json", type=Path, help="write rows and environment to this file")
    parser.add_argument("--peer", type=Path, help="cuda only: the paper's codec_gpu.py, as a peer")
    parser.add_argument(
        "--kv",
        type=Path,
        help="cuda only: torch file of real KV, from `headrace kv-statistics --keep-kv`",
    )
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        from codec.bench import gpu as gpu_bench  # imports Triton

        measured = gpu_bench.run(options.peer, options.kv)
        if options.json:
            write_json(options.json, measured)
        return
    backends: list[Backend | None] = [None, reference] if options.reference else [None]
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {threads} thread(s), {platform.processor() or 'unknown'}")
    rows = [
        measure(case, backend, 1 if backend else options.repeats, device)
        for case in CASES
        for backend in backends
    ]
    print_rows(rows)
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
