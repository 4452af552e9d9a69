"""A segment's geometry on a GPU, and the few launches that encode or decode it.

A `Plan` has where planes and streams are in tensors that its kernels read. `Plan.encode` and
`Plan.decode` only launch; lengths, checksum and errors come back by a copy that the caller waits
for, or not, so both can be captured in a CUDA graph. Kernels go to the current stream of the
current device, which is the planes'.
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
from codec.gpu.groups import groups_of

_PACK = int(kernels.PACK)
_SCRATCH = (int(kernels.MAX_NIBBLES) // 4) + int(kernels.MAX_SECOND)
"""Words that a chunk's entries take before they are packed, if it has any at a second level."""
_SUMMED_DIRECTLY = 1 << 13
"""Up to so many chunks every program that packs adds up the sizes of all before its own; of more, a
launch of its own adds up theirs first."""
_DECODING, _ENCODING, _LISTING = 48, 64, 56
"""Registers for a thread of a one-warp program: of 64 an SM holds as many programs as it can run,
of fewer the next ones need not wait for theirs; measured best, the last with an escape code."""


@dataclass(frozen=True)
class Facts:
    """What a launch found, on its way to the host.

    Args:
        numbers: int64 `[4]`, pinned host memory once `event` has passed; see the kernels.
    """

    numbers: Tensor
    event: "torch.cuda.Event | None"

    @classmethod
    def of(cls, facts: Tensor) -> "Facts":
        if not facts.is_cuda:
            return cls(facts, None)
        numbers = torch.empty(4, dtype=torch.int64, pin_memory=True)
        numbers.copy_(facts, non_blocking=True)
        return cls(numbers, event_now())

    def read(self) -> tuple[int, int, int, int]:
        """Waits for the launch, and for nothing after it."""
        if self.event is not None:
            self.event.synchronize()
        first, second, third, fourth = self.numbers.tolist()
        return first, second, third, fourth


