"""Kernel launches that encode or decode segments.

A `Launch` owns the memory that its kernels read and write. Its calls only launch kernels, on the
current CUDA stream of the planes' device, so a CUDA graph can capture them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from codec.errors import InvalidPlanes
from codec.gpu import kernels
from codec.gpu.descriptors import Descriptors, SegmentCall, Words, base_of
from codec.gpu.groups import PlaneGroup, PlaneShape
from codec.gpu.kernels import parameters, words

_ACCUMULATORS = int(words.ACCUMULATORS)
_PACK_CHUNKS = int(parameters.PACK_CHUNKS)
_RESULT_WORDS = int(parameters.RESULT_HEADER)
_MAX_DIRECT_CHUNKS = 1 << 13
"""Maximum chunks for which `pack_kernel` sums the sizes itself, without `sum_kernel`."""
_DECODE_REGISTERS, _ENCODE_REGISTERS, _ESCAPE_CODE_REGISTERS = 48, 64, 56
"""Registers per thread of decode, and of encode without and with an escape code, tuned on an H200.
64 allow an SM's maximum number of one-warp programs; with fewer, the next launch starts earlier.
"""
_MAX_GRID_Z = 65_535
_DEPENDENT_LAUNCH_CAPABILITY = (9, 0)
"""Lowest compute capability with programmatic dependent launch."""


class Workspace:
    """Scratch memory shared by the launches on one CUDA stream. It grows to the largest request."""

    def __init__(self, device: torch.device) -> None:
        self._scratch = torch.empty(0, dtype=torch.int32, device=device)
        self._accumulators = torch.empty(0, dtype=torch.int64, device=device)

    def scratch(self, *sizes: int) -> tuple[Tensor, ...]:
        """Return uninitialized int32 tensors of at least these lengths.

        Lengths are rounded up to multiples of 4, so that each tensor is aligned to 16 bytes. Later
        calls may return the same memory.
        """
        sizes = tuple(-(-max(size, 4) // 4) * 4 for size in sizes)
        if len(self._scratch) < sum(sizes):
            self._scratch = self._scratch.new_zeros(sum(sizes))
        return torch.split(self._scratch[: sum(sizes)], list(sizes))

    def accumulators(self, segments: int) -> Tensor:
        """Return the accumulators of a number of segments. They are zero between calls."""
        if len(self._accumulators) < segments * _ACCUMULATORS:
            self._accumulators = self._accumulators.new_zeros(segments * _ACCUMULATORS)
        return self._accumulators


class Launch:
    """Launches of kernels for segments of planes of one shape, with limits on number and size.

    Args:
        shape: shape of the planes.
        segments: maximum number of segments.
        pages: maximum number of pages of a segment.
        device: device of the planes.
        workspace: scratch memory of the CUDA stream.

    Attributes:
        raw_bytes: maximum size of the KV of a call before encoding, in bytes.
        results: int64 `[segments, words]`, written by the kernels. The words are described in
            `pack_kernel` and `verify_kernel`.

    Raises:
        InvalidPlanes: there are too many segments and planes for one launch.
    """

    def __init__(
        self,
        shape: PlaneShape,
        segments: int,
        pages: int,
        device: torch.device,
        workspace: Workspace,
    ) -> None:
        if segments * shape.planes > _MAX_GRID_Z:
            raise InvalidPlanes(f"{segments} segments of {shape.planes} planes are too many")
        self._shape = shape
        self._segments = segments
        page_elements = shape.planes * shape.kv_heads * shape.run_elements
        self.raw_bytes = segments * pages * page_elements * shape.element.size
        self._on_gpu = device.type == "cuda"
        self._dependent = self._on_gpu and (
            torch.cuda.get_device_capability(device) >= _DEPENDENT_LAUNCH_CAPABILITY
        )
        self._descriptors = Descriptors(shape, segments, pages, device)
        base = base_of(device)
        element = torch.int16 if shape.element.size == 2 else torch.int8
        self._base, self._base8, self._base32 = map(base.view, (element, torch.uint8, torch.int32))
        self._head_chunks = pages * shape.run_sizes[0]
        self._chunks = shape.coded_planes * shape.kv_heads * self._head_chunks
        self._sums_of_segment = max(-(-self._chunks // _PACK_CHUNKS), 1)
        self._accumulators = workspace.accumulators(segments)
        self._scratch = workspace.scratch(
            segments * self._chunks,
            segments * self._sums_of_segment,
            segments * self._chunks * shape.scratch_stride,
        )
        self._results = torch.zeros(
            (segments, _RESULT_WORDS + shape.header_words // 2),
            dtype=torch.int64,
            pin_memory=self._on_gpu,
        )
        self.results: Words = self._results.numpy()

    def describe(self, calls: Sequence[SegmentCall]) -> None:
        """Write the descriptors of the next call. The previous call must have finished."""
        self._descriptors.write(calls)

    def fetch(self) -> None:
        """Launch a kernel that copies the descriptors to the device, before all other kernels."""
        host, device = self._descriptors.host, self._descriptors.device
        if device is not host:
            kernels.fetch_kernel[(-(-len(host) // 1024),)](host, device, len(host), num_warps=4)

    def copy(self) -> None:
        """Copy the descriptors to the device on the current stream. Replaces `fetch`."""
        self._descriptors.device.copy_(self._descriptors.host, non_blocking=True)

    def encode(self) -> None:
        """Launch the kernels that encode the described segments."""
        sizes, sums, scratch = self._scratch
        for group, rows, grid, options in self._groups():
            if not group.options:
                kernels.raw_kernel[grid](
                    self._base, self._base32, rows, *self._page_args, self._accumulators,
                    STORE=True, **options,
                )  # fmt: skip
                continue
            has_escape_code = group.mode.has_escape_code
            kernels.encode_kernel[grid](
                self._base, self._base8, self._base32, rows, *self._page_args,
                sizes, scratch.view(torch.uint8), scratch, self._accumulators,
                SCRATCH_STRIDE=self._shape.scratch_stride,
                maxnreg=_ESCAPE_CODE_REGISTERS if has_escape_code else _ENCODE_REGISTERS,
                **group.options, **options,
            )  # fmt: skip
        programs = (self._sums_of_segment, self._segments)
        summed = self._chunks > _MAX_DIRECT_CHUNKS
        if summed:
            kernels.sum_kernel[programs](
                sizes, *self._segment_args, sums, self._sums_of_segment, **self._tail_options
            )
        kernels.pack_kernel[programs](
            self._base32, *self._segment_args, self._shape.header_words, sizes,
            sums if summed else sizes, self._sums_of_segment, scratch, self._accumulators,
            self._results, self._results.stride(0),
            SUMMED=summed, SCRATCH_STRIDE=self._shape.scratch_stride, TIMED=self._on_gpu,
            **self._tail_options,
        )  # fmt: skip

    def decode(self) -> None:
        """Launch the kernels that decode the described segments."""
        for group, rows, grid, options in self._groups():
            if not group.options:
                kernels.raw_decode_kernel[grid](
                    self._base, self._base32, rows, *self._page_args, self._accumulators,
                    **options,
                )  # fmt: skip
                continue
            kernels.decode_kernel[grid](
                self._base, self._base8, self._base32, rows, *self._page_args,
                self._shape.header_words, self._accumulators,
                maxnreg=_DECODE_REGISTERS, **group.options, **options,
            )  # fmt: skip
        self._verify()

    def checksum(self) -> None:
        """Launch the kernels that compute the pages' checksums; all planes must be raw."""
        for _, rows, grid, options in self._groups():
            kernels.raw_kernel[grid](
                self._base, self._base32, rows, *self._page_args, self._accumulators,
                STORE=False, **options,
            )  # fmt: skip
        self._verify()

    def _verify(self) -> None:
        kernels.verify_kernel[(self._segments,)](
            self._base32, *self._segment_args, self._shape.header_words, self._accumulators,
            self._results, self._results.stride(0), TIMED=self._on_gpu, **self._tail_options,
        )  # fmt: skip

    @property
    def _tail_options(self) -> dict[str, Any]:
        """Launch options of the kernels that follow the per-chunk kernels.

        On a GPU that supports it, each of them starts before the previous kernel ends.
        """
        dependent = self._dependent
        return {"DEPENDENT": dependent, "launch_pdl": dependent, "num_warps": 4}

    @property
    def _page_args(self) -> tuple[Tensor | int, ...]:
        """The kernels' consecutive arguments from `page_ids` to `run_columns`."""
        shape = self._shape
        return self._descriptors.page_ids, shape.page_stride, shape.head_stride, *shape.run_sizes

    @property
    def _segment_args(self) -> tuple[Tensor, int]:
        return self._descriptors.segment_rows, self._descriptors.row_words

    def _groups(
        self,
    ) -> Iterator[tuple[PlaneGroup, Tensor, tuple[int, int, int], dict[str, Any]]]:
        """Yield each group of planes, its plane rows, and the grid and options of its kernel."""
        timed = self._on_gpu  # the first kernel records the start of the call
        for group, rows in zip(self._shape.groups, self._descriptors.plane_rows, strict=True):
            planes = self._segments * len(group.numbers)
            grid = self._head_chunks, self._shape.kv_heads, planes
            yield group, rows, grid, {**self._shape.options, "TIMED": timed}
            timed = False
