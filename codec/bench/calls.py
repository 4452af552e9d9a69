"""Benchmark of small codec calls on a GPU: their speed, and their time on the host and the device.

Calls follow one another on one or two CUDA streams, up to six in flight on each, and every result
is read. They rotate through 512 MiB of pages, so that the data are not in the L2 cache. Page ids
are tuples that repeat, as they do for the layer groups of a prompt.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import ClassVar

import torch

import codec
from codec.format import Mode

_MIB = 1 << 20
_HEADS, _SLOTS, _DIM = 8, 16, 128
_TOKENS_OF_MIB = _MIB // (2 * _HEADS * _DIM * 2)
"""Tokens of a segment of 1 MiB: K and V of one layer in bf16."""
_PAGES = 512 * _TOKENS_OF_MIB // _SLOTS
_IN_FLIGHT = 6


@dataclass(frozen=True)
class CallRow:
    """Measurements of calls of one size.

    Attributes:
        raw_bytes: raw bytes of a call.
        encode, decode: speed in GB/s (10^9 bytes/s) of raw data, host included.
        floor: speed limit in GB/s, as in `GpuRow`.
        encode_host, decode_host: host time in microseconds to start a call and read its results.
        encode_device, decode_device: device time in microseconds, from `Pending.seconds`.
    """

    name: str
    raw_bytes: int
    encode: float
    decode: float
    floor: float
    encode_host: float
    decode_host: float
    encode_device: float
    decode_device: float

    TITLE: ClassVar[str] = (
        f"{'calls, GB/s of raw data (of large segments)':46} {'encode':>14} {'decode':>14}"
        f" {'floor':>7} {'host us':>11} {'device us':>11}"
    )

    def against(self, encode: float, decode: float) -> str:
        """Return the row as text, with the ratios to the speeds of large segments."""
        return (
            f"{self.name:46} {self.encode:7.0f} ({self.encode / encode:4.0%}) "
            f"{self.decode:7.0f} ({self.decode / decode:4.0%}) {self.floor:7.0f} "
            f"{self.encode_host:5.1f} {self.decode_host:5.1f} "
            f"{self.encode_device:5.1f} {self.decode_device:5.1f}"
        )


Call = Callable[[], Sequence[codec.Pending[object]]]


def call_rows(copied: float) -> Iterator[CallRow]:
    """Yield measurements of calls with one segment, and with several.

    Args:
        copied: speed of a copy in GB/s, counting bytes read and bytes written.
    """
    for streams in (1, 2):
        for segments, mib in ((1, 1), (1, 4), (1, 16), (1, 64), (16, 1), (24, 16)):
            yield _row(segments, mib, streams, copied)


def _row(segments: int, mib: int, streams: int, copied: float) -> CallRow:
    size, tokens = mib * _MIB, mib * _TOKENS_OF_MIB
    planes = [torch.randn(_PAGES, _HEADS, _SLOTS, _DIM, device="cuda").bfloat16() for _ in range(2)]
    book = codec.calibrate(planes[0][:64], mode=Mode.TOP16)
    coder = codec.paged(planes, [book] * 2)
    ids = torch.randperm(_PAGES).view(-1, tokens // _SLOTS).tolist()
    bound = codec.max_segment_bytes(2, _HEADS, _DIM, tokens, _SLOTS)
    slab = torch.empty(len(ids) * bound, dtype=torch.uint8, device="cuda")
    sources = [
        codec.EncodeSegment(tuple(pages), tokens, number * bound, bound)
        for number, pages in enumerate(ids)
    ]
    batches = [sources[i : i + segments] for i in range(0, len(sources), segments)]
    batches = [batch for batch in batches if len(batch) == segments]
    encoded = [[e.result() for e in coder.encode_batch(batch, slab)] for batch in batches]
    payloads = [
        [
            codec.DecodeSegment(s.page_ids, tokens, s.offset, e.length, e.checksum)
            for s, e in zip(*each, strict=True)
        ]
        for each in zip(batches, encoded, strict=True)
    ]
    encoding, decoding = cycle(batches), cycle(payloads)
    raw = segments * size
    wire = sum(e.length for e in encoded[0])
    encode = _measured(lambda: coder.encode_batch(next(encoding), slab), streams)
    decode = _measured(lambda: coder.decode_batch(next(decoding), slab), streams)
    name = f"{mib} MiB" if segments == 1 else f"{segments} x {mib} MiB in one call"
    if streams > 1:
        name += f", {streams} streams"
    speeds = (raw / encode[0] / 1e3, raw / decode[0] / 1e3, copied / (1 + wire / raw))
    return CallRow(name, raw, *speeds, encode[1], decode[1], encode[2], decode[2])


def _measured(call: Call, streams: int) -> tuple[float, float, float]:
    """Return three medians in microseconds per call.

    These are the elapsed time of back-to-back calls, and the host time and the device time of
    single calls.
    """
    queues = [torch.cuda.Stream() for _ in range(streams)]  # type: ignore[no-untyped-call]

    def run(calls: int) -> float:
        started = time.perf_counter()
        pending = deque[Sequence[codec.Pending[object]]]()
        for number in range(calls):
            with torch.cuda.stream(queues[number % streams]):
                pending.append(call())
            if len(pending) > _IN_FLIGHT * streams:
                _read(pending.popleft())
        for each in pending:
            _read(each)
        return (time.perf_counter() - started) / calls * 1e6

    run(50)
    back_to_back = statistics.median(run(200) for _ in range(5))
    host, device = [], []
    with torch.cuda.stream(queues[0]):
        for _ in range(100):
            first = time.perf_counter()
            results = call()
            second = time.perf_counter()
            torch.cuda.synchronize()
            third = time.perf_counter()
            _read(results)
            host.append((second - first + time.perf_counter() - third) * 1e6)
            device.append(sum(each.seconds for each in results) * 1e6)
    return back_to_back, statistics.median(host), statistics.median(device)


def _read(results: Sequence[codec.Pending[object]]) -> None:
    for each in results:
        each.result()
