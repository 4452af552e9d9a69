"""One run against one port."""

import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from random import Random

from tests.programs.fuzzing.ports.base import Port
from tests.programs.fuzzing.ports.decode_session import DecodeSessionPort
from tests.programs.fuzzing.ports.gateway_http import GatewayHttpPort
from tests.programs.fuzzing.ports.gateway_rpc import GatewayRpcPort
from tests.programs.fuzzing.ports.prefill_events import FramePort, ManifestPort, NotificationPort
from tests.programs.fuzzing.ports.prefill_session import PrefillSessionPort
from tests.programs.fuzzing.ports.router_http import RouterHttpPort
from tests.programs.fuzzing.ports.worker_steps import WorkerStepsPort
from tests.programs.fuzzing.watch import resident_bytes, watched

ROUNDS = 10  # an ordinary request is checked after each
MAX_GROWTH_BYTES = 64 << 20
"""Maximum growth of the resident memory after the first round."""

PORTS: dict[str, Callable[[], AbstractAsyncContextManager[Port]]] = {
    "gateway-http": GatewayHttpPort.opened,
    "gateway-rpc": GatewayRpcPort.opened,
    "router-http": RouterHttpPort.opened,
    "worker-steps": WorkerStepsPort.opened,
    "decode-session": DecodeSessionPort.opened,
    "prefill-session": PrefillSessionPort.opened,
    "manifests": ManifestPort.opened,
    "notifications": NotificationPort.opened,
    "frames": FramePort.opened,
}


@dataclass
class Report:
    """Result of a run.

    Attributes:
        outcomes: number of messages by outcome.
        growth_bytes: growth of the resident memory after the first round.
        faults: what must not happen, and did.
    """

    port: str
    outcomes: Counter[str]
    seconds: float
    growth_bytes: int
    faults: list[str]

    def __str__(self) -> str:
        outcomes = ", ".join(f"{name} {count}" for name, count in self.outcomes.most_common())
        lines = [
            f"{self.port}: {self.outcomes.total()} messages in {self.seconds:.1f} s, "
            f"{self.growth_bytes / 2**20:+.1f} MiB, {len(self.faults)} faults; {outcomes}"
        ]
        unlike = list({fault[-200:]: fault for fault in self.faults}.values())
        return "\n".join(lines + [f"  {fault}" for fault in unlike[:5]])


async def attack(name: str, messages: int, seed: int) -> Report:
    """Send ``messages`` messages to a port, and check it after each tenth of them."""
    rng = Random(f"{name} {seed}")
    began = time.perf_counter()
    sizes: list[int] = []  # resident bytes after each round
    async with PORTS[name]() as port:
        with watched() as watch:
            try:
                for _ in range(ROUNDS):
                    await port.send(rng, messages // ROUNDS)
                    await port.check()
                    sizes.append(resident_bytes())
            except (AssertionError, TimeoutError):
                watch.faults.append(traceback.format_exc())
            growth = sizes[-1] - sizes[0] if sizes else 0
    if growth > MAX_GROWTH_BYTES:
        watch.faults.append(f"the process has grown by {growth} bytes")
    return Report(name, port.outcomes, time.perf_counter() - began, growth, watch.faults)
