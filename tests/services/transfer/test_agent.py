"""READs between real processes, including peers that are killed, stopped or removed."""

import os
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from services.transfer.agent import TransferAgent
from services.transfer.errors import (
    BadAddress,
    PeerLost,
    PeerRefused,
    ReadTimeout,
    TransferClosed,
    TransferUnavailable,
)
from services.transfer.slab import Slab
from tests.services.transfer.peer import SLOT_BYTES, SLOTS, content
from tests.services.transfer.peer_process import Peer, Reader, start_peer

pytestmark = pytest.mark.slow

# Only over TCP does a stopped peer delay READs: over shared memory the reader copies by itself. On
# a GPU host the agent requires a CUDA transport as well.
TCP = "tcp,self,cuda_copy" if torch.cuda.is_available() else "tcp,self"


@pytest.fixture(scope="module")
def fleet() -> Iterator[dict[str, Peer]]:
    """All peers of this module, started in parallel since imports take most of the time."""
    names = ("main", "lasting", "doomed", "restarted", "deserted")
    peers = {name: start_peer(f"{name}-{os.getpid()}") for name in names}
    try:
        for peer in peers.values():
            peer.wait_until_serving()
        yield peers
    finally:
        for peer in peers.values():
            peer.kill()


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Reader]]:
    """Create readers over given transports, and close them."""
    readers: list[Reader] = []

    def make(*peers: Peer, transports: str | None = TCP) -> Reader:
        if transports:
            monkeypatch.setenv("UCX_TLS", transports)
        else:
            monkeypatch.delenv("UCX_TLS", raising=False)
        readers.append(Reader(*peers))
        return readers[-1]

    yield make
    for reader in readers:
        reader.agent.close(grace_s=0.0)


@pytest.fixture(params=[None, TCP], ids=["default", "tcp"])
def pair(
    request: pytest.FixtureRequest, fleet: dict[str, Peer], connect: Callable[..., Reader]
) -> tuple[Reader, Peer]:
    return connect(fleet["main"], transports=request.param), fleet["main"]


@pytest.mark.few(4)
@pytest.mark.parametrize("length", [1, 17, 4095, 4096, 100_003, SLOT_BYTES])
def test_read_copies_exactly_the_requested_bytes(pair: tuple[Reader, Peer], length: int) -> None:
    reader, peer = pair
    done = reader.read(peer, 3, length).result(10)
    landed = reader.landing.view(3, SLOT_BYTES)
    assert torch.equal(landed[:length], content(3)[:length])
    assert not landed[length:].any()
    assert 0 < done.seconds < 10


def test_sixteen_concurrent_reads_fill_their_slots(pair: tuple[Reader, Peer]) -> None:
    reader, peer = pair
    reads = [reader.read(peer, slot) for slot in range(SLOTS)]
    for slot, read in enumerate(reads):
        read.result(10)
        assert torch.equal(reader.landing.view(slot, SLOT_BYTES), content(slot))


def test_busy_times_of_reads_in_flight_do_not_overlap(
    pair: tuple[Reader, Peer],
) -> None:
    reader, peer = pair
    begun = time.monotonic()
    done = [read.result(10) for read in [reader.read(peer, slot) for slot in range(SLOTS)]]
    elapsed = time.monotonic() - begun
    assert all(0 <= each.busy_s <= each.seconds for each in done)
    assert 0 < sum(each.busy_s for each in done) <= elapsed


def test_invalid_ranges_raise_bad_address(pair: tuple[Reader, Peer]) -> None:
    reader, peer = pair
    end = peer.address + SLOTS * SLOT_BYTES
    landing = reader.landing.view(0, 64)
    for address in (end, end - 63, peer.address - 1, 0, 1 << 63, (1 << 64) - 63, 1 << 70, -1):
        read = reader.agent.read(peer.name, address, 64, landing, deadline_s=1)
        with pytest.raises(BadAddress):
            read.result(30)
    for local in (torch.zeros(64, dtype=torch.uint8), landing[:63], landing.view(torch.int8)):
        read = reader.agent.read(peer.name, peer.address, 64, local, deadline_s=1)
        with pytest.raises(BadAddress):
            read.result(30)
    for odd in ({"kind": "FILE"}, {"device": -1}, {"device": 1 << 40}):
        read = reader.agent.read(peer.name, peer.address, 64, landing, deadline_s=1, **odd)
        with pytest.raises(BadAddress):
            read.result(30)
    assert not reader.landing.view(0, SLOT_BYTES).any()
    reader.read(peer, 0).result(10)


