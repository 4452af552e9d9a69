"""The GPU backend: the reference's bytes in two launches, without a word from the host in between.

A `Plan` is one segment's geometry on a device: where planes, pages and streams are, in tensors
that its kernels read. `Plan.encode` and `Plan.decode` only launch; lengths, checksum and errors
come back by a copy that the caller waits for, or not, so both can be captured in a CUDA graph.
Kernels go to the current stream of the current device, which is the planes'.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from codec import kernels
from codec.checksum import KEYS_HI, KEYS_LO
from codec.codebook import CODES, Codebook
from codec.errors import FormatError, InvalidBuffer
from codec.format import (
    CHUNK,
    SLOT_SIZES,
    WORD,
    Geometry,
    Layout,
    Mode,
    PlaneHeader,
    SegmentHeader,
    pack_static,
)
from codec.mix import MASK64

_GROUP = int(kernels.GROUP)
_REGISTERS = 64
"""For a thread of a one-warp program, so that as many as an SM holds can run on it."""
_ERRORS = (
    "the header is not that of this geometry and these codebooks",
    "a slot names more escapes, or others, than its chunk can have",
)


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
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return cls(numbers, event)

    def read(self) -> tuple[int, int, int, int]:
        """Waits for the launch, and for nothing after it."""
        if self.event is not None:
            self.event.synchronize()
        first, second, third, fourth = self.numbers.tolist()
        return first, second, third, fourth


class Plan:
    """One segment's way between pages and bytes, ready to be launched any number of times.

    Args:
        planes: bf16 `[page, kv_head, slot, dim]`, on one device, a head's slots contiguous.
        codebooks: one for each plane, of one slot size; None for a plane that is stored raw.
        pages: int64 `[pages]`, in token order, on any device.
        geometry, layout: of the segment. A segment without tokens has nothing to launch.
        slot_bytes: of the segment, if none of its planes tells.
    """

    def __init__(
        self,
        planes: Sequence[Tensor],
        codebooks: Sequence[Codebook | None],
        pages: Tensor,
        geometry: Geometry,
        layout: Layout,
        *,
        slot_bytes: int | None = None,
    ) -> None:
        device = planes[0].device
        sizes = (book.slot_bytes for book in codebooks if book is not None)
        slot = slot_bytes or next(sizes, SLOT_SIZES[0])
        headers = [
            PlaneHeader(Mode.RAW, 0) if book is None else PlaneHeader(Mode.TOP16, book.number)
            for book in codebooks
        ]
        static = pack_static(geometry, headers, slot)
        self._static = torch.frombuffer(bytearray(static), dtype=torch.uint8).to(device)
        self._layout, self._held = layout, tuple(planes)
        first = min(planes, key=Tensor.data_ptr)
        lowest_of = [-1 if book is None else book.exponents[0] for book in codebooks]
        table = [
            ((plane.data_ptr() - first.data_ptr()) // 2, block, lowest, 0)
            for plane, block, lowest in zip(planes, layout.blocks, lowest_of, strict=True)
        ]
        aligned = _is_aligned(planes, geometry)
        source = first.as_strided((1,), (1,))  # an address: kernels go on from there
        words = _as_words(source) if aligned else source.new_zeros(1, dtype=torch.int64)
        self._memory = (source.view(torch.int16), words, torch.tensor(table).to(device))
        self._tables = _tables(tuple(codebooks), device)
        self._place, self._sizes = _place(geometry)
        self._where = (pages.to(device), planes[0].stride(0), planes[0].stride(1))
        self._blocks = (layout.blocks[0], layout.blocks[-1] - layout.blocks[-2] if table[1:] else 0)
        self._keys = _keys(device)
        self._counts = (geometry.num_chunks, len(planes) * geometry.num_chunks)
        groups = -(-self._counts[1] // _GROUP)
        self._grid = (geometry.num_chunks // geometry.kv_heads, geometry.kv_heads, len(planes))
        self._groups = (groups,)

        def zeros(size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._digests, self._totals = zeros(self._counts[1]), zeros(kernels.TOTALS)
        self._spilled = zeros(groups, torch.int32), zeros(-(-groups // _GROUP), torch.int32)
        self._facts = zeros(4)
        raw = [book is None for book in codebooks]
        self._modes = {"MIXED": len(set(raw)) > 1, "RAW": raw[0], "PAGES": _pages_kind(geometry)}
        window = all(book is None or _is_window(book) for book in codebooks)
        self._kinds = {"SLOT": slot, "WINDOW": window, "ALIGNED": aligned, "num_warps": 1}

    def facts(self) -> "Facts":
        """Sends what the last launch found to the host."""
        return Facts.of(self._facts)

    def encode(self, out: Tensor) -> None:
        """Launches: a whole segment into ``out``, u8, 16-byte aligned, of the layout's bound or
        longer.

        Facts: the segment's length in bytes, its checksum, its escapes, and its spill units.
        """
        views = _views(out, self._layout.bound)
        streams, (chunks, total) = self._layout.streams, self._counts
        out[: len(self._static)].copy_(self._static)
        source, tables = self._memory, self._tables[0]
        kernels.encode_kernel[self._grid](
            *source, tables, *self._where, *self._place[1:], *self._sizes, self._keys, *views,
            *self._blocks, streams.codes, streams.signs, self._digests, *self._spilled,
            **self._kinds, **self._modes, maxnreg=_REGISTERS,
        )  # fmt: skip
        kernels.seal_kernel[self._groups](
            *source, tables, *self._where, *self._place, *self._sizes, self._keys, *views,
            streams.codes, streams.signs, chunks, total, self._layout.spill,
            self._digests, *self._spilled, self._totals,
            self._facts, **self._kinds,
        )  # fmt: skip

    def decode(self, payload: Tensor) -> None:
        """Launches: a segment, exactly ``payload``, into the pages.

        Facts: its length, the checksum found, the checksum announced, and errors, for `check`.
        """
        views = _views(payload, self._layout.spill)
        layout, (chunks, total) = self._layout, self._counts
        header = self._static.view(torch.int32)
        kernels.decode_kernel[self._grid](
            *self._memory, self._tables[1], *self._where, *self._place[1:], *self._sizes,
            self._keys, *views,
            *self._blocks, layout.streams.codes, layout.streams.signs,
            layout.spill, len(payload) - layout.spill, self._digests, self._totals,
            **self._kinds, **self._modes, maxnreg=_REGISTERS,
        )  # fmt: skip
        kernels.verify_kernel[self._groups](
            *self._memory, *self._where, *self._place, *self._sizes, self._keys, *views,
            header, len(header),
            layout.streams.codes, layout.streams.signs, layout.spill, len(payload) - layout.spill,
            chunks, total, len(payload), self._digests, self._totals, self._facts,
            SLOT=self._kinds["SLOT"], ALIGNED=self._kinds["ALIGNED"], num_warps=1,
        )  # fmt: skip

    def digest(self) -> None:
        """Launches: the checksum of the pages' content."""
        chunks, total = self._counts
        kernels.digest_kernel[self._grid](
            *self._memory, *self._where, *self._place[1:], self._keys, self._digests,
            ALIGNED=self._kinds["ALIGNED"], num_warps=1,
        )  # fmt: skip
        kernels.sum_kernel[self._groups](
            self._memory[2], chunks, total, self._keys, self._digests, self._totals, self._facts,
            *self._place, num_warps=1,
        )  # fmt: skip


