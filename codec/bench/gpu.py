"""Benchmark of the codec on a GPU: `python -m codec.bench --device cuda --help`.

A row measures one segment. Calls are timed with CUDA events, and the L2 cache is flushed between
runs. The floor is the time to move the raw bytes and the payload at the speed of a copy. `calls.py`
measures small calls. With `--peer` the paper's public code, `codec_gpu.py`, runs on the same
tensors in the same process.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.testing import do_bench

import codec
from codec.bench.calls import CallRow, call_rows
from codec.elements import BF16, FLOAT_TYPES, ElementType
from codec.format import Mode

MIB = 1 << 20
LARGE = "flat bf16 top16 512 MiB"
"""Name of the row that small calls are compared with."""
_PEER_CLASS = "ChunkLocalSplitZipGPU"


@dataclass(frozen=True)
class GpuRow:
    """Measurements of one case.

    Attributes:
        ratio: raw bytes over payload bytes.
        escapes: fraction of elements without a code.
        encode, decode, floor: speed in GB/s (10^9 bytes/s) of raw data.
        peer_encode, peer_decode: the same for the paper's code; 0 if not measured.
    """

    name: str
    raw_bytes: int
    ratio: float
    escapes: float
    encode: float
    decode: float
    floor: float
    peer_encode: float = 0.0
    peer_decode: float = 0.0

    def __str__(self) -> str:
        text = (
            f"{self.name:46} {self.ratio:7.4f} {self.escapes:8.3%} "
            f"{self.encode:7.0f} ({self.encode / self.floor:4.0%}) "
            f"{self.decode:7.0f} ({self.decode / self.floor:4.0%}) {self.floor:7.0f}"
        )
        return text + (
            f" {self.peer_encode:7.0f} {self.peer_decode:7.0f}" if self.peer_encode else ""
        )


@dataclass(frozen=True)
class Bench:
    """Settings and reference speed that all rows of a run share.

    Attributes:
        copied: speed of a copy in GB/s, counting bytes read and bytes written.
        peer: encoder class of the paper's code, or None.
    """

    copied: float
    peer: Any = None

    @classmethod
    def start(cls, peer: Path | None) -> "Bench":
        """Measure the speed of a copy and load the paper's code."""
        source = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        copied = 2 * source.numel() / _milliseconds(lambda: target.copy_(source)) / 1e6
        return cls(copied, _load_peer(peer) if peer else None)

    def row(
        self,
        name: str,
        planes: list[Tensor],
        books: codec.Codebook | list[codec.Codebook],
        ids: list[int],
        tokens: int,
        *,
        against_peer: bool = False,
    ) -> GpuRow:
        """Check that a segment of all planes round-trips, then measure encoding and decoding.

        Args:
            books: one codebook for each plane, or a single codebook for all planes.
            ids: page ids of the segment.
            against_peer: also measure the paper's code on the first plane.
        """
        books = books if isinstance(books, list) else [books] * len(planes)
        pages = tuple(ids)
        encoder = codec.paged(planes, books)
        out = torch.empty(_max_bytes(planes, books, tokens), dtype=torch.uint8, device="cuda")
        source = codec.EncodeSegment(pages, tokens, 0, len(out))
        encoded = encoder.encode_batch([source], out)[0].result()
        segment = codec.DecodeSegment(pages, tokens, 0, encoded.length, encoded.checksum)
        back = [torch.zeros_like(plane) for plane in planes]
        decoder = codec.paged(back, books)
        decoder.decode_batch([segment], out)[0].result()
        if not _same(planes, back, ids):
            raise AssertionError(f"{name}: the decoded content differs from the input")
        _, heads, _, dim = planes[0].shape
        elements = len(planes) * heads * tokens * dim
        raw, length = encoded.raw_bytes, encoded.length
        encode = raw / _milliseconds(lambda: encoder.encode_batch([source], out)) / 1e6
        decode = raw / _milliseconds(lambda: decoder.decode_batch([segment], out)) / 1e6
        peer = self._peer(planes[0]) if against_peer and self.peer else (0.0, 0.0)
        floor = self.copied / (1 + length / raw)
        escapes = encoded.escapes / elements
        return GpuRow(name, raw, raw / length, escapes, encode, decode, floor, *peer)

    def _peer(self, plane: Tensor) -> tuple[float, float]:
        flat, coder = plane.view(-1), self.peer()
        coder.calibrate(flat[: 1 << 24])
        encoded = coder.encode(flat)
        raw = 2 * flat.numel()
        encode = raw / _milliseconds(lambda: coder.encode(flat)) / 1e6
        return encode, raw / _milliseconds(lambda: coder.decode(encoded)) / 1e6


Kv = dict[str, list[Tensor]]
"""Planes `[page, kv_head, slot, dim]` under "calibration" and "test", as written by
`headrace kv-statistics --keep-kv`."""


