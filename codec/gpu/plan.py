"""Launch plans: the kernel launches that encode or decode one segment on a GPU.

A `LaunchPlan` keeps the offsets of planes and bit streams in device tensors. Its calls only launch
kernels, on the current CUDA stream of the planes' device, so a CUDA graph can capture encode and
decode. Lengths, checksums and errors are copied to the host asynchronously.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from codec.checksum import KEYS
from codec.codebook import Codebook
from codec.elements import element_of, unit_view
from codec.errors import InvalidBuffer, InvalidPlanes
from codec.format import (
    CHUNK,
    COLUMN,
    COLUMNS,
    WORD_BYTES,
    Geometry,
    Layout,
    Mode,
    PlaneHeader,
    pack_static,
)
from codec.gpu import kernels
from codec.gpu.groups import group_planes

_PACK_CHUNKS = int(kernels.PACK_CHUNKS)
_ESCAPE_SCRATCH_WORDS = (int(kernels.MAX_NIBBLES) // 4) + int(kernels.MAX_LISTED)
"""Scratch words of a chunk: a byte for each second-level code, a word for each listed escape."""
_MAX_DIRECT_CHUNKS = 1 << 13
"""Maximum chunks for which `pack_kernel` sums the sizes itself, without `sum_kernel`."""
_DECODE_REGISTERS, _ENCODE_REGISTERS, _ESCAPE_CODE_REGISTERS = 48, 64, 56
"""Registers per thread of decode, and of encode without and with an escape code, tuned on an H200.
64 allow an SM's maximum number of one-warp programs; with fewer, the next launch starts earlier.
"""


@dataclass(frozen=True)
class Results:
    """Results of a launch, copied to the host asynchronously.

    Attributes:
        numbers: int64 `[4]` in pinned host memory, valid after `event`; see `LaunchPlan.encode`.
        event: recorded after the copy; None if the results are on the host already.
    """

    numbers: Tensor
    event: "torch.cuda.Event | None"

    @classmethod
    def of(cls, results: Tensor) -> "Results":
        """Start the copy of a launch's results to the host."""
        if not results.is_cuda:
            return cls(results, None)
        numbers = torch.empty(4, dtype=torch.int64, pin_memory=True)
        numbers.copy_(results, non_blocking=True)
        return cls(numbers, record_event())

    def read(self) -> tuple[int, int, int, int]:
        """Wait for the copy and return the four numbers."""
        if self.event is not None:
            self.event.synchronize()
        first, second, third, fourth = self.numbers.tolist()
        return first, second, third, fourth


