"""Peers in processes of their own, and the agents that read from them."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from services.transfer.agent import ReadDone, TransferAgent
from services.transfer.slab import Slab
from tests.services.transfer.peer import SLOT_BYTES, SLOTS


@dataclass
class Peer:
    """Process of a peer."""

    name: str
    process: subprocess.Popen[str]
    metadata: bytes = b""
    address: int = 0

    def wait_until_serving(self) -> None:
        assert self.process.stdout is not None
        hello = json.loads(self.process.stdout.readline())
        self.metadata = bytes.fromhex(hello["metadata"])
        self.address = hello["address"]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)  # all of its threads

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()


def start_peer(name: str, device: str = "cpu") -> Peer:
    """Start a peer that offers every transport, so that its readers choose."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("UCX_TLS", None)
    command = [sys.executable, str(Path(__file__).with_name("peer.py")), name, device]
    pipe = subprocess.PIPE
    return Peer(
        name, subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
    )


class Reader:
    """An agent, its landing slab and its peers."""

    def __init__(self, *peers: Peer) -> None:
        self.agent = TransferAgent(f"reader-{os.getpid()}-{time.monotonic_ns()}")
        self.landing = Slab(SLOTS, SLOT_BYTES)
        self.agent.register(self.landing)
        for peer in peers:
            self.add(peer)

    def add(self, peer: Peer) -> None:
        self.agent.add_peer(peer.name, peer.metadata).result(30)

    def read(
        self, peer: Peer, slot: int, length: int = SLOT_BYTES, *, deadline_s: float = 10.0
    ) -> "Future[ReadDone]":
        return self.agent.read(
            peer.name,
            peer.address + slot * SLOT_BYTES,
            length,
            self.landing.view(slot, length),
            deadline_s=deadline_s,
        )
