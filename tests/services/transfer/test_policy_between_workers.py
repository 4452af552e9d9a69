"""The link policy between real workers, and its metrics."""

import pytest

from headrace.v1 import prefill_pb2 as pb
from tests.services.workers import (
    Decode,
    Prefill,
    Site,
    fetch_of,
    session_with,
    start_of,
    until,
)

TOKENS = 100  # four segments
MODES = ("raw", "splitzip")


def segments(prefill: Prefill) -> dict[str, float]:
    value = prefill.worker.metrics.registry.get_sample_value
    return {mode: value("headrace_kv_segments_total", {"mode": mode}) or 0.0 for mode in MODES}


def link_metrics(prefill: Prefill) -> dict[str, float]:
    """Return the current values of all link metrics, by name and mode."""
    prefill.worker.observe()
    return {
        ".".join([sample.name, sample.labels.get("mode", "")]).rstrip("."): sample.value
        for family in prefill.worker.metrics.registry.collect()
        for sample in family.samples
        if "peer" in sample.labels
    }


async def fetch_twice(prefill: Prefill, decode: Decode) -> None:
    receiver = decode.worker.receiver
    for first_page in (0, 10):
        await receiver.fetch(fetch_of(prefill, TOKENS, first_page))
    # The sender counts a segment after it has notified the reader.
    await until(lambda: sum(segments(prefill).values()) == 8)
    for plane in decode.planes():
        assert plane[:7].any()
        assert plane[:6].equal(plane[10:16]), "KV of the same prompt is equal in both modes"


async def test_auto_probes_both_modes_and_exports_measurements(site: Site) -> None:
    prefill = await site.prefill(codec="auto")
    decode = await site.decode(codec="auto")
    await fetch_twice(prefill, decode)
    assert min(segments(prefill).values()) >= 2, "two probes in each mode"
    shown = link_metrics(prefill)
    assert shown["headrace_kv_link_bytes_per_second"] > 0
    for mode in MODES:
        assert shown[f"headrace_kv_decode_bytes_per_second.{mode}"] > 0
    assert sum(shown[f"headrace_kv_wire_mode.{mode}"] for mode in MODES) == 1
    encode = prefill.worker.metrics.registry.get_sample_value
    for mode in MODES:
        assert (encode("headrace_kv_encode_bytes_per_second", {"mode": mode}) or 0) > 0


@pytest.mark.parametrize("mode", MODES)
async def test_only_the_forced_mode_is_used(site: Site, mode: str) -> None:
    prefill = await site.prefill(codec=mode)
    decode = await site.decode(codec=mode)
    await fetch_twice(prefill, decode)
    assert segments(prefill) == {"raw": 0.0, "splitzip": 0.0} | {mode: 8.0}
    assert link_metrics(prefill)[f"headrace_kv_wire_mode.{mode}"] == 1


async def test_kv_that_is_sent_raw_because_that_is_faster_is_counted(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = await site.prefill(codec="auto")
    decode = await site.decode(codec="auto")
    monkeypatch.setattr(prefill.worker.sender.policy, "found_raw_faster", lambda peer: True)
    await fetch_twice(prefill, decode)
    total = prefill.worker.transfers.total
    assert segments(prefill)["raw"] >= 2, "probes"
    assert 0 < total.faster_raw < total.raw
    assert decode.worker.transfers.total.faster_raw == 0


async def test_acknowledgement_without_timing_frees_the_slot(site: Site) -> None:
    """Earlier versions of the decode worker send no timing."""
    prefill = await site.prefill(codec="auto")
    async with session_with(prefill) as session:
        await session.send(pb.PrefillCommand(start=start_of(20, sequence=1)))
        await session.send(pb.PrefillCommand(credit=pb.Credit(sequence=1, segments=1)))
        while (await session.event()).WhichOneof("event") != "ready":
            pass
        assert prefill.worker.sender.slots_in_use == 1
        await session.send(pb.PrefillCommand(acknowledge=pb.Acknowledge(sequence=1, index=0)))
        await until(lambda: prefill.worker.sender.slots_in_use == 0)
        assert "headrace_kv_link_bytes_per_second" not in link_metrics(prefill)


async def test_labels_of_a_peer_that_left_are_removed(site: Site) -> None:
    prefill = await site.prefill(codec="auto")
    decode = await site.decode(codec="auto")
    await fetch_twice(prefill, decode)
    assert link_metrics(prefill)
    await decode.worker._clients.close()
    await until(lambda: not link_metrics(prefill))
