"""Benchmark: READs between two processes on one machine, compared with memcpy.

    OMP_NUM_THREADS=1 python -m services.transfer.bench [--transports tcp,self] [--device cuda]
    PREFILL_GPU=0 CUDA_VISIBLE_DEVICES=1 python -m services.transfer.bench --best

Latency is measured with one READ at a time, from the call to the result. Bandwidth is measured with
16 READs in flight. The memcpy copies between two buffers of one process, on one thread, over the
same 16 slots, so that caches help both equally.

With ``--best``, only the highest rate between two GPUs is printed, in bytes per second, over READs
of 16 MiB to 1 GiB, one to eight at a time. ``PREFILL_GPU`` is the number of the peer's GPU.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from services.common.interpreter import python_command
from services.common.logging import configure_logging
from services.transfer.agent import ReadDone, TransferAgent
from services.transfer.slab import Slab

SLOTS = 16
SLOT_BYTES = 4 << 20
LENGTHS = (4 << 10, 256 << 10, 4 << 20)
BEST_LENGTHS = tuple(1 << power for power in range(24, 31, 2))
BEST_BYTES = 2 << 30
"""Bytes of the slab, which are also the maximum bytes in flight."""
SERVE = "--serve"
DEVICE_OF = {"DRAM": "cpu", "VRAM": "cuda"}


@dataclass(frozen=True)
class Row:
    """Measurements for one READ length: latencies in seconds, bandwidths in bytes per second."""

    length: int
    latency: float
    latency_p99: float
    bandwidth: float
    memcpy_latency: float
    memcpy_bandwidth: float

    def __str__(self) -> str:
        return (
            f"{self.length >> 10:>6} KiB  {self.latency * 1e6:>8.0f} us  "
            f"{self.latency_p99 * 1e6:>8.0f} us  {self.memcpy_latency * 1e6:>8.1f} us  "
            f"{self.bandwidth / 1e9:>7.2f} GB/s  {self.memcpy_bandwidth / 1e9:>7.2f} GB/s  "
            f"{self.bandwidth / self.memcpy_bandwidth:>6.2f}"
        )


HEADER = "    length         p50          p99       memcpy        16 at once         memcpy   ratio"


def serve(device: str, slots: int, slot_bytes: int) -> None:
    """Register a slab and print its address; let peers read it until stdin closes."""
    agent = TransferAgent(f"bench-peer-{os.getpid()}", device)
    slab = Slab(slots, slot_bytes, device)
    agent.register(slab)
    print(agent.name, agent.metadata.hex(), slab.address, flush=True)
    sys.stdin.read()
    agent.close()


def rounds_of(length: int) -> int:
    """Return how often to time a READ of ``length`` bytes: about a second, enough for a p99."""
    return max(200, min(2000, (64 << 20) // length))


def timed(call: Callable[[int], None], rounds: int) -> list[float]:
    """Time ``rounds`` calls after ``rounds / 10`` warm-up calls; return the sorted seconds."""
    seconds = []
    for i in range(-rounds // 10, rounds):
        start = time.perf_counter()
        call(i % SLOTS)
        if i >= 0:
            seconds.append(time.perf_counter() - start)
    return sorted(seconds)


def measure(agent: TransferAgent, peer: str, address: int, landing: Slab, length: int) -> Row:
    source = Slab(SLOTS, SLOT_BYTES, DEVICE_OF[landing.memory_kind])

    def start(slot: int) -> "Future[ReadDone]":
        remote = address + slot * SLOT_BYTES
        local = landing.view(slot, length)
        kind = landing.memory_kind
        return agent.read(peer, remote, length, local, kind=kind, deadline_s=60)

    def read(slot: int) -> None:
        start(slot).result()

    def read_all(_: int) -> None:
        for done in [start(slot) for slot in range(SLOTS)]:
            done.result()

    def copy(slot: int) -> None:
        landing.view(slot, length).copy_(source.view(slot, length))
        if landing.memory_kind == "VRAM":
            torch.cuda.synchronize()

    for slot in range(SLOTS):
        source.view(slot, SLOT_BYTES).fill_(2)
    rounds = rounds_of(length)
    latencies = timed(read, rounds)
    batches = timed(read_all, max(20, rounds // SLOTS))
    copies = timed(copy, rounds)
    return Row(
        length,
        latency=statistics.median(latencies),
        latency_p99=latencies[int(0.99 * len(latencies))],
        bandwidth=SLOTS * length / statistics.median(batches),
        memcpy_latency=statistics.median(copies),
        memcpy_bandwidth=length / statistics.median(copies),
    )


def best_rate(agent: TransferAgent, peer: str, address: int, landing: Slab) -> float:
    """Return the highest rate of READs in bytes per second."""
    best = 0.0
    for length in BEST_LENGTHS:
        for count in (1, 2, 4, 8):
            if length * count > BEST_BYTES or (length * count > 2 * best > 0 and best < 10e9):
                continue  # it does not fit, or takes more than two seconds on a slow link
            starts = [number * length for number in range(count)]
            whole = landing.view(0, landing.nbytes)
            for _ in range(5):
                begun = time.perf_counter()
                reads = [
                    agent.read(
                        peer, address + start, length, whole[start : start + length],
                        kind="VRAM", deadline_s=60,
                    )
                    for start in starts
                ]  # fmt: skip
                for read in reads:
                    read.result()
                best = max(best, length * count / (time.perf_counter() - begun))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--transports", help="UCX_TLS of both processes; default: UCX chooses")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device of both slabs"
    )
    parser.add_argument("--best", action="store_true", help="print the best rate of GPU READs")
    parser.add_argument(SERVE, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    configure_logging("bench", level="warning")
    torch.set_num_threads(1)
    slots, slot_bytes = (1, BEST_BYTES) if arguments.best else (SLOTS, SLOT_BYTES)
    device = "cuda" if arguments.best else arguments.device
    if arguments.serve:
        serve(device, slots, slot_bytes)
        return
    if arguments.transports:
        os.environ["UCX_TLS"] = arguments.transports
    command = python_command("-m", "services.transfer.bench", SERVE, *sys.argv[1:])
    environment = dict(os.environ)
    if "PREFILL_GPU" in environment:
        environment["CUDA_VISIBLE_DEVICES"] = environment["PREFILL_GPU"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        if process.stdout is None:
            raise RuntimeError("the peer has no stdout")
        peer, metadata, address = process.stdout.readline().split()
        agent = TransferAgent(f"bench-{os.getpid()}", device)
        landing = Slab(slots, slot_bytes, device)
        agent.register(landing)
        agent.add_peer(peer, bytes.fromhex(metadata)).result()
        if arguments.best:
            print(best_rate(agent, peer, int(address), landing))
        else:
            transports = os.environ.get("UCX_TLS", "unset")
            print(f"UCX_TLS {transports}, {os.cpu_count()} cores, {device}")
            print(HEADER)
            for length in LENGTHS:
                print(measure(agent, peer, int(address), landing, length), flush=True)
        agent.close()
        process.communicate()


if __name__ == "__main__":
    main()
