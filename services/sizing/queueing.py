"""Queueing formulas of `headrace size`, with all times in one unit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean


@dataclass(frozen=True)
class Waiting:
    """Waiting time before service.

    Attributes:
        utilization: share of time in which a server is busy; at 1 or more the queue grows without
            bound.
        probability: probability that a request waits.
        mean: mean waiting time of the requests that wait; infinite if the queue grows without
            bound.
    """

    utilization: float
    probability: float
    mean: float

    def quantile(self, share: float) -> float:
        """Return the waiting time that ``share`` of all requests do not exceed.

        The waiting time of the requests that wait is taken as exponential: exact for M/M/k, and the
        limit of every queue in heavy traffic (Kingman).
        """
        if self.probability <= 1 - share:
            return 0.0
        return math.log(self.probability / (1 - share)) * self.mean


def erlang_c(servers: int, load: float) -> float:
    """Return the probability that a request waits in an M/M/k queue.

    Args:
        servers: number of servers k.
        load: arrival rate times mean service time, in servers; less than ``servers``.
    """
    blocking = 1.0  # Erlang B, by its recursion over the number of servers
    for count in range(1, servers + 1):
        blocking = load * blocking / (count + load * blocking)
    return blocking / (1 - load / servers * (1 - blocking))


def waiting(rate: float, service: Sequence[float], servers: int) -> Waiting:
    """Return the waiting time of an M/G/k queue, by the approximation of Allen and Cunneen.

    The mean is that of M/M/k times (1 + c²) / 2, where c is the coefficient of variation of the
    service times. For one server it is exact (Pollaczek and Khinchine). If requests join the
    shortest of k queues, they wait slightly longer than in one queue for k servers.

    Args:
        rate: arrivals per second.
        service: service times with equal probability.
        servers: number of servers.
    """
    mean = fmean(service)
    utilization = rate * mean / servers
    if utilization >= 1:
        return Waiting(utilization, 1.0, math.inf)
    variation = fmean(time * time for time in service) / mean**2 - 1
    wait = (1 + variation) / 2 * mean / (servers * (1 - utilization))
    return Waiting(utilization, erlang_c(servers, rate * mean), wait)


def poisson_mean(limit: float, share: float) -> float:
    """Return the mean of the Poisson distribution whose ``share`` quantile is ``limit``.

    The number of sequences in decode has a Poisson distribution if requests do not wait (M/G/∞).
    With the normal approximation, m + z √m = limit.
    """
    z = NormalDist().inv_cdf(share)
    return ((math.sqrt(z * z + 4 * limit) - z) / 2) ** 2