def encode_planes(
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    pages: Tensor,
    geometry: Geometry,
    layout: Layout,
    out: Tensor,
) -> tuple[int, int, int]:
    """See `reference.encode_planes`."""
    plan = Plan(planes, codebooks, pages, geometry, layout)
    plan.encode(out)
    _, checksum, escapes, units = plan.facts().read()
    return units, checksum & MASK64, escapes


def decode_planes(
    payload: Tensor,
    header: SegmentHeader,
    layout: Layout,
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    pages: Tensor,
) -> int:
    """See `reference.decode_planes`; but slots are found wrong while the pages are written."""
    books = [
        book if plane.mode is Mode.TOP16 else None
        for plane, book in zip(header.planes, codebooks, strict=True)
    ]
    plan = Plan(planes, books, pages, header.geometry, layout, slot_bytes=header.slot_bytes)
    plan.decode(payload)
    _, checksum, _, errors = plan.facts().read()
    check(errors)
    return checksum & MASK64


def checksum_planes(planes: Sequence[Tensor], pages: Tensor, geometry: Geometry) -> int:
    """See `reference.checksum_planes`."""
    layout = Layout.of(geometry, [Mode.RAW] * len(planes), SLOT_SIZES[0])
    plan = Plan(planes, [None] * len(planes), pages, geometry, layout)
    plan.digest()
    return plan.facts().read()[1] & MASK64


