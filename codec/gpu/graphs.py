"""CUDA graphs of codec calls, and the results of calls in flight.

A graph holds the launches of one call, for any segments up to a number and a size. Its replay takes
less time on the host than the launches of its kernels. Graphs are captured when they are first
needed, and shared by all planes of one shape. Under Triton's interpreter there are no graphs.
"""

import gc
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import cache
from threading import Lock

import torch

from codec.gpu.descriptors import SegmentCall, Words
from codec.gpu.groups import PlaneShape
from codec.gpu.kernels import parameters
from codec.gpu.launch import Launch, Workspace

MAX_IN_FLIGHT = 8
"""Maximum number of calls of one size in flight without a warm-up; the next one waits."""
_SECOND_STREAM_BYTES = 1 << 26
"""Minimum raw bytes of a call whose descriptors are copied on a second stream, while earlier calls
run. This saves device time but costs the host 25 us, which is too long for smaller calls.
"""
_NANOSECONDS = int(parameters.RESULT_NANOSECONDS)


class Direction(StrEnum):
    """Kind of a call."""

    ENCODE = "encode"
    DECODE = "decode"


class Call:
    """A call in flight or finished, and its results. Methods may run on any thread."""

    def __init__(self, slot: "Slot", segments: Sequence[SegmentCall]) -> None:
        self.segments = segments
        self._slot = slot
        self._lock = Lock()
        self._ended = False
        self._results: Words | None = None
        self._numbers: list[list[int]] | None = None
        self._seconds: list[float] | None = None

    @property
    def done(self) -> bool:
        """Whether the call has finished; does not block."""
        if not self._ended:  # a later call of the slot starts only when the results are saved
            self._ended = self._slot.done or self._results is not None
        return self._ended

    def results(self) -> Words:
        """Wait for the call and return the results of its segments; see `Launch.results`."""
        if self._results is None:
            with self._lock:
                if self._results is None:
                    if not self.done:
                        self._slot.wait()
                    self._results = self._slot.launch.results[: len(self.segments)].copy()
        return self._results

    def numbers(self, segment: int) -> list[int]:
        """Wait for the call and return results `RESULT_LENGTH` to `RESULT_FOURTH` of a segment."""
        if self._numbers is None:
            self._numbers = self.results()[:, :4].tolist()
        return self._numbers[segment]

    def seconds(self, segment: int) -> float:
        """Wait for the call. Return a segment's share of the call's device time, in seconds."""
        if self._seconds is None:
            each = [call.template.raw_bytes for call in self.segments]
            speed = int(self.results()[:, _NANOSECONDS].max()) / 1e9 / sum(each)
            self._seconds = [raw_bytes * speed for raw_bytes in each]
        return self._seconds[segment]


class Streams:
    """The current CUDA stream, for calls, and a second one for copies and for capturing graphs."""

    def __init__(self, device: torch.device) -> None:
        self.calls = torch.cuda.current_stream(device)
        self._second = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def copy(self, start: Callable[[], None]) -> None:
        """Start a copy on the second stream. Later calls wait for it on the device."""
        with torch.cuda.stream(self._second):
            start()
        self._copied.record(self._second)
        self.calls.wait_event(self._copied)

    def capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture launches. Other threads may use the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # destroying another graph would invalidate the capture
        try:
            with torch.cuda.stream(self._second):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    run()
                finally:
                    graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        return graph


class Slot:
    """A launch with its CUDA graph, for one call at a time on one stream.

    Args:
        streams: None on a CPU.
    """

    def __init__(self, launch: Launch, direction: Direction, streams: Streams | None) -> None:
        self.launch = launch
        self._streams = streams
        self._kernels = launch.encode if direction is Direction.ENCODE else launch.decode
        self._copies = streams is not None and launch.raw_bytes >= _SECOND_STREAM_BYTES
        self._call: Call | None = None
        if streams is None:
            return
        self._finished = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._run()  # compiles the kernels; there are no segments, so nothing is written
        self._finished.record(streams.calls)
        self._graph = streams.capture(self._run)

    @property
    def done(self) -> bool:
        """Whether the last call has finished."""
        return self._streams is None or bool(self._finished.query())  # type: ignore[no-untyped-call]

    @property
    def idle(self) -> bool:
        """Whether `start` would not wait for a previous call."""
        return self._call is None or self._call.done

    def wait(self) -> None:
        """Wait for the last call."""
        if self._streams is not None:
            self._finished.synchronize()

    def start(self, segments: Sequence[SegmentCall]) -> Call:
        """Start a call. Wait until the previous call has finished, and save its results first.

        The first call waits for the run that compiled the kernels, because that run reads the same
        descriptors.
        """
        if self._call is not None:
            self._call.results()
        else:
            self.wait()
        self.launch.describe(segments)
        if self._streams is None:
            self._run()
        else:
            if self._copies:
                self._streams.copy(self.launch.copy)
            self._graph.replay()
            self._finished.record(self._streams.calls)
        self._call = Call(self, segments)
        return self._call

    def _run(self) -> None:
        if not self._copies:
            self.launch.fetch()
        self._kernels()


