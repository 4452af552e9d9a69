"""Whether a segment travels raw or as SplitZip: decided from measurements, for each link.

A segment passes three stages that overlap with those of other segments: the sender's engine
encodes the next ones while one is on the wire, the reader's engine decodes the last. Each mode has
an encode speed C and a decode speed D, in bytes of KV per second, and a ratio ρ of KV to wire
bytes; the link has L bytes of wire per second. The stages of one byte take

    e = 1 / C        t = 1 / (ρ L)        d = 1 / D

seconds, and n segments of b bytes, the first of which fills the pipeline,

    b (e + t + d + (n - 1) max(e, t, d)),

which is the sequential sum for n = 1 and the slowest stage for many. Raw KV has an encode and a
decode, too (gather or scatter, and checksum), with speeds of its own.

Pure bookkeeping: no clock, no socket, no thread. Seconds are passed in, ages are counted in
segments.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median_high
from typing import Self

LINK_DECAY = 0.95  # of the past at each segment: READs in flight together end in clumps
RATIO_DECAY = 0.8
CODEC_WINDOW = 15  # segments in one mode
SWITCH_BELOW = 0.95  # of the current mode's time: hysteresis
PROBES = 2  # segments in each mode on a new link; the first one pays for cold memory and code
EXPLORE_EVERY = 32  # segments, at least, between two in the mode that is not chosen
EXPLORE_SHARE = 0.03  # of the time of all segments, at most, is lost to exploring


class WireMode(StrEnum):
    """How a segment travels."""

    RAW = "raw"
    SPLITZIP = "splitzip"

    @property
    def other(self) -> "WireMode":
        return WireMode.SPLITZIP if self is WireMode.RAW else WireMode.RAW


@dataclass(frozen=True)
class SegmentTiming:
    """What a reader measured of one segment, seconds.

    Attributes:
        read_s: by how long the link was busy longer for this segment: READs in flight at the same
            time share that time, so their sum is the link's.
        decode_s: of the codec alone, without waiting for the engine.
    """

    read_s: float
    decode_s: float

    @property
    def plausible(self) -> bool:
        """It came from another process: it must be a time, and not one that lasts for ever."""
        return 0 <= self.read_s < 1e6 and 0 < self.decode_s < 1e6


@dataclass(frozen=True)
class ModeSpeed:
    """One mode on one link; None: not measured yet.

    Attributes:
        encode, decode: bytes of KV per second.
        ratio: bytes of KV for each byte of wire.
    """

    encode: float | None
    decode: float | None
    ratio: float | None

    @property
    def measured(self) -> bool:
        return None not in (self.encode, self.decode, self.ratio)


@dataclass(frozen=True)
class LinkView:
    """What is known of one link; ``bytes_per_second`` of wire, None before the first segment."""

    choice: WireMode
    bytes_per_second: float | None
    speeds: dict[WireMode, ModeSpeed]


@dataclass
class _Rate:
    """Amount over seconds (or over another amount), the past decaying with each addition."""

    decay: float
    amount: float = 0.0
    over: float = 0.0

    @property
    def value(self) -> float | None:
        return self.amount / self.over if self.over > 0 else None

    def add(self, amount: float, over: float) -> None:
        self.amount = self.amount * self.decay + amount
        self.over = self.over * self.decay + over


class _Speed:
    """The median of the last observations: a worker's cores have other work, too, and an encode or
    a decode that was interrupted says nothing of the mode. Of two the faster one counts, since the
    first in a process may have run cold."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=CODEC_WINDOW)

    @property
    def value(self) -> float | None:
        return median_high(self._last) if self._last else None

    def add(self, nbytes: int, seconds: float) -> None:
        self._last.append(nbytes / seconds)


def _speeds() -> dict[WireMode, _Speed]:
    return {mode: _Speed() for mode in WireMode}


@dataclass
class _Link:
    choice: WireMode = WireMode.SPLITZIP
    speed: _Rate = field(default_factory=lambda: _Rate(LINK_DECAY))
    decode: dict[WireMode, _Speed] = field(default_factory=_speeds)
    issued: dict[WireMode, int] = field(default_factory=lambda: dict.fromkeys(WireMode, 0))
    since_other: int = 0  # segments since the last one in the mode that is not chosen
    allowance_s: float = 0.0  # what exploring may cost now


def transfer_seconds(speed: ModeSpeed, link: float, nbytes: int, segments: int) -> float:
    """The model of the module's head: seconds of ``segments`` segments of ``nbytes`` of KV each.

    Args:
        speed: measured, all of it.
        link: bytes of wire per second.

    Raises:
        ValueError: a speed is missing.
    """
    if speed.encode is None or speed.decode is None or speed.ratio is None:
        raise ValueError(f"{speed} is not measured")
    stages = (1 / speed.encode, 1 / (speed.ratio * link), 1 / speed.decode)
    return nbytes * (sum(stages) + (segments - 1) * max(stages))