def check(errors: int) -> None:
    """Raises `FormatError` for what a decode's facts report."""
    for bit, message in enumerate(_ERRORS):
        if errors >> bit & 1:
            raise FormatError(message)


def _place(geometry: Geometry) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``head_chunks`` to ``rest``, and ``run_words`` and ``head_words``, as kernels take them."""
    run, rest = geometry.page_slots * geometry.dim, geometry.rest_slots * geometry.dim
    head_chunks = max(geometry.num_chunks // geometry.kv_heads, 1)
    run_chunks = max(-(-(run if geometry.full_pages else rest) // CHUNK), 1)
    run_words, rest_words = -(-run // WORD), -(-rest // WORD)
    place = (head_chunks, run_chunks, geometry.full_pages, run, rest)
    return place, (run_words, geometry.full_pages * run_words + rest_words)


def _pages_kind(geometry: Geometry) -> int:
    """How kernels find a chunk's page; see `kernels.words.place_in_head`."""
    if geometry.num_pages <= 1:
        return 0
    return 1 if geometry.page_slots * geometry.dim <= CHUNK else 2


def _is_aligned(planes: Sequence[Tensor], geometry: Geometry) -> bool:
    """Whether full chunks start at multiples of 16 bytes, in pages and in all streams."""
    if any(plane.data_ptr() % 16 for plane in planes):
        return False
    if geometry.kv_heads * geometry.num_pages == 1 and geometry.page_slots == planes[0].shape[2]:
        return planes[0].shape[0] * planes[0].shape[1] == 1 or not planes[0].stride(0) % 8
    runs = (geometry.page_slots * geometry.dim, geometry.rest_slots * geometry.dim)
    strides = (planes[0].stride(0), planes[0].stride(1))
    return all(run % 32 == 0 for run in runs) and all(stride % 8 == 0 for stride in strides)


def _views(segment: Tensor, least: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The bytes of a segment as they are, and as int16, int32 and int64.

    Raises `InvalidBuffer` if they are fewer than ``least``, or not aligned to 16.
    """
    if len(segment) < least:
        raise InvalidBuffer(f"{len(segment)} bytes, where kernels touch {least}")
    if segment.data_ptr() % 16:
        raise InvalidBuffer("a segment on a GPU starts at a multiple of 16 bytes")
    whole = segment[: len(segment) // 8 * 8]
    return segment, whole.view(torch.int16), whole.view(torch.int32), whole.view(torch.int64)


def _as_words(source: Tensor) -> Tensor:
    """An int64 tensor at the address of ``source``."""
    words = torch.empty(0, dtype=torch.int64, device=source.device)
    offset = source.storage_offset() * source.element_size()
    return words.set_(source.untyped_storage(), offset // 8, (1,), (1,))


def _is_window(book: Codebook) -> bool:
    """Whether the sixteen exponents follow one another, so that codes need no table."""
    return book.exponents[-1] - book.exponents[0] == CODES - 1


@lru_cache(maxsize=256)
def _tables(codebooks: tuple[Codebook | None, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """u8 `[planes, 256]` from exponents to codes, `CODES` for none, and `[planes, 16]` back."""
    codes = b"".join(bytes(256) if book is None else book.code_table for book in codebooks)
    back = b"".join(bytes(CODES) if book is None else bytes(book.exponents) for book in codebooks)
    encoding = torch.frombuffer(bytearray(codes), dtype=torch.uint8)
    return encoding.to(device), torch.frombuffer(bytearray(back), dtype=torch.uint8).to(device)


@lru_cache(maxsize=16)
def _keys(device: torch.device) -> Tensor:
    """int32 `[2, words]`, the checksum's."""
    return torch.from_numpy(np.stack((KEYS_LO, KEYS_HI)).view(np.int32)).to(device)