class Graphs:
    """Slots for calls on planes of one shape, on one CUDA stream."""

    def __init__(
        self,
        shape: PlaneShape,
        device: torch.device,
        workspace: Workspace,
        streams: Streams | None,
    ) -> None:
        self._shape = shape
        self._device = device
        self._streams = streams
        self._workspace = workspace
        self._slots: defaultdict[tuple[Direction, int, int], deque[Slot]] = defaultdict(deque)
        self._sizes: dict[Direction, list[tuple[int, int, int]]] = {each: [] for each in Direction}
        self._prepared = False

    def start(self, direction: Direction, segments: Sequence[SegmentCall]) -> Call:
        """Start a call on the current CUDA stream."""
        pages = max([len(segment.pages) for segment in segments])
        key = (direction, *self._size(len(segments), pages))
        slots = self._slots[key]  # the last one is the most recently used
        if not (slots and slots[0].idle):
            slots = self._other_slots(*key)
        slots.rotate(-1)
        return slots[-1].start(segments)

    def prepare(self, direction: Direction, segments: int, pages: int, slots: int = 1) -> None:
        """Compile and capture slots for calls of this size.

        After this call, no further slot is captured for a size that already has one. If all slots
        of a size are busy, a call uses an idle slot of a larger size or waits, because a capture
        takes longer.
        """
        self._prepared = True
        key = (direction, *self._size(segments, pages))
        while len(self._slots[key]) < slots:
            self._add_slot(*key)

    def _other_slots(self, direction: Direction, segments: int, pages: int) -> deque[Slot]:
        """Return the slots for a call whose size has no idle slot; the call uses the first one."""
        slots = self._slots[direction, segments, pages]
        if slots and self._prepared:
            fitting = self._at_least(direction, segments, pages)
            return next((each for each in fitting if each[0].idle), slots)
        if len(slots) < MAX_IN_FLIGHT:
            self._add_slot(direction, segments, pages)
        return slots

    def _at_least(self, direction: Direction, segments: int, pages: int) -> Iterator[deque[Slot]]:
        """Yield the slots of each size that a call fits in, from the smallest size."""
        sizes = self._sizes[direction]
        for _, most, longest in sizes[bisect_left(sizes, (segments * pages,)) :]:
            if most >= segments and longest >= pages:
                yield self._slots[direction, most, longest]

    def _add_slot(self, direction: Direction, segments: int, pages: int) -> None:
        """Compile and capture a slot; it becomes the next one to be used."""
        launch = Launch(self._shape, segments, pages, self._device, self._workspace)
        slot = Slot(launch, direction, self._streams)
        slots = self._slots[direction, segments, pages]
        if not slots:
            insort(self._sizes[direction], (segments * pages, segments, pages))
        slots.appendleft(slot)

    def _size(self, segments: int, pages: int) -> tuple[int, int]:
        """Return the size of the graph that serves a call."""
        if self._streams is None:  # the interpreter takes milliseconds for an unused program
            return segments, pages
        return rounded(segments), rounded(pages)


@cache
def rounded(count: int) -> int:
    """Round a positive number up to a power of two, or to 1.5 times a power of two."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if count <= power * 3 // 4 else power


def sizes_up_to(count: int) -> list[int]:
    """Return the distinct values of `rounded` for 1 to `count`."""
    return sorted({rounded(each) for each in range(1, count + 1)})


def current_stream_of(device: torch.device) -> int:
    """Return the handle of the current CUDA stream of a device, 0 for a CPU."""
    return torch._C._cuda_getCurrentRawStream(device.index or 0) if device.type == "cuda" else 0


@cache
def graphs_of(device: torch.device, stream: int, shape: PlaneShape) -> Graphs:
    """Return the graphs for planes of a shape on the current CUDA stream, given by its handle."""
    return Graphs(shape, device, *_resources_of(device, stream))


@cache
def _resources_of(
    device: torch.device,
    stream: int,  # noqa: ARG001 - each stream has its own resources
) -> tuple[Workspace, Streams | None]:
    """Return the working memory and the streams of all calls on a CUDA stream, the current one."""
    return Workspace(device), Streams(device) if device.type == "cuda" else None