def real_rows(bench: Bench, kv: Kv) -> Iterator[GpuRow]:
    """Yield measurements of all planes of a model, each with its own codebook.

    The pages are repeated so that the planes have about 512 MiB.
    """
    size = sum(plane.numel() * 2 for plane in kv["test"])
    times = max(1, 512 * MIB // size)
    planes = [plane.repeat(times, 1, 1, 1).cuda() for plane in kv["test"]]
    ids = torch.randperm(len(planes[0])).tolist()
    for mode in (Mode.TOP16, Mode.INBAND, Mode.THREE_BIT, None):
        books = [codec.calibrate(plane, mode=mode) for plane in kv["calibration"]]
        name = f"real KV, {mode.name.lower() if mode else 'the best of each plane'}, random pages"
        yield bench.row(name, planes, books, ids, len(ids) * planes[0].shape[2])


def rows(bench: Bench, kv: Kv | None) -> Iterator[GpuRow]:
    """Yield the measurements of all cases."""
    book = _calibrated(Mode.TOP16)
    for mib in (1, 16, 64, 512, 4096):
        x = normal(mib * MIB // 2)
        yield bench.row(f"flat bf16 top16 {mib} MiB", [_flat(x)], book, [0], x.numel())
    for rate in (0.0, 0.0001, 0.003, 0.05, 0.1):
        x = normal(256 * MIB, rate)
        for mode in (Mode.TOP16, Mode.INBAND, Mode.THREE_BIT):
            name = f"flat bf16 {mode.name.lower()} 512 MiB, {rate:.2%} outliers"
            against = mode is Mode.TOP16
            own = _calibrated(mode)
            yield bench.row(name, [_flat(x)], own, [0], x.numel(), against_peer=against)
    if kv is not None:
        yield from real_rows(bench, kv)
    for element in FLOAT_TYPES[1:]:
        x = normal(512 * MIB // element.size).to(element.dtype)
        for mode in (m for m in Mode if 0 < m.code_bits < element.exponent_bits):
            name = f"flat {element.name} {mode.name.lower()} 512 MiB"
            yield bench.row(name, [_flat(x)], _calibrated(mode, element), [0], x.numel())
    x = normal(256 * MIB)
    gaps = codec.Codebook((3, *range(116, 130), 200))
    yield bench.row("flat bf16 top16 512 MiB, codebook with gaps", [_flat(x)], gaps, [0], x.numel())
    x = torch.randint(-(1 << 15), 1 << 15, (256 * MIB,), dtype=torch.int16, device="cuda")
    x = x.view(torch.bfloat16)
    yield bench.row("flat bf16 top16 512 MiB, random bits", [_flat(x)], book, [0], x.numel())
    del x
    for layers, heads, dim, tokens in ((32, 8, 128, 4096), (30, 3, 64, 8192)):
        shape = (tokens // 16 + 64, heads, 16, dim)
        planes = [normal(torch.Size(shape).numel()).view(shape) for _ in range(2 * layers)]
        ids = torch.randperm(shape[0])[: tokens // 16].tolist()
        name = f"{layers} layers, {heads} heads of {dim}, {tokens} tokens, random pages"
        yield bench.row(name, planes, book, ids, tokens)


def normal(count: int, outliers: float = 0.0) -> Tensor:
    """Return N(0, 1) values in bf16; a fraction `outliers` of them is multiplied by 2^20."""
    parts = [1 << 26] * (count >> 26) + [count & (1 << 26) - 1]
    x = torch.cat([torch.randn(part, device="cuda").bfloat16() for part in parts])
    if outliers:
        x[torch.randint(count, (int(count * outliers),), device="cuda")] *= 2.0**20
    return x


def _calibrated(mode: Mode, element: ElementType = BF16) -> codec.Codebook:
    return codec.calibrate(normal(1 << 22), element.dtype, mode)


def _max_bytes(planes: list[Tensor], books: Sequence[codec.Codebook], tokens: int) -> int:
    """Return the maximum length of a segment of these planes, in bytes."""
    _, heads, slots, dim = planes[0].shape
    element = books[0].element
    return codec.max_segment_bytes(len(planes), heads, dim, tokens, slots, element)


def _flat(x: Tensor) -> Tensor:
    return x.view(1, 1, x.numel(), 1)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.uint8)


def _same(planes: list[Tensor], back: list[Tensor], ids: list[int]) -> bool:
    if len(planes[0]) == 1:
        return all(torch.equal(_bits(a), _bits(b)) for a, b in zip(planes, back, strict=True))
    pairs = zip(planes, back, strict=True)
    return all(torch.equal(_bits(a)[ids], _bits(b)[ids]) for a, b in pairs)


def _milliseconds(call: Callable[[], object]) -> float:
    """Return the median duration of a call in milliseconds."""
    return float(do_bench(call, warmup=20, rep=60, return_mode="median"))


def _load_peer(path: Path) -> Any:
    """Load the encoder class of the paper's public code from its `codec_gpu.py`."""
    spec = importlib.util.spec_from_file_location("peer_codec_gpu", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # needed by its dataclasses
    spec.loader.exec_module(module)
    return getattr(module, _PEER_CLASS)


def run(peer: Path | None, kv: Path | None) -> list[GpuRow | CallRow]:
    """Measure and print all rows."""
    values: Kv | None = torch.load(kv) if kv else None
    bench = Bench.start(peer)
    print(f"{torch.cuda.get_device_name()}, a copy moves {bench.copied:.0f} GB/s")
    print(
        f"{'GB/s of raw data':46} {'ratio':>7} {'escapes':>8} {'encode':>14} {'decode':>14}", end=""
    )
    print(f" {'floor':>7}" + (f" {'peer encode, decode':>15}" if peer else ""))
    measured: list[GpuRow | CallRow] = []
    for row in rows(bench, values):
        print(row, flush=True)
        measured.append(row)
    large = next(row for row in measured if row.name == LARGE)
    print(f"\n{CallRow.TITLE}")
    for call_row in call_rows(bench.copied):
        print(call_row.against(large.encode, large.decode), flush=True)
        measured.append(call_row)
    return measured
