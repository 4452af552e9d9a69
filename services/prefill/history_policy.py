"""The choice to read the KV of a prompt's first tokens from a decode worker, or to compute it.

For n tokens of b bytes of KV each, a READ takes

    l + n b / L

seconds, and the computation n / C. The latency l, the speed L of the link in bytes of KV per second
(encode, READ, decode and verification together) and the rate C of this worker in prompt tokens per
second are measured by real transfers and real prefills. The READ is faster from

    n = l / (1 / C - b / L)

tokens on, and never if b / L is at least 1 / C. Short READs do not reach the speed of long ones.
Therefore, only recent READs with at least half of the bytes of the longest one count for L. The
measurements do not predict the speed of much longer READs.

This module is pure bookkeeping: no clock, no socket, no thread. Times are passed in.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

PROBES = 2
"""Number of READs on a new link before its measurements are used. The first has cold caches."""
SWITCH_BELOW = 0.95
"""Hysteresis: if the last history was computed, a READ must take less than this fraction of the
time of computing the tokens."""
EXPLORE_EVERY = 32
"""If READs are predicted to be slower, the history of one in this many prompts is read
nevertheless, because the link may have become faster, and only READs measure it."""
TRUSTED_TIMES = 2
"""A READ that is longer than this multiple of all recent ones is a probe, too."""
WINDOW = 15
"""Number of recent READs in the medians of latency and speed."""
AVOID_S = 30.0
"""Time without READs from a decode worker after one has failed, in seconds."""


def least_tokens(
    *, token_bytes: float, bytes_per_s: float, latency_s: float, tokens_per_s: float
) -> float:
    """Return the number of tokens from which a READ is faster than their computation.

    The formula is in the docstring of the module. The result is infinite if a READ is never faster.

    Args:
        token_bytes: bytes of KV of a token.
        bytes_per_s: speed of the link in bytes of KV.
        latency_s: seconds of a READ that do not depend on its length.
        tokens_per_s: prompt tokens that this worker computes per second.
    """
    gain_s = 1 / tokens_per_s - token_bytes / bytes_per_s
    return latency_s / gain_s if gain_s > 0 else math.inf


@dataclass
class _Link:
    """Measurements of the link to a decode worker.

    Attributes:
        latencies: seconds until the READ of the first segment started, of recent READs.
        transfers: bytes of recent READs, and seconds from then until all KV was verified.
        reads: number of READs that were started.
        computing: whether the last choice was to compute.
        passed: number of prompts that were computed since the last READ.
        avoided_until: time before which nothing is read, after a failure.
    """

    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    transfers: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    reads: int = 0
    computing: bool = False
    passed: int = 0
    avoided_until: float = -math.inf

    @property
    def longest(self) -> int:
        """Bytes of the longest recent READ; 0 if there was none."""
        return max((nbytes for nbytes, _ in self.transfers), default=0)

    @property
    def bytes_per_s(self) -> float:
        """Median speed of the recent READs with at least half of the bytes of the longest."""
        return median(
            nbytes / seconds for nbytes, seconds in self.transfers if 2 * nbytes >= self.longest
        )


class HistoryPolicy:
    """Chooses for each prompt whether its history is read. Not thread-safe.

    A new link is probed with `PROBES` READs, and with each READ that is much longer than the recent
    ones. Without measurements of the link or of this worker's prefills, history is read: it is
    verified, and computed if it does not arrive. After a failure, nothing is read from that worker
    for `AVOID_S`.
    """

    def __init__(self) -> None:
        self._links: dict[str, _Link] = {}

    def least_tokens(
        self, peer: str, tokens: int, *, token_bytes: float, tokens_per_s: float, now: float
    ) -> int | None:
        """Return the minimum number of tokens to read, or None to compute ``tokens``.

        Args:
            peer: id of the decode worker.
            tokens: number of tokens that this worker lacks and the decode worker has.
            token_bytes: bytes of KV of a token.
            tokens_per_s: prompt tokens that this worker computes per second; 0 if not measured.
            now: seconds of a monotonic clock.
        """
        link = self._links.setdefault(peer, _Link())
        if now < link.avoided_until:
            return None
        least = self._least(link, tokens, token_bytes, tokens_per_s)
        if tokens < least:
            link.computing = True
            link.passed += 1
            if link.passed < EXPLORE_EVERY:
                return None
            least = 1.0
        elif link.transfers:
            link.computing = False
        link.passed = 0
        link.reads += 1
        return max(1, math.ceil(least))

    def arrived(self, peer: str, nbytes: int, *, latency_s: float, transfer_s: float) -> None:
        """Record a READ whose KV was verified.

        Args:
            nbytes: bytes of KV.
            latency_s: time until the READ of the first segment started.
            transfer_s: time from then until all KV was verified.
        """
        link = self._links.setdefault(peer, _Link())
        link.latencies.append(max(latency_s, 0.0))
        if transfer_s > 0:
            link.transfers.append((nbytes, transfer_s))

    def failed(self, peer: str, now: float) -> None:
        """Record that a READ failed, other than because the KV was not cached any more."""
        self._links.setdefault(peer, _Link()).avoided_until = now + AVOID_S

    def forget(self, peer: str) -> None:
        """Drop the link to a decode worker that has left. Idempotent."""
        self._links.pop(peer, None)

    def _least(self, link: _Link, tokens: int, token_bytes: float, tokens_per_s: float) -> float:
        """Return the tokens from which a READ is predicted to be faster; 1 for a probe."""
        is_new = link.reads < PROBES or tokens * token_bytes > TRUSTED_TIMES * link.longest
        if is_new or not tokens_per_s:
            return 1.0
        return least_tokens(
            token_bytes=token_bytes,
            bytes_per_s=link.bytes_per_s,
            latency_s=median(link.latencies),
            tokens_per_s=tokens_per_s / (SWITCH_BELOW if link.computing else 1.0),
        )
