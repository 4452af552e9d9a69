"""Choices of the link policy, computed by hand for few segments and simulated for many.

In the simulation, segments pass encoder, link and decoder in order. Each stage processes one
segment at a time. At most four segments are between encoder and acknowledgement (four credits).
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest

from headrace.v1 import prefill_pb2 as pb
from services.transfer.policy import (
    EXPLORE_EVERY,
    PROBES,
    LinkPolicy,
    ModeSpeed,
    WireMode,
    transfer_seconds,
)

RAW, ZIP = WireMode.RAW, WireMode.SPLITZIP
MB = 1_000_000
SEGMENT = 3 * MB
WINDOW = 4


def timing_of(read_s: float, decode_s: float) -> pb.SegmentTiming:
    return pb.SegmentTiming(read_s=read_s, decode_s=decode_s)


def measured(policy: LinkPolicy, link: float, zip_codec: float, raw_codec: float) -> None:
    """Feed constant measurements of both modes, in bytes per second; SplitZip's ratio is 4/3."""
    for mode, codec, wire in ((RAW, raw_codec, 12), (ZIP, zip_codec, 9)):
        for _ in range(PROBES):
            policy.choose("peer", 12, 1)
            policy.encoded(mode, 12, wire, 12 / codec)
            policy.arrived("peer", mode, 12, wire, timing_of(wire / link, 12 / codec))


def test_transfer_seconds_by_hand() -> None:
    """Stages of 1, 2 and 4 seconds: 7 for one segment, and 4 more for each further one."""
    speed = ModeSpeed(encode=100.0, decode=25.0, ratio=2.0)
    assert transfer_seconds(speed, link=25.0, nbytes=100, segments=1) == pytest.approx(7.0)
    assert transfer_seconds(speed, link=25.0, nbytes=100, segments=5) == pytest.approx(23.0)


@pytest.mark.parametrize("missing", ["encode", "decode", "ratio"])
def test_incomplete_measurement_is_refused(missing: str) -> None:
    speeds = {"encode": 1.0, "decode": 1.0, "ratio": 1.0} | {missing: None}
    with pytest.raises(ValueError, match="incomplete measurement"):
        transfer_seconds(ModeSpeed(**speeds), link=1.0, nbytes=1, segments=1)


@pytest.mark.parametrize(
    ("link", "segments", "expected"),
    [
        (0.1, 1, ZIP),
        (0.1, 100, ZIP),
        (1.0, 1, RAW),
        (1.0, 100, ZIP),
        (10.0, 1, RAW),
        (10, 100, RAW),
    ],
)
def test_compression_pays_for_long_sequences(
    link: float, segments: int, expected: WireMode
) -> None:
    """SplitZip runs at 4 bytes/s in each direction, raw at 100, over a link of 1 byte/s.

    A single byte takes 0.25 + 0.75 + 0.25 = 1.25 s with SplitZip and 1.02 s raw. In a long
    sequence, each byte takes 0.75 s with SplitZip and 1 s raw.
    """
    policy = LinkPolicy()
    measured(policy, link, zip_codec=4.0, raw_codec=100.0)
    assert policy.choose("peer", 12, segments) is expected


def test_new_link_is_probed_in_both_modes() -> None:
    policy = LinkPolicy()
    assert [policy.choose("peer", 12, 9) for _ in range(7)] == [ZIP, ZIP, RAW, RAW, ZIP, ZIP, ZIP]
    assert policy.choose("another", 12, 9) is ZIP


def test_reader_without_timings_gets_splitzip_for_nearly_all_segments() -> None:
    policy = LinkPolicy()
    chosen = []
    for _ in range(10 * EXPLORE_EVERY):
        chosen.append(policy.choose("peer", 12, 9))
        policy.encoded(chosen[-1], 12, 9, 0.1)
    assert chosen.count(RAW) < PROBES + 10


def test_lost_probes_are_sent_again() -> None:
    """The sequences of the probes were cancelled before any acknowledgement."""
    policy = LinkPolicy()
    for _ in range(2 * PROBES):
        policy.choose("peer", 12, 9)
    seconds_of(policy, World(lambda now: 50e9), prompts=3)
    assert policy.links()["peer"].choice is RAW


@pytest.mark.parametrize(
    ("setting", "has_codebooks", "forced"),
    [("auto", False, RAW), ("raw", True, RAW), ("splitzip", True, ZIP)],
)
def test_forced_mode_is_kept_and_measured(
    setting: str, has_codebooks: bool, forced: WireMode
) -> None:
    policy = LinkPolicy.of(setting, has_codebooks=has_codebooks)
    for link in (0.01, 1000.0):
        measured(policy, link, zip_codec=4.0, raw_codec=4.0)
        assert {policy.choose("peer", 12, 9) for _ in range(100)} == {forced}
    assert policy.links()["peer"].choice is forced
    assert policy.links()["peer"].bytes_per_second is not None