def test_unreachable_or_unknown_peers_are_refused(
    fleet: dict[str, Peer], connect: Callable[..., Reader]
) -> None:
    peer = fleet["main"]
    reader = connect()
    with pytest.raises(PeerLost):
        reader.read(peer, 0).result(30)
    for metadata in (b"", b"junk" * 50, peer.metadata[: len(peer.metadata) // 2]):
        with pytest.raises((PeerRefused, PeerLost)):
            reader.agent.add_peer(peer.name, metadata).result(30)
    with pytest.raises(PeerRefused, match="names"):
        reader.agent.add_peer("another", peer.metadata).result(30)
    reader.add(peer)
    with pytest.raises(PeerRefused, match="already"):
        reader.add(peer)
    reader.read(peer, 0).result(10)


def test_killed_peer_fails_its_reads_at_once_and_no_others(
    fleet: dict[str, Peer], connect: Callable[..., Reader]
) -> None:
    doomed, lasting = fleet["doomed"], fleet["lasting"]
    reader = connect(doomed, lasting)
    reader.read(doomed, 0, 64).result(10)
    doomed.stop()  # so that the READs are in flight when it is killed
    reads = [reader.read(doomed, slot, deadline_s=60) for slot in range(8)]
    time.sleep(0.05)
    assert not any(read.done() for read in reads)
    doomed.kill()
    for read in reads:
        with pytest.raises(PeerLost):
            read.result(30)
    with pytest.raises(PeerLost):
        reader.read(doomed, 0).result(30)
    reader.read(lasting, 9).result(10)
    assert torch.equal(reader.landing.view(9, SLOT_BYTES), content(9))


def test_dead_peer_is_removed_and_its_next_epoch_added(
    fleet: dict[str, Peer], connect: Callable[..., Reader]
) -> None:
    doomed, restarted = fleet["doomed"], fleet["restarted"]
    doomed.kill()
    reader = connect()
    with pytest.raises(PeerLost):
        reader.add(doomed)
    reader.agent.remove_peer(doomed.name).result(30)
    reader.add(restarted)
    reader.read(restarted, 1).result(10)
    assert torch.equal(reader.landing.view(1, SLOT_BYTES), content(1))


def test_read_from_stopped_peer_times_out_and_drains_when_it_resumes(
    fleet: dict[str, Peer], connect: Callable[..., Reader]
) -> None:
    stopped, lasting = fleet["main"], fleet["lasting"]
    reader = connect(stopped, lasting)
    reader.read(stopped, 0, 64).result(10)
    reader.landing.view(0, SLOT_BYTES).zero_()
    stopped.stop()
    try:
        started = time.monotonic()
        read = reader.read(stopped, 0, deadline_s=0.3)
        reader.read(lasting, 1).result(10)
        with pytest.raises(ReadTimeout) as timeout:
            read.result(30)
        assert time.monotonic() - started >= 0.3
        drained = timeout.value.drained
        removal = reader.agent.remove_peer(stopped.name)
        with pytest.raises(PeerLost):
            reader.read(stopped, 2).result(30)
        time.sleep(0.1)
        assert not drained.done()
        assert not removal.done()
        assert not reader.landing.view(0, SLOT_BYTES).any()
    finally:
        stopped.resume()
    drained.result(30)
    removal.result(30)
    assert torch.equal(reader.landing.view(0, SLOT_BYTES), content(0))
    reader.add(stopped)
    reader.read(stopped, 2).result(10)


def test_adding_a_peer_cancels_its_removal(
    fleet: dict[str, Peer], connect: Callable[..., Reader]
) -> None:
    peer = fleet["main"]
    reader = connect(peer)
    reader.read(peer, 0, 64).result(10)
    peer.stop()
    try:
        read = reader.read(peer, 0)
        removal = reader.agent.remove_peer(peer.name)
        reader.add(peer)
        removal.result(30)
        second = reader.read(peer, 1)
    finally:
        peer.resume()
    read.result(10)
    second.result(10)


def test_close_ends_reads_and_nothing_is_written_afterwards(
    fleet: dict[str, Peer], connect: Callable[..., Reader]
) -> None:
    stopped = fleet["deserted"]
    reader = connect(stopped)
    reader.read(stopped, 0, 64).result(10)
    stopped.stop()
    overdue = reader.read(stopped, 0, deadline_s=0.05)
    with pytest.raises(ReadTimeout) as timeout:
        overdue.result(30)
    running = reader.read(stopped, 1)
    removal = reader.agent.remove_peer(stopped.name)
    # This command is processed after the one of the READ, which has then begun.
    reader.agent.add_peer("x", b"").exception(30)
    assert not running.cancel()
    started = time.monotonic()
    reader.agent.close(grace_s=0.2)
    assert 0.2 <= time.monotonic() - started < 5
    with pytest.raises(TransferClosed):
        running.result(0)
    assert timeout.value.drained.done()
    assert removal.done()
    reader.landing.view(0, SLOT_BYTES).zero_()
    reader.landing.view(1, SLOT_BYTES).zero_()
    stopped.resume()
    time.sleep(0.3)
    assert not reader.landing.view(0, SLOT_BYTES).any()
    assert not reader.landing.view(1, SLOT_BYTES).any()


def test_closed_agent_fails_every_call(
    fleet: dict[str, Peer], connect: Callable[..., Reader]
) -> None:
    peer = fleet["main"]
    reader = connect(peer)
    read = reader.read(peer, 0)
    reader.agent.close(grace_s=5.0)
    read.result(0)  # it ended within the grace period
    reader.agent.close()
    for late in (
        reader.read(peer, 0),
        reader.agent.add_peer("x", b""),
        reader.agent.remove_peer("x"),
    ):
        with pytest.raises(TransferClosed):
            late.result(0)
    with pytest.raises(TransferClosed):
        _ = reader.agent.metadata


def test_commands_of_the_owner_thread_run_at_once(connect: Callable[..., Reader]) -> None:
    agent = connect().agent

    def command() -> bool:
        return agent.remove_peer("nobody").done()

    assert agent.run_on_codec_stream(command).result(10)


def test_idle_agent_uses_no_cpu_time(
    fleet: dict[str, Peer], connect: Callable[..., Reader]
) -> None:
    reader = connect(fleet["main"])
    reader.read(fleet["main"], 0).result(10)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


def test_transports_that_cannot_report_a_lost_peer_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "sm,self")
    with pytest.raises(TransferUnavailable):
        TransferAgent("nowhere")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("landing_device", ["cuda", "cpu"])
def test_reads_from_gpu_memory(landing_device: str) -> None:
    peer = start_peer(f"gpu-{os.getpid()}-{landing_device}", "cuda")
    agent = TransferAgent(f"gpu-reader-{os.getpid()}-{landing_device}", "cuda")
    try:
        landing = Slab(SLOTS, SLOT_BYTES, landing_device)
        agent.register(landing)
        peer.wait_until_serving()
        agent.add_peer(peer.name, peer.metadata).result(30)
        reads = [
            agent.read(
                peer.name,
                peer.address + slot * SLOT_BYTES,
                SLOT_BYTES,
                landing.view(slot, SLOT_BYTES),
                kind="VRAM",
                deadline_s=10,
            )
            for slot in range(SLOTS)
        ]
        for slot, read in enumerate(reads):
            read.result(10)
            assert torch.equal(landing.view(slot, SLOT_BYTES).cpu(), content(slot))
    finally:
        agent.close()
        peer.kill()