def event_now() -> torch.cuda.Event:
    """An event on the current stream; who waits for it sleeps."""
    event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class Workspace:
    """Memory that encodes on one stream use one after another, without ends aside; it grows to what
    they need.

    A quarter to a third of the raw bytes of the largest segment.
    """

    def __init__(self, device: torch.device) -> None:
        self._words = torch.empty(0, dtype=torch.int32, device=device)

    def parts(self, *sizes: int) -> tuple[Tensor, ...]:
        """int32 tensors of so many words, each aligned to 16 bytes; they hold anything."""
        sizes = tuple(-(-max(size, 4) // 4) * 4 for size in sizes)
        if len(self._words) < sum(sizes):
            self._words = self._words.new_zeros(sum(sizes))
        parts, start = [], 0
        for size in sizes:
            parts.append(self._words[start : start + size])
            start += size
        return tuple(parts)


class Plan:
    """One segment's way between pages and bytes, ready to be launched any number of times.

    Args:
        planes: `[page, kv_head, slot, dim]`, of one dtype and device, a head's slots contiguous.
        codebooks: one for each plane; None for a plane that is stored raw.
        geometry, layout: of the segment. A segment without tokens has nothing to launch.
        workspace: of encoding, if it is shared with other plans of the same stream.
        aside: a stream for what ends an encode or a decode: small kernels that the next segment's
            need not wait for. `facts` then follows these; whoever reads the output waits for the
            stream, and so do this plan's own next call and its end.

    Pages are int64 `[pages]`, in token order; a CUDA graph finds them where they were. Raises
    `InvalidPlanes` for planes of different strides.
    """

    def __init__(
        self,
        planes: Sequence[Tensor],
        codebooks: Sequence[Codebook | None],
        geometry: Geometry,
        layout: Layout,
        *,
        workspace: Workspace | None = None,
        aside: "torch.cuda.Stream | None" = None,
    ) -> None:
        device, element = planes[0].device, element_of(planes[0].dtype)
        if element.units > 1:
            planes = [unit_view(plane) for plane in planes]
        _check_strides(planes)
        self._aside = aside
        headers = [
            PlaneHeader(Mode.RAW, 0) if book is None else PlaneHeader(book.mode, book.number)
            for book in codebooks
        ]
        static = pack_static(geometry, element, headers)
        self._static = torch.frombuffer(bytearray(static), dtype=torch.int32).to(device)
        self._layout, self._held = layout, tuple(planes)
        first = min(planes, key=Tensor.data_ptr)
        source = first.as_strided((1,), (1,))  # an address: kernels go on from there
        aligned = _is_aligned(planes)
        words = _as_words(source) if aligned else torch.zeros(1, dtype=torch.int32, device=device)
        elements = source.view(torch.int16 if element.size == 2 else torch.int8)
        self._memory = (elements, words)
        self._place = (planes[0].stride(0), planes[0].stride(1), *_place(geometry))
        self._options = {
            "SIZE": element.size, "ALIGNED": aligned, "PAGED": len(planes[0]) > 1, "KEYS": KEYS,
            "num_warps": 1,
        }  # fmt: skip
        self._grid = (geometry.num_chunks // geometry.kv_heads, geometry.kv_heads)
        starts = [(p.data_ptr() - first.data_ptr()) // element.size for p in planes]
        self._groups = groups_of(starts, codebooks, geometry, layout, device)
        self._totals = torch.zeros(kernels.TOTALS, dtype=torch.int64, device=device)
        self._facts = torch.zeros(4, dtype=torch.int64, device=device)
        self._workspace = workspace or Workspace(device)

    def facts(self) -> Facts:
        """Sends what the last launch found to the host."""
        with self._ending():
            return Facts.of(self._facts)

    @contextmanager
    def _ending(self, after: bool = False) -> Iterator[None]:
        """On the stream for what ends a call, after what was launched on the current one."""
        if self._aside is None:
            yield
            return
        if after:
            self._aside.wait_stream(torch.cuda.current_stream(self._aside.device))
        with torch.cuda.stream(self._aside):
            yield

    def _where(self, pages: Tensor) -> tuple[Tensor | int, ...]:
        """What kernels take of pages: ids on their device, and what a page is made of."""
        device = self._facts.device
        if device.type == "cuda" and not pages.is_cuda:
            pages = pages.pin_memory().to(device, non_blocking=True)
        return pages, *self._place

    @property
    def _stride(self) -> int:
        """Words of scratch of a chunk."""
        options = [group.options for group in self._groups if group.options]
        needed = [COLUMNS * int(of_group["SPILLED"]) for of_group in options]
        needed += [_SCRATCH for of_group in options if of_group["ESCAPES"]]
        return max(needed, default=0)

    def encode(self, pages: Tensor, out: Tensor) -> None:
        """Launches: a whole segment into ``out``, u8, 16-byte aligned, of the layout's bound or
        longer.

        Facts: the segment's length in bytes, its checksum, its escapes, and words of entries.
        """
        _, out32, out64 = _views(out, self._layout.bound)
        chunks, where = self._layout.coded_chunks, self._where(pages)
        sizes, sums, scratch = self._workspace.parts(
            chunks, -(-chunks // _PACK), self._stride * chunks
        )
        for group in self._groups:
            grid = (*self._grid, group.planes)
            if not group.encoding:
                kernels.raw_kernel[grid](
                    *self._memory, group.rows, *group.start, *where, out32, self._totals,
                    STORE=True, EVEN=group.even, **self._options,
                )  # fmt: skip
                continue
            kernels.encode_kernel[grid](
                *self._memory, group.rows, *group.start, *group.encoding, *where, out32,
                sizes, scratch.view(torch.uint8), scratch, self._totals,
                EVEN=group.even, STRIDE=self._stride,
                maxnreg=_LISTING if group.options["ESCAPES"] else _ENCODING,
                **group.options, **self._options,
            )  # fmt: skip
        with self._ending(after=True):
            self._pack(out32, out64, sizes, sums, scratch)

    def _pack(
        self, out32: Tensor, out64: Tensor, sizes: Tensor, sums: Tensor, scratch: Tensor
    ) -> None:
        chunks = self._layout.coded_chunks
        programs = max(-(-chunks // _PACK), 1)
        partials: tuple[Tensor, int, int] = (sizes, 1, 0xFF)
        if chunks > _SUMMED_DIRECTLY:
            kernels.sum_kernel[(programs,)](sizes, sums, chunks, num_warps=4)
            partials = (sums, _PACK, -1)
        kernels.pack_kernel[(programs,)](
            sizes, *partials, scratch, out32, out64, self._layout.starts // WORD_BYTES,
            self._layout.entries // WORD_BYTES, chunks, self._static, len(self._static),
            self._totals, self._facts, STRIDE=self._stride, num_warps=4,
        )  # fmt: skip

    def decode(self, pages: Tensor, payload: Tensor) -> None:
        """Launches: a segment, exactly ``payload``, into the pages.

        Facts: its length, the checksum found, the checksum announced, and errors, for `check`.
        """
        in8, in32, in64 = _views(payload, self._layout.entries)
        where = self._where(pages)
        starts, entries = self._layout.starts // WORD_BYTES, self._layout.entries // WORD_BYTES
        words = len(payload) // WORD_BYTES - entries
        for group in self._groups:
            grid = (*self._grid, group.planes)
            if not group.decoding:
                kernels.raw_decode_kernel[grid](
                    *self._memory, group.rows, *group.start, group.streams[0], group.streams[-1],
                    *where, in32, self._totals, EVEN=group.even, **self._options,
                )  # fmt: skip
                continue
            kernels.decode_kernel[grid](
                *self._memory, group.rows, *group.start, *group.streams, *group.decoding,
                *where, in8, in32, starts, entries, words, self._totals,
                EVEN=group.even, maxnreg=_DECODING,
                **group.options, **self._options,
            )  # fmt: skip
        with self._ending(after=True):
            kernels.verify_kernel[(1,)](
                in32, in64, starts, self._layout.coded_chunks, words, len(payload),
                self._static, len(self._static), self._totals, self._facts, num_warps=4,
            )  # fmt: skip

    def digest(self, pages: Tensor) -> None:
        """Launches: the checksum of the pages' content, of a plan without codebooks."""
        where = self._where(pages)
        for group in self._groups:
            kernels.raw_kernel[(*self._grid, group.planes)](
                *self._memory, group.rows, *group.start, *where, self._static, self._totals,
                STORE=False, EVEN=group.even, **self._options,
            )  # fmt: skip
        kernels.verify_kernel[(1,)](
            self._static, self._totals, 0, 0, 0, 0, self._static, 0, self._totals, self._facts,
            num_warps=4,
        )  # fmt: skip


def _place(geometry: Geometry) -> tuple[int, ...]:
    """``run_chunks`` to ``head_columns``, as kernels take them."""
    run, rest = geometry.page_slots * geometry.dim, geometry.rest_slots * geometry.dim
    run_chunks = max(-(-(run if geometry.full_pages else rest) // CHUNK), 1)
    run_columns, rest_columns = -(-run // COLUMN), -(-rest // COLUMN)
    head_columns = geometry.full_pages * run_columns + rest_columns
    return run_chunks, geometry.full_pages, run, rest, run_columns, head_columns


def _check_strides(planes: Sequence[Tensor]) -> None:
    """Kernels go through pages and heads of all planes by the strides of the first."""
    shape = planes[0].shape
    kinds = {
        tuple(stride for stride, size in zip(plane.stride(), shape, strict=True) if size > 1)
        for plane in planes
    }
    if len(kinds) > 1:
        raise InvalidPlanes(f"on a GPU all planes of a segment have the same strides: {kinds}")


def _is_aligned(planes: Sequence[Tensor]) -> bool:
    """Whether full chunks start at multiples of eight elements, of 16 bytes if they have two."""
    if any(plane.data_ptr() % 16 for plane in planes):
        return False
    shape, strides = planes[0].shape, planes[0].stride()
    return all(
        size == 1 or stride % 8 == 0 for size, stride in zip(shape[:2], strides[:2], strict=True)
    )


def _views(segment: Tensor, least: int) -> tuple[Tensor, Tensor, Tensor]:
    """The bytes of a segment as they are, and as int32 and int64.

    Raises `InvalidBuffer` if they are fewer than ``least``, or not aligned to 16.
    """
    if len(segment) < least:
        raise InvalidBuffer(f"{len(segment)} bytes, where kernels touch {least}")
    if segment.data_ptr() % 16:
        raise InvalidBuffer("a segment on a GPU starts at a multiple of 16 bytes")
    whole = segment[: len(segment) // 8 * 8]
    return segment, whole.view(torch.int32), whole.view(torch.int64)


def _as_words(source: Tensor) -> Tensor:
    """An int32 tensor at the address of ``source``."""
    words = torch.empty(0, dtype=torch.int32, device=source.device)
    offset = source.storage_offset() * source.element_size()
    return words.set_(source.untyped_storage(), offset // 4, (1,), (1,))