def record_event() -> torch.cuda.Event:
    """Record a timing event on the current CUDA stream; its `synchronize` does not spin."""
    event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class Workspace:
    """Scratch memory shared by plans that encode on one CUDA stream and have no tail stream.

    It grows to 1/4 to 1/3 of the raw bytes of the largest segment.
    """

    def __init__(self, device: torch.device) -> None:
        self._words = torch.empty(0, dtype=torch.int32, device=device)

    def parts(self, *sizes: int) -> tuple[Tensor, ...]:
        """Return uninitialized int32 tensors of these lengths, aligned to 16 bytes."""
        sizes = tuple(-(-max(size, 4) // 4) * 4 for size in sizes)
        if len(self._words) < sum(sizes):
            self._words = self._words.new_zeros(sum(sizes))
        parts, start = [], 0
        for size in sizes:
            parts.append(self._words[start : start + size])
            start += size
        return tuple(parts)


class LaunchPlan:
    """Kernel launches that encode or decode segments of one layout, for any number of calls.

    Page ids are int64 `[pages]`, in token order. A CUDA graph reads them from the captured address.

    Args:
        planes: tensors `[page, kv_head, slot, dim]` of one dtype, device and strides; the slots of
            a head are contiguous.
        codebooks: one for each plane; None for a plane that is stored raw.
        geometry: geometry of the segment, with at least one token.
        layout: layout of the segment.
        workspace: scratch memory to share with other plans of the same CUDA stream.
        tail_stream: CUDA stream for the small kernels at the end of a call, which then overlap with
            the next segment. `results` copies on this stream. Readers of the output, the next call
            of this plan, and the end of a graph capture must wait for it.

    Raises:
        InvalidPlanes: the planes have different strides.
    """

    def __init__(
        self,
        planes: Sequence[Tensor],
        codebooks: Sequence[Codebook | None],
        geometry: Geometry,
        layout: Layout,
        *,
        workspace: Workspace | None = None,
        tail_stream: "torch.cuda.Stream | None" = None,
    ) -> None:
        device, element = planes[0].device, element_of(planes[0].dtype)
        if element.units > 1:
            planes = [unit_view(plane) for plane in planes]
        _check_strides(planes)
        self._tail_stream = tail_stream
        headers = [
            PlaneHeader(Mode.RAW, 0) if book is None else PlaneHeader(book.mode, book.number)
            for book in codebooks
        ]
        static = pack_static(geometry, element, headers)
        self._header = torch.frombuffer(bytearray(static), dtype=torch.int32).to(device)
        self._layout, self._kept_alive = layout, tuple(planes)
        first = min(planes, key=Tensor.data_ptr)
        source = first.as_strided((1,), (1,))  # base address of all kernel accesses
        aligned = _is_aligned(planes)
        words = _as_words(source) if aligned else torch.zeros(1, dtype=torch.int32, device=device)
        elements = source.view(torch.int16 if element.size == 2 else torch.int8)
        self._memory = (elements, words)
        self._geometry_args = (planes[0].stride(0), planes[0].stride(1), *_run_sizes(geometry))
        self._options = {
            "ELEMENT_BYTES": element.size,
            "ALIGNED": aligned,
            "PAGED": len(planes[0]) > 1,
            "KEYS": KEYS,
            "num_warps": 1,
        }
        self._grid = (geometry.num_chunks // geometry.kv_heads, geometry.kv_heads)
        starts = [(p.data_ptr() - first.data_ptr()) // element.size for p in planes]
        self._groups = group_planes(starts, codebooks, geometry, layout, device)
        self._accumulators = torch.zeros(kernels.ACCUMULATORS, dtype=torch.int64, device=device)
        self._results = torch.zeros(4, dtype=torch.int64, device=device)
        self._workspace = workspace or Workspace(device)

    def results(self) -> Results:
        """Start the copy of the last launch's results to the host."""
        with self._on_tail_stream():
            return Results.of(self._results)

    @contextmanager
    def _on_tail_stream(self, after: bool = False) -> Iterator[None]:
        """Make the tail stream current, if any; with `after`, it waits for all earlier launches."""
        if self._tail_stream is None:
            yield
            return
        if after:
            self._tail_stream.wait_stream(torch.cuda.current_stream(self._tail_stream.device))
        with torch.cuda.stream(self._tail_stream):
            yield

    def _page_args(self, pages: Tensor) -> tuple[Tensor | int, ...]:
        """Return the kernel arguments that locate pages: ids on the device, strides, run sizes."""
        device = self._results.device
        if device.type == "cuda" and not pages.is_cuda:
            pages = pages.pin_memory().to(device, non_blocking=True)
        return pages, *self._geometry_args

    @property
    def _scratch_stride(self) -> int:
        """Number of scratch words per chunk."""
        coded = [group.options for group in self._groups if group.options]
        needed = [COLUMNS * int(options["OVERFLOW_WORDS"]) for options in coded]
        needed += [_ESCAPE_SCRATCH_WORDS for options in coded if options["HAS_ESCAPE_CODE"]]
        return max(needed, default=0)

    def encode(self, pages: Tensor, out: Tensor) -> None:
        """Launch the kernels that encode a segment.

        Args:
            pages: int64 `[num_pages]` page ids.
            out: uint8, aligned to 16 bytes, of at least `layout.bound` bytes.

        `results` then has: segment length in bytes, checksum, number of escapes and entry words.

        Raises:
            InvalidBuffer: the output is too short or not aligned.
        """
        _, out32, out64 = _views(out, self._layout.bound)
        chunks, page_args = self._layout.coded_chunks, self._page_args(pages)
        sizes, sums, scratch = self._workspace.parts(
            chunks, -(-chunks // _PACK_CHUNKS), self._scratch_stride * chunks
        )
        for group in self._groups:
            grid = (*self._grid, group.planes)
            if not group.encoding:
                kernels.raw_kernel[grid](
                    *self._memory, group.rows, *group.start, *page_args, out32, self._accumulators,
                    STORE=True, EVENLY_SPACED=group.evenly_spaced, **self._options,
                )  # fmt: skip
                continue
            has_escape_code = group.options["HAS_ESCAPE_CODE"]
            kernels.encode_kernel[grid](
                *self._memory, group.rows, *group.start, *group.encoding, *page_args, out32,
                sizes, scratch.view(torch.uint8), scratch, self._accumulators,
                EVENLY_SPACED=group.evenly_spaced, SCRATCH_STRIDE=self._scratch_stride,
                maxnreg=_ESCAPE_CODE_REGISTERS if has_escape_code else _ENCODE_REGISTERS,
                **group.options, **self._options,
            )  # fmt: skip
        with self._on_tail_stream(after=True):
            self._pack(out32, out64, sizes, sums, scratch)

    def _pack(
        self, out32: Tensor, out64: Tensor, sizes: Tensor, sums: Tensor, scratch: Tensor
    ) -> None:
        """Launch the kernels that pack the entries and write the header."""
        chunks = self._layout.coded_chunks
        programs = max(-(-chunks // _PACK_CHUNKS), 1)
        partials: tuple[Tensor, int, int] = (sizes, 1, 0xFF)
        if chunks > _MAX_DIRECT_CHUNKS:
            kernels.sum_kernel[(programs,)](sizes, sums, chunks, num_warps=4)
            partials = (sums, _PACK_CHUNKS, -1)
        kernels.pack_kernel[(programs,)](
            sizes, *partials, scratch, out32, out64, self._layout.starts // WORD_BYTES,
            self._layout.entries // WORD_BYTES, chunks, self._header, len(self._header),
            self._accumulators, self._results, SCRATCH_STRIDE=self._scratch_stride, num_warps=4,
        )  # fmt: skip

    def decode(self, pages: Tensor, payload: Tensor) -> None:
        """Launch the kernels that decode a segment.

        Args:
            pages: int64 `[num_pages]` page ids.
            payload: uint8, aligned to 16 bytes: exactly the bytes of the segment.

        Results: length in the header, computed checksum, checksum in the header, error flags (see
        `codec.gpu.backend.check_errors`).

        Raises:
            InvalidBuffer: the payload is shorter than its layout or not aligned.
        """
        in8, in32, in64 = _views(payload, self._layout.entries)
        page_args = self._page_args(pages)
        starts, entries = self._layout.starts // WORD_BYTES, self._layout.entries // WORD_BYTES
        words = len(payload) // WORD_BYTES - entries
        for group in self._groups:
            grid = (*self._grid, group.planes)
            if not group.decoding:
                kernels.raw_decode_kernel[grid](
                    *self._memory, group.rows, *group.start, group.streams[0], group.streams[-1],
                    *page_args, in32, self._accumulators,
                    EVENLY_SPACED=group.evenly_spaced, **self._options,
                )  # fmt: skip
                continue
            kernels.decode_kernel[grid](
                *self._memory, group.rows, *group.start, *group.streams, *group.decoding,
                *page_args, in8, in32, starts, entries, words, self._accumulators,
                EVENLY_SPACED=group.evenly_spaced, maxnreg=_DECODE_REGISTERS,
                **group.options, **self._options,
            )  # fmt: skip
        with self._on_tail_stream(after=True):
            kernels.verify_kernel[(1,)](
                in32, in64, starts, self._layout.coded_chunks, words, len(payload),
                self._header, len(self._header), self._accumulators, self._results,
                num_warps=4,
            )  # fmt: skip

    def checksum(self, pages: Tensor) -> None:
        """Launch the kernels that compute the pages' checksum; all planes must be raw."""
        page_args = self._page_args(pages)
        for group in self._groups:
            kernels.raw_kernel[(*self._grid, group.planes)](
                *self._memory, group.rows, *group.start, *page_args, self._header,
                self._accumulators,
                STORE=False, EVENLY_SPACED=group.evenly_spaced, **self._options,
            )  # fmt: skip
        kernels.verify_kernel[(1,)](
            self._header, self._accumulators, 0, 0, 0, 0, self._header, 0, self._accumulators,
            self._results,
            num_warps=4,
        )  # fmt: skip


def _run_sizes(geometry: Geometry) -> tuple[int, ...]:
    """Return the kernel arguments `run_chunks` to `head_columns`."""
    run, rest = geometry.page_slots * geometry.dim, geometry.rest_slots * geometry.dim
    run_chunks = max(-(-(run if geometry.full_pages else rest) // CHUNK), 1)
    run_columns, rest_columns = -(-run // COLUMN), -(-rest // COLUMN)
    head_columns = geometry.full_pages * run_columns + rest_columns
    return run_chunks, geometry.full_pages, run, rest, run_columns, head_columns


def _check_strides(planes: Sequence[Tensor]) -> None:
    """Raise `InvalidPlanes` unless all planes have equal strides, as the kernels assume."""
    shape = planes[0].shape
    kinds = {
        tuple(stride for stride, size in zip(plane.stride(), shape, strict=True) if size > 1)
        for plane in planes
    }
    if len(kinds) > 1:
        raise InvalidPlanes(f"on a GPU all planes of a segment must have the same strides: {kinds}")


def _is_aligned(planes: Sequence[Tensor]) -> bool:
    """Return whether full chunks are aligned to eight elements, and planes to 16 bytes."""
    if any(plane.data_ptr() % 16 for plane in planes):
        return False
    shape, strides = planes[0].shape, planes[0].stride()
    return all(
        size == 1 or stride % 8 == 0 for size, stride in zip(shape[:2], strides[:2], strict=True)
    )


def _views(segment: Tensor, min_bytes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a segment as uint8, int32 and int64 tensors.

    Raises:
        InvalidBuffer: it has fewer than `min_bytes` bytes or is not aligned to 16 bytes.
    """
    if len(segment) < min_bytes:
        raise InvalidBuffer(f"the segment has {len(segment)} bytes, fewer than {min_bytes}")
    if segment.data_ptr() % 16:
        raise InvalidBuffer("a segment on a GPU must be aligned to 16 bytes")
    whole = segment[: len(segment) // 8 * 8]
    return segment, whole.view(torch.int32), whole.view(torch.int64)


def _as_words(source: Tensor) -> Tensor:
    """Return an int32 tensor `[1]` at the address of `source`."""
    words = torch.empty(0, dtype=torch.int32, device=source.device)
    offset = source.storage_offset() * source.element_size()
    return words.set_(source.untyped_storage(), offset // 4, (1,), (1,))