def test_raw_counts_as_faster_only_after_a_measurement() -> None:
    policy = LinkPolicy()
    assert [policy.choose("peer", 12, 1) for _ in range(2 * PROBES)][-1] is RAW
    assert not policy.found_raw_faster("peer"), "a probe"
    measured(policy, 1000.0, zip_codec=4.0, raw_codec=100.0)
    assert policy.choose("peer", 12, 1) is RAW
    assert policy.found_raw_faster("peer")
    assert not policy.found_raw_faster("another")


def test_forced_raw_was_not_found_faster() -> None:
    policy = LinkPolicy(RAW)
    measured(policy, 1000.0, zip_codec=4.0, raw_codec=100.0)
    policy.choose("peer", 12, 1)
    assert not policy.found_raw_faster("peer")


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_implausible_timing_is_ignored(seconds: float) -> None:
    policy = LinkPolicy()
    measured(policy, 1.0, zip_codec=4.0, raw_codec=100.0)
    before = policy.links()
    policy.arrived("peer", ZIP, 12, 9, timing_of(seconds, 1.0))
    policy.arrived("peer", ZIP, 12, 9, timing_of(1.0, seconds))
    policy.arrived("peer", ZIP, 12, 9, timing_of(1.0, 0.0))
    assert policy.links() == before


def test_slow_first_segment_is_ignored() -> None:
    policy = LinkPolicy()
    policy.encoded(ZIP, 12, 9, encode_s=60.0)
    policy.encoded(ZIP, 12, 9, encode_s=3.0)
    policy.choose("peer", 12, 1)
    assert policy.links()["peer"].speeds[ZIP].encode == pytest.approx(4.0)


def test_link_speed_of_reads_that_end_in_clusters() -> None:
    """Four READs share the link; all of its busy time is attributed to the first one that ends."""
    policy = LinkPolicy()
    for _ in range(40):
        for read_s in (4.0, 0.0, 0.0, 0.0):
            policy.arrived("peer", ZIP, 12, 9, timing_of(read_s, 0.1))
    assert policy.links()["peer"].bytes_per_second == pytest.approx(9.0, rel=0.1)


def test_forgotten_peer_is_a_new_link() -> None:
    policy = LinkPolicy()
    measured(policy, 100.0, zip_codec=1.0, raw_codec=100.0)
    assert policy.choose("peer", 12, 9) is RAW
    policy.forget("peer")
    policy.forget("peer")
    assert policy.links() == {}
    assert policy.choose("peer", 12, 9) is ZIP


@dataclass
class World:
    """Simulated speeds of the stages, in bytes/s; ``noise`` is the relative measurement error."""

    link: Callable[[float], float]
    encode: dict[WireMode, float] = field(default_factory=lambda: {RAW: 8e9, ZIP: 6e9})
    decode: dict[WireMode, float] = field(default_factory=lambda: {RAW: 8e9, ZIP: 6e9})
    ratio: float = 1.33
    noise: float = 0.0
    now: float = 0.0
    modes: list[WireMode] = field(default_factory=list)
    random: Random = field(default_factory=lambda: Random(0))

    def blur(self, seconds: float) -> float:
        return seconds * self.random.uniform(1 - self.noise, 1 + self.noise)

    def transfer(self, policy: LinkPolicy, segments: int) -> None:
        """Send one sequence and advance ``now``."""
        encoder = link = decoder = self.now
        acknowledgements: deque[tuple[float, WireMode, int, pb.SegmentTiming]] = deque()
        for index in range(segments):
            if len(acknowledgements) == WINDOW:
                encoder = max(encoder, acknowledgements[0][0])
            while acknowledgements and acknowledgements[0][0] <= encoder:
                _, mode, wire, timing = acknowledgements.popleft()
                policy.arrived("peer", mode, SEGMENT, wire, timing)
            mode = policy.choose("peer", SEGMENT, segments - index + len(acknowledgements))
            self.modes.append(mode)
            wire = SEGMENT if mode is RAW else int(SEGMENT / self.ratio)
            encode_s, decode_s = SEGMENT / self.encode[mode], SEGMENT / self.decode[mode]
            encoder += encode_s
            policy.encoded(mode, SEGMENT, wire, self.blur(encode_s))
            read_s = wire / self.link(max(encoder, link))
            link = max(encoder, link) + read_s
            decoder = max(link, decoder) + decode_s
            timing = timing_of(self.blur(read_s), self.blur(decode_s))
            acknowledgements.append((decoder, mode, wire, timing))
        for _, mode, wire, timing in acknowledgements:
            policy.arrived("peer", mode, SEGMENT, wire, timing)
        self.now = decoder


