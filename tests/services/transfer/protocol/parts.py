"""Replacements of NIXL, gRPC, the codec and the clock; all else is the product's code."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar, cast
from unittest.mock import patch

import torch

import codec
from runtime.kv.cache import CacheLayout
from runtime.kv.format import Plane
from runtime.pages.groups import pages_for
from services.transfer import announced, local_endpoint, prefill_client, pulls, sender
from services.transfer.codecs import SegmentCodecs
from services.transfer.extent import Extent
from services.transfer.frame import HEADER_BYTES
from services.transfer.policy import WireMode
from services.transfer.slab import Slab
from services.worker import prefill_session

T = TypeVar("T")

PAYLOAD_BYTES = 16
"""Bytes of one page of one layer, which is one segment."""
SLOT_BYTES = HEADER_BYTES + PAYLOAD_BYTES
LEASE_S = 10.0
DEADLINE_S = 100.0
PAGES = 10  # pages of sequence i have the ids from PAGES * i


@dataclass(frozen=True)
class Bounds:
    """Sizes of a search.

    Attributes:
        sequences: number of sequences, all from one decode worker to one prefill worker.
        layers: layers of the cache. A segment holds one page of one layer.
        chunks: chunks of a prompt, one page each.
        slots: landing slots. One peer may hold three quarters of them, rounded down.
        sender_slots: slots of the prefill worker, with the same limit.
        faults: maximum number of faults in one run.
        kinds: names of the faults that can happen; see `World`.
        notifications: whether notifications are sent; they may be late or lost.
    """

    sequences: int = 2
    layers: int = 2
    chunks: int = 1
    slots: int = 3
    sender_slots: int = 3
    faults: int = 0
    kinds: frozenset[str] = frozenset()
    notifications: bool = True


class Content(NamedTuple):
    """Bytes of a slot: a frame header, and the name of the KV that its payload holds.

    Attributes:
        owner: the sender's key of the sequence.
    """

    header: bytes
    kv: str
    owner: str


EMPTY = Content(b"", "", "")


def kv_name(page: int, layer: int) -> str:
    """Return the name of one page's KV in a layer."""
    return f"page {page}, layer {layer}"


class Violation(Exception):
    """A property of the protocol does not hold."""


class Ignore:
    """Accepts every call: metrics and link policy."""

    def __getattr__(self, name: str) -> "Ignore":
        return self

    def __call__(self, *args: object, **kwargs: object) -> "Ignore":
        return self


IGNORE: Any = Ignore()


@dataclass
class Call:
    """A codec call that runs until it is told to end."""

    finish: Callable[[], Any]
    content: Content = EMPTY
    done: bool = False
    seconds: float = 0.0

    @property
    def prefix(self) -> bytes:
        return self.content.header

    def result(self) -> Any:
        return self.finish()


class Memory:
    """Contents of a slab's slots; a codec encodes into them and decodes from them."""

    def __init__(self, slots: int) -> None:
        self.contents = [EMPTY] * slots

    def encode(self, extent: Extent, segment: codec.EncodeSegment, slab: torch.Tensor) -> Call:
        raise NotImplementedError

    def decode(self, extent: Extent, segment: codec.DecodeSegment) -> Call:
        raise NotImplementedError


@dataclass(frozen=True)
class _Paged:
    """Codec of one page of one layer."""

    memory: Memory
    extent: Extent

    def encode_batch(
        self, segments: Sequence[codec.EncodeSegment], slab: torch.Tensor
    ) -> list[Call]:
        return [self.memory.encode(self.extent, segment, slab) for segment in segments]

    def decode_batch(
        self, segments: Sequence[codec.DecodeSegment], slab: torch.Tensor, *, prefix_bytes: int
    ) -> list[Call]:
        return [self.memory.decode(self.extent, segment) for segment in segments]


class Codecs(SegmentCodecs):
    """Codecs of a cache whose segments each hold one page of one layer."""

    def __init__(self, layers: int, memory: Memory, page_size: int = 1) -> None:
        self.layout = _layout_of(layers, page_size)
        self._first_kv_head = 0
        self._memory = memory

    def is_coded(self, group: int) -> bool:
        return False

    def of(
        self, tensors: Sequence[torch.Tensor], extent: Extent, mode: WireMode = WireMode.RAW
    ) -> codec.PagedCodec:
        return cast(codec.PagedCodec, _Paged(self._memory, extent))

    def max_frame_bytes(
        self, group: int, layers: int, tokens: int, kv_heads: int | None = None
    ) -> int:
        return HEADER_BYTES + layers * pages_for(tokens, self.layout.page_size) * PAYLOAD_BYTES

    def raw_bytes(self, extent: Extent) -> int:
        return PAYLOAD_BYTES

    def escapes(self, extent: Extent, found: int) -> Any:
        return None


@cache
def _layout_of(layers: int, page_size: int) -> CacheLayout:
    plane = Plane("k", torch.bfloat16, (1, page_size, 8))
    return CacheLayout(page_size, 1, ((plane,),) * layers)


@cache
def slab_of(slots: int) -> Slab:
    """Return a slab; all workers share it, because contents are kept in `Memory`."""
    return Slab(slots, SLOT_BYTES)


class Clock:
    """The time of all workers, in seconds. It stands still, except while leases expire."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return 0.0


class Nonces:
    """Nonces of segments, which do not repeat within a prefill worker's epoch or in another."""

    last = 0

    def randbits(self, bits: int) -> int:
        self.last += 1
        return self.last


CLOCK = Clock()
NONCES = Nonces()


@contextmanager
def replaced() -> Iterator[None]:
    """Replace clock and random numbers of the product, and disable its log."""
    with ExitStack() as stack:
        for module in (sender, local_endpoint, pulls, prefill_session):
            stack.enter_context(patch.object(module, "time", CLOCK))
        for module in (sender, announced, prefill_client, prefill_session):
            stack.enter_context(patch.object(module, "log", IGNORE))
        stack.enter_context(patch.object(sender, "secrets", NONCES))
        job = partial(prefill_session.Job, accepted=0.0)  # its default is the time
        stack.enter_context(patch.object(prefill_session, "Job", job))
        yield