class LinkPolicy:
    """Chooses the mode of each segment on each link. Not thread-safe.

    A new link is probed with `PROBES` segments in each mode; until they have been measured it sends
    SplitZip. From then on the faster mode by the model is chosen, a change needing a gain of 5 %.
    The link's own speed shows in either mode. Of the codec's speed in the mode that is not chosen
    only a segment in that mode tells: one in `EXPLORE_EVERY`, and fewer where that would take more
    than `EXPLORE_SHARE` of all segments' time.

    Args:
        forced: this mode always; what is measured is measured all the same.
    """

    def __init__(self, forced: WireMode | None = None) -> None:
        self._forced = forced
        self._encode = _speeds()
        self._ratio = {mode: _Rate(RATIO_DECAY) for mode in WireMode}
        self._links: dict[str, _Link] = {}

    @classmethod
    def of(cls, setting: str, *, has_codebooks: bool) -> Self:
        """By the setting ``codec``: "auto", "raw" or "splitzip"; without codebooks all is raw."""
        if not has_codebooks:
            return cls(WireMode.RAW)
        return cls(None if setting == "auto" else WireMode(setting))

    def choose(self, peer: str, nbytes: int, segments: int) -> WireMode:
        """The mode of the next segment.

        Args:
            peer: who reads it.
            nbytes: of its KV.
            segments: of its sequence that have not been acknowledged, this one included.
        """
        link = self._link(peer)
        mode = self._forced or self._choose(link, nbytes, segments)
        link.issued[mode] += 1
        return mode

    def encoded(self, mode: WireMode, nbytes: int, wire_bytes: int, encode_s: float) -> None:
        """A segment was encoded: bytes of KV, bytes of wire, seconds of the codec alone."""
        if encode_s > 0:
            self._encode[mode].add(nbytes, encode_s)
        self._ratio[mode].add(nbytes, wire_bytes)

    def arrived(
        self, peer: str, mode: WireMode, nbytes: int, wire_bytes: int, timing: SegmentTiming
    ) -> None:
        """A segment was read and decoded at ``peer``; a timing that cannot be is ignored."""
        if not timing.plausible:
            return
        link = self._link(peer)
        link.speed.add(wire_bytes, timing.read_s)
        link.decode[mode].add(nbytes, timing.decode_s)

    def forget(self, peer: str) -> None:
        """The peer is gone. Idempotent."""
        self._links.pop(peer, None)

    def links(self) -> dict[str, LinkView]:
        """All links, by peer."""
        return {
            peer: LinkView(link.choice, link.speed.value, self._speeds(link))
            for peer, link in self._links.items()
        }

    def _link(self, peer: str) -> _Link:
        if peer not in self._links:
            self._links[peer] = _Link(self._forced or WireMode.SPLITZIP)
        return self._links[peer]

    def _speeds(self, link: _Link) -> dict[WireMode, ModeSpeed]:
        return {
            mode: ModeSpeed(
                self._encode[mode].value, link.decode[mode].value, self._ratio[mode].value
            )
            for mode in WireMode
        }

    def _choose(self, link: _Link, nbytes: int, segments: int) -> WireMode:
        for mode in (link.choice, link.choice.other):
            if link.issued[mode] < PROBES:
                return mode
        wire, speeds = link.speed.value, self._speeds(link)
        if wire is None or not all(speed.measured for speed in speeds.values()):
            return self._await_probes(link)
        seconds = {
            mode: transfer_seconds(speed, wire, nbytes, segments) / segments
            for mode, speed in speeds.items()
        }
        if seconds[link.choice.other] < SWITCH_BELOW * seconds[link.choice]:
            link.choice = link.choice.other
            link.since_other = 0
        # One segment among many of the other mode overlaps with nothing that is as slow.
        alone = transfer_seconds(speeds[link.choice.other], wire, nbytes, segments=1)
        return self._explore(link, seconds[link.choice], alone)

    def _await_probes(self, link: _Link) -> WireMode:
        """They are on their way, unless their sequence was cancelled or the reader is of a version
        that measures nothing: once in a while there is another one."""
        link.since_other += 1
        if link.since_other < EXPLORE_EVERY:
            return link.choice
        link.since_other = 0
        return link.choice.other

    def _explore(self, link: _Link, chosen_s: float, other_s: float) -> WireMode:
        """The chosen mode or, where it is time and can be afforded, the other one."""
        link.since_other += 1
        link.allowance_s += EXPLORE_SHARE * chosen_s
        if link.since_other < EXPLORE_EVERY or other_s - chosen_s > link.allowance_s:
            return link.choice
        link.since_other = 0
        link.allowance_s = 0.0
        return link.choice.other
