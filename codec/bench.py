"""How fast the codec is, against a memory copy: `python -m codec.bench --help`.

The floor of every row is the time to copy the raw bytes from one buffer to another, the least that
moving them costs; both directions also touch the payload, so the ratio is below one by nature.
Data are N(0, 1) in bf16, with a codebook calibrated on other draws of the same.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import codec
from codec import reference
from codec.ops import Backend


@dataclass(frozen=True)
class Shape:
    """A segment to measure: planes `[page, heads, slots, dim]` and its tokens."""

    name: str
    planes: int
    tokens: int
    heads: int
    slots: int
    dim: int


@dataclass(frozen=True)
class Row:
    """One measured call; speeds in MB/s (10^6 bytes) of raw data, best of all repeats."""

    shape: str
    backend: str
    call: str
    raw_bytes: int
    ratio: float
    seconds: float
    floor_seconds: float

    @property
    def speed(self) -> float:
        return self.raw_bytes / self.seconds / 1e6

    @property
    def floor_speed(self) -> float:
        return self.raw_bytes / self.floor_seconds / 1e6


SHAPES = [
    Shape("segment: 60 planes, 256 tokens, 3 heads of 64", 60, 256, 3, 16, 64),
    Shape("small: 60 planes, 16 tokens, 3 heads of 64", 60, 16, 3, 16, 64),
    Shape("large: 4 planes, 4096 tokens, 8 heads of 128", 4, 4096, 8, 16, 128),
]


def best_seconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """The shortest of `repeats` runs, after one that is not counted."""

    def once() -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    return min(once() for _ in range(repeats))


def measure(shape: Shape, backend: Backend | None, repeats: int, device: torch.device) -> list[Row]:
    """Encode, decode and checksum of one segment, its pages in a random order."""
    generator = torch.Generator().manual_seed(0)
    pages = -(-shape.tokens // shape.slots)
    size = (2 * pages, shape.heads, shape.slots, shape.dim)
    planes = [
        torch.randn(size, generator=generator).bfloat16().to(device) for _ in range(shape.planes)
    ]
    codebooks = [codec.calibrate(torch.randn(1 << 16, generator=generator))] * shape.planes
    ids = torch.randperm(2 * pages, generator=generator).tolist()
    source, target, tokens = ids[:pages], ids[pages:], shape.tokens
    bound = codec.max_segment_bytes(shape.planes, shape.heads, shape.dim, tokens, shape.slots)
    out = torch.empty(bound, dtype=torch.uint8, device=device)

    def encode() -> codec.Encoded:
        return codec.encode_pages(planes, codebooks, source, tokens, out, backend=backend)

    encoded = encode()
    payload = out[: encoded.length].clone()
    raw = torch.randint(0, 256, (encoded.raw_bytes,), dtype=torch.uint8, device=device)
    copy = torch.empty_like(raw)
    floor = best_seconds(lambda: copy.copy_(raw), repeats, device)
    calls: dict[str, Callable[[], object]] = {
        "encode": encode,
        "decode": lambda: codec.decode_pages(
            payload, planes, codebooks, target, tokens, backend=backend
        ),
        "checksum": lambda: codec.checksum_pages(planes, source, tokens, backend=backend),
    }
    name = "reference" if backend else device.type
    return [
        Row(
            shape.name,
            name,
            call,
            encoded.raw_bytes,
            encoded.raw_bytes / encoded.length,
            best_seconds(run, repeats, device),
            floor,
        )
        for call, run in calls.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the codec against a memory copy.")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--repeats", type=int, default=20, help="runs of each call (20)")
    parser.add_argument("--reference", action="store_true", help="measure the torch reference too")
    parser.add_argument("--json", type=Path, help="write the rows and the environment here")
    options = parser.parse_args()
    device = torch.device(options.device)
    backends: list[Backend | None] = [None, reference] if options.reference else [None]
    rows = [
        row
        for shape in SHAPES
        for backend in backends
        for row in measure(shape, backend, options.repeats, device)
    ]
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {threads} thread(s), {platform.processor() or 'unknown'}")
    shape = ""
    for row in rows:
        if row.shape != shape:
            shape = row.shape
            print(f"\n{shape}: {row.raw_bytes / 1e6:.2f} MB raw, ratio {row.ratio:.4f}")
            print("  backend    call        µs    MB/s   copy MB/s   of copy")
        print(
            f"  {row.backend:10} {row.call:8} {row.seconds * 1e6:7.0f} {row.speed:7.0f}"
            f" {row.floor_speed:11.0f} {row.speed / row.floor_speed:9.2f}"
        )
    if options.json:
        environment = {"torch": torch.__version__, "machine": platform.machine()}
        report = {"environment": environment, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