def seconds_of(policy: LinkPolicy, world: World, prompts: int = 30, segments: int = 32) -> float:
    for _ in range(prompts):
        world.transfer(policy, segments)
    return world.now


@pytest.mark.few(30)
@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("link", [12.5e6, 125e6, 1.25e9, 5e9, 12.5e9, 50e9, 500e9])
@pytest.mark.parametrize("zip_speed", [0.4e9, 6e9, 300e9])
@pytest.mark.parametrize("segments", [1, 3, 32])
def test_auto_is_within_a_tenth_of_the_better_mode(
    link: float, noise: float, zip_speed: float, segments: int
) -> None:
    def world() -> World:
        speeds = {RAW: max(8e9, zip_speed), ZIP: zip_speed}
        return World(lambda now: link, dict(speeds), dict(speeds), noise=noise)

    prompts = 3200 // segments  # a cold start does not count: it may take ten slow segments
    forced = [seconds_of(LinkPolicy(mode), world(), prompts, segments) for mode in WireMode]
    assert seconds_of(LinkPolicy(), world(), prompts, segments) <= 1.1 * min(forced)


@pytest.mark.parametrize(("before", "after", "mode"), [(50e9, 12.5e6, ZIP), (12.5e6, 50e9, RAW)])
def test_policy_follows_a_changing_link(before: float, after: float, mode: WireMode) -> None:
    world = World(lambda now: before)
    policy = LinkPolicy()
    seconds_of(world=world, policy=policy)
    assert policy.links()["peer"].choice is mode.other
    world.link = lambda now: after
    seconds_of(world=world, policy=policy, prompts=10)
    assert policy.links()["peer"].choice is mode


def test_policy_switches_from_a_slow_codec_and_back() -> None:
    """The codec's speed is measured only when it is used, so switching back needs exploring."""
    world = World(lambda now: 1e9)
    policy = LinkPolicy()
    seconds_of(world=world, policy=policy)
    assert policy.links()["peer"].choice is ZIP
    world.encode[ZIP] = 0.5e9
    seconds_of(world=world, policy=policy)
    assert policy.links()["peer"].choice is RAW
    world.encode[ZIP] = 6e9
    seconds_of(world=world, policy=policy, prompts=60)
    assert policy.links()["peer"].choice is ZIP


def test_exploring_costs_less_than_a_twentieth() -> None:
    """The other mode may be forty times slower."""
    speeds = {RAW: 8e9, ZIP: 0.2e9}
    world = World(lambda now: 50e9, dict(speeds), dict(speeds))
    reference = World(lambda now: 50e9, dict(speeds), dict(speeds))
    policy = LinkPolicy()
    seconds_of(policy, world, prompts=2)  # the probes
    begun, probed = world.now, len(world.modes)
    seconds_of(policy, world, prompts=300)
    forced = seconds_of(LinkPolicy(RAW), reference, prompts=300)
    assert world.modes[probed:].count(ZIP) > 0
    assert world.now - begun < 1.05 * forced


def test_exploring_is_rare() -> None:
    world = World(lambda now: 12.5e6)
    seconds_of(LinkPolicy(), world, prompts=100)
    assert 1 < world.modes.count(RAW) <= PROBES + len(world.modes) / EXPLORE_EVERY


def test_policy_does_not_oscillate_between_equal_modes() -> None:
    """The slowest stages of both modes are equal, measured with an error of 30 %."""
    world = World(lambda now: 6e9, noise=0.3)
    policy = LinkPolicy()
    choices = []
    for _ in range(200):
        world.transfer(policy, 32)
        choices.append(policy.links()["peer"].choice)
    assert sum(a is not b for a, b in pairwise(choices)) <= 10, "of 6,400 segments"


@pytest.mark.parametrize(("gain", "expected"), [(0.96, ZIP), (0.94, RAW)])
def test_switch_needs_a_gain_of_five_percent(gain: float, expected: WireMode) -> None:
    """SplitZip is the first choice; the link is fast, so only the codec takes time."""
    policy = LinkPolicy()
    measured(policy, link=1e9, zip_codec=1.0, raw_codec=1.0 / gain)
    assert policy.choose("peer", 12, 9) is expected
