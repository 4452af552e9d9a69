"""Fast copies of large tensors from the host to a GPU."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import torch
from torch import Tensor

_CHUNK_BYTES = 8 << 20
_MAX_THREADS = 8


class Uploader:
    """Copies tensors to a device, in chunks through pinned buffers that several threads fill.

    A plain copy of memory that is not pinned, such as that of a memory-mapped file, reads it in one
    thread. Here the threads also take the page faults of such a file.

    Columns of a matrix, which a rank of a worker reads, are copied in chunks of rows. Tensors that
    are small, transposed or already on the device are copied by torch, and so is everything if the
    device is a CPU. Leaving the context manager ends the threads.

    Attributes:
        device: the target device. ``cuda`` without an index is the current GPU of this thread.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self._lanes = threading.local()
        self._pool = ThreadPoolExecutor(
            min(_MAX_THREADS, len(os.sched_getaffinity(0))), "upload", initializer=self._use_device
        )

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the device. It can be used on the current CUDA stream at once.

        The host tensor is not read after the call.
        """
        source = _rows(tensor) if tensor.nbytes >= _CHUNK_BYTES else None
        if self.device.type != "cuda" or tensor.device.type != "cpu" or source is None:
            return tensor.to(self.device)
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        stream = torch.cuda.current_stream(self.device)
        free = stream.record_event()  # earlier work on the stream may still use the memory
        target_rows = target.view(-1).view(torch.uint8).view(source.shape)
        count = _CHUNK_BYTES // source[0].numel()
        pieces = zip(torch.split(source, count), torch.split(target_rows, count), strict=True)
        for copied in [self._pool.submit(self._copy, *piece, free) for piece in pieces]:
            stream.wait_event(copied.result())
        return target

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def _use_device(self) -> None:
        """Make the device the current one of a thread of the pool.

        Otherwise it is the first GPU, on which leaving a stream of another one creates a context.
        """
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @torch.inference_mode()
    def _copy(self, source: Tensor, target: Tensor, free: torch.cuda.Event) -> torch.cuda.Event:
        """Copy one chunk on a thread of the pool; return the event of its completion."""
        if not hasattr(self._lanes, "lane"):
            self._lanes.lane = _Lane(self.device)
        lane: _Lane = self._lanes.lane
        lane.copied.synchronize()  # the buffer is free again
        staged = lane.buffer[: source.numel()].view(source.shape)
        staged.copy_(source)
        with torch.cuda.stream(lane.stream):
            lane.stream.wait_event(free)
            target.copy_(staged, non_blocking=True)
            lane.copied = lane.stream.record_event()
        return lane.copied


class _Lane:
    """Pinned buffer and CUDA stream of one thread.

    Attributes:
        copied: recorded after the last copy from the buffer.
    """

    def __init__(self, device: torch.device) -> None:
        self.buffer = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]


def _rows(tensor: Tensor) -> Tensor | None:
    """Return the bytes of a tensor.

    Those of a contiguous tensor are ``[n]``. Those of a matrix whose rows are contiguous, and fit
    into a chunk, are ``[rows, n]``. None is returned for other tensors.
    """
    if tensor.is_contiguous():
        return tensor.view(-1).view(torch.uint8)
    if tensor.dim() != 2 or tensor.stride(1) != 1 or tensor[0].nbytes > _CHUNK_BYTES:
        return None
    return tensor.view(torch.uint8)
