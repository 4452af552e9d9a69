"""Resources that a deployment without requests must have returned."""

import time
from dataclasses import dataclass
from typing import Self

from tests.harness.deployment import Running


@dataclass(frozen=True)
class Resources:
    """Resources in use or free in a deployment.

    Attributes:
        free: number of free KV pages of each worker.
        used: number of leases, landing slots, running and waiting requests of each process.
    """

    free: dict[str, float]
    used: dict[str, float]

    @classmethod
    def of(cls, running: Running) -> Self:
        """Read the resources of a deployment whose workers are all ready.

        Raises:
            httpx.HTTPError: a process does not answer.
        """
        free, used = (
            {},
            {"gateway requests": running.gateway_metric("headrace_gateway_requests_running")},
        )
        for name in running.workers():
            free[f"{name} pages"] = running.metric(name, "headrace_kv_pages_free")
            used[f"{name} sequences"] = running.metric(
                name, "headrace_num_requests_running"
            ) + running.metric(name, "headrace_num_requests_waiting")
            used[f"{name} leases"] = running.metric(name, "headrace_kv_lease_active")
            used[f"{name} landing slots"] = running.metric(name, "headrace_kv_landing_slots")
        return cls(free, used)

    @classmethod
    def leaked(cls, running: Running, before: "Resources", limit_s: float) -> dict[str, float]:
        """Return what is still missing after ``limit_s`` seconds, or earlier if nothing is."""
        deadline = time.monotonic() + limit_s
        while (missing := cls.of(running).missing(before)) and time.monotonic() < deadline:
            time.sleep(0.5)
        return missing

    def missing(self, before: "Resources") -> dict[str, float]:
        """Return what leaked: resources in use now, and those that were free before."""
        lost = {name: count - self.free.get(name, 0.0) for name, count in before.free.items()}
        return {name: count for name, count in (lost | self.used).items() if count}
