"""The choice between raw and SplitZip for each segment, from measurements of each link.

A segment passes three stages, which overlap with those of other segments: while one segment is on
the wire, the sender encodes the next one and the reader decodes the previous one. Each mode has an
encode speed C and a decode speed D, in bytes of KV per second, and a ratio ρ of KV bytes to wire
bytes. The link carries L wire bytes per second. The stages of one byte take

    e = 1 / C        t = 1 / (ρ L)        d = 1 / D

seconds. The first of n segments of b bytes fills the pipeline, so all of them take

    b (e + t + d + (n - 1) max(e, t, d)),

which is the sum of the stages for n = 1; for large n the slowest stage dominates. Raw mode also
has encode and decode stages (gather or scatter, and checksum), with separately measured speeds.

This module is pure bookkeeping: no clock, no socket, no thread. Seconds are passed in, and ages are
counted in segments.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median_high
from typing import Self

from headrace.v1 import prefill_pb2 as pb

LINK_DECAY = 0.95
"""Decay of the link's speed per segment. It is close to 1 because concurrent READs end in
clusters."""
RATIO_DECAY = 0.8
"""Decay of the compression ratio per segment."""
CODEC_WINDOW = 15
"""Number of observations in the median speed of one mode."""
SWITCH_BELOW = 0.95
"""Hysteresis: the policy switches if the other mode takes less than this fraction of the time."""
PROBES = 2
"""Number of segments in each mode on a new link. The first one has cold caches."""
EXPLORE_EVERY = 32
"""Minimum number of segments from one exploration to the next."""
EXPLORE_SHARE = 0.03
"""Maximum share of the time that is spent on exploring."""


class WireMode(StrEnum):
    """Encoding of a segment on the wire."""

    RAW = "raw"
    SPLITZIP = "splitzip"

    @property
    def other(self) -> "WireMode":
        """The other mode: SplitZip for raw, raw for SplitZip."""
        return WireMode.SPLITZIP if self is WireMode.RAW else WireMode.RAW


@dataclass(frozen=True)
class ModeSpeed:
    """Measurements of one mode on one link; None if not measured yet.

    Attributes:
        encode, decode: KV bytes per second.
        ratio: KV bytes per wire byte.
    """

    encode: float | None
    decode: float | None
    ratio: float | None

    @property
    def measured(self) -> bool:
        """Whether all values have been measured."""
        return None not in (self.encode, self.decode, self.ratio)


@dataclass(frozen=True)
class LinkView:
    """State of one link.

    Attributes:
        speeds: measurements of each mode.
        choice: the mode with the smaller predicted time.
        bytes_per_second: wire bytes per second, None before the first segment.
    """

    choice: WireMode
    bytes_per_second: float | None
    speeds: dict[WireMode, ModeSpeed]


@dataclass
class _Rate:
    """Ratio of two exponentially decaying sums."""

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
    """Median of recent codec speeds, which ignores outliers such as interrupted encodes.

    The median of an even number of observations is the faster of the middle two, because the first
    observation of a process may be slow (cold caches).
    """

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
    """Measurements of the link to a peer.

    Attributes:
        since_other: number of segments since the last one that used the other mode.
        allowance_s: extra seconds that the next exploration may take.
    """

    choice: WireMode = WireMode.SPLITZIP
    speed: _Rate = field(default_factory=lambda: _Rate(LINK_DECAY))
    decode: dict[WireMode, _Speed] = field(default_factory=_speeds)
    issued: dict[WireMode, int] = field(default_factory=lambda: dict.fromkeys(WireMode, 0))
    since_other: int = 0
    allowance_s: float = 0.0


def transfer_seconds(speed: ModeSpeed, link: float, nbytes: int, segments: int) -> float:
    """Return the predicted seconds of ``segments`` segments of ``nbytes`` KV bytes each.

    The formula is in the docstring of the module.

    Args:
        speed: complete measurements of a mode.
        link: wire bytes per second.

    Raises:
        ValueError: a speed is missing.
    """
    if speed.encode is None or speed.decode is None or speed.ratio is None:
        raise ValueError(f"incomplete measurement: {speed}")
    stages = (1 / speed.encode, 1 / (speed.ratio * link), 1 / speed.decode)
    return nbytes * (sum(stages) + (segments - 1) * max(stages))


class LinkPolicy:
    """Chooses the mode of each segment on each link. Not thread-safe.

    A new link is probed with `PROBES` segments in each mode. It uses SplitZip until these are
    measured, and the mode with the smaller predicted time afterwards. A change needs a gain of 5 %.
    The link's speed is measured in either mode. The codec's speed in the other mode is measured by
    exploring: one segment in `EXPLORE_EVERY` uses that mode, fewer if exploring would take more
    than `EXPLORE_SHARE` of the time.

    Args:
        forced: always use this mode; measurements are still taken.
    """

    def __init__(self, forced: WireMode | None = None) -> None:
        self._forced = forced
        self._encode = _speeds()
        self._ratio = {mode: _Rate(RATIO_DECAY) for mode in WireMode}
        self._links: dict[str, _Link] = {}

    @classmethod
    def of(cls, setting: str, *, has_codebooks: bool) -> Self:
        """Return the policy for a setting: "auto", "raw" or "splitzip".

        Without codebooks, the mode is always raw.
        """
        if not has_codebooks:
            return cls(WireMode.RAW)
        return cls(None if setting == "auto" else WireMode(setting))

    def choose(self, peer: str, nbytes: int, segments: int) -> WireMode:
        """Return the mode of the next segment.

        Args:
            peer: id of the reader.
            nbytes: KV bytes of the segment.
            segments: segments of the sequence that are not acknowledged, including this one.
        """
        link = self._link(peer)
        mode = self._forced or self._choose(link, nbytes, segments)
        link.issued[mode] += 1
        return mode

    def encoded(self, mode: WireMode, nbytes: int, wire_bytes: int, encode_s: float) -> None:
        """Record an encoded segment: KV bytes, wire bytes, seconds of the codec alone."""
        if encode_s > 0:
            self._encode[mode].add(nbytes, encode_s)
        self._ratio[mode].add(nbytes, wire_bytes)

    def arrived(
        self, peer: str, mode: WireMode, nbytes: int, wire_bytes: int, timing: pb.SegmentTiming
    ) -> None:
        """Record a segment that ``peer`` has decoded.

        Args:
            timing: measurements of the peer. They are ignored if they are absent, and thus 0, or
                not in a plausible range.
        """
        if not (0 <= timing.read_s < 1e6 and 0 < timing.decode_s < 1e6):
            return
        link = self._link(peer)
        link.speed.add(wire_bytes, timing.read_s)
        link.decode[mode].add(nbytes, timing.decode_s)

    def found_raw_faster(self, peer: str) -> bool:
        """Return whether raw is the choice for the link to ``peer`` because it measured faster."""
        link = self._links.get(peer)
        return self._forced is None and link is not None and link.choice is WireMode.RAW

    def forget(self, peer: str) -> None:
        """Drop the link to a peer that has left. Idempotent."""
        self._links.pop(peer, None)

    def links(self) -> dict[str, LinkView]:
        """Return the state of all links, by peer."""
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
        wire = link.speed.value
        speeds = self._speeds(link)
        if wire is None or not all(speed.measured for speed in speeds.values()):
            return self._explore(link, 0.0, 0.0)  # probes may have been cancelled
        seconds = {
            mode: transfer_seconds(speed, wire, nbytes, segments) / segments
            for mode, speed in speeds.items()
        }
        if seconds[link.choice.other] < SWITCH_BELOW * seconds[link.choice]:
            link.choice = link.choice.other
            link.since_other = 0
        # A single segment in the other mode does not overlap with other segments in that mode.
        alone = transfer_seconds(speeds[link.choice.other], wire, nbytes, segments=1)
        return self._explore(link, seconds[link.choice], alone)

    def _explore(self, link: _Link, chosen_s: float, other_s: float) -> WireMode:
        """Return the other mode if exploring is due and affordable, otherwise the chosen mode.

        Args:
            chosen_s, other_s: predicted seconds of the segment in each mode; 0 if unknown.
        """
        link.since_other += 1
        link.allowance_s += EXPLORE_SHARE * chosen_s
        if link.since_other < EXPLORE_EVERY or other_s - chosen_s > link.allowance_s:
            return link.choice
        link.since_other = 0
        link.allowance_s = 0.0
        return link.choice.other
