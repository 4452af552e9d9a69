"""Compute the numbers of prefill and decode workers for a load, with queueing formulas.

Symbols: λ requests per second, n prompt tokens and g output tokens of a request.

**Prefill.** A prompt of n tokens occupies a worker for S(n) = T(n) - T(0), where T is the measured
time to the first token. The result is the smallest number k of workers that meets two conditions.
The utilization λ E[S] / k does not exceed its limit. The time to the first token, estimated as the
quantile of the wait (M/G/k) plus T of the same quantile of n, meets its target. The sum of both
quantiles is usually above the quantile of the sum, so the estimate is conservative.

**Decode.** With b sequences on a worker, an output token takes the measured time t(b, c), where
c = E[n] + E[g²] / (2 E[g]) is the mean context of a running sequence. b_max is the largest b for
which t meets its target, the KV memory has room for b contexts, and `max_running` is not exceeded.
The mean of b is limited twice: by the utilization times b_max, and by the mean of a Poisson
distribution whose quantile is b_max. By Little's law, a worker completes b / (E[g] t(b, c))
requests per second.

**Shared prefix.** Of each prompt, ``shared_prefix`` tokens are cached on all workers: full pages,
and not the last token. A worker needs S(n) - S(s) for n tokens of which s are cached. A decode
worker holds the shared pages once.

**KV transfers.** The KV of every prompt, without that of cached tokens, moves once: λ E[bytes(n)]
per second, without compression by a codec. Each worker has one link, whose utilization does not
exceed its limit.
"""

import math
from dataclasses import dataclass
from statistics import fmean

from runtime.pages.plan import PAGE_SIZE, PagePlan
from services.common.errors import SettingsError
from services.sizing.lengths import Lengths
from services.sizing.measured import DENSE, Figures
from services.sizing.queueing import poisson_mean, waiting

MAX_WORKERS = 10_000
ROUNDING = 1e-9
_PLAN = PagePlan(PAGE_SIZE)


@dataclass(frozen=True)
class Load:
    """Requests and targets.

    Attributes:
        rate: requests per second.
        prompt: lengths of the prompts.
        answer: lengths of the answers.
        ttft_s: target for the time to the first token, seconds.
        tpot_s: target for the time per output token after the first, seconds.
        share: share of the requests whose first token meets its target, and quantile of the
            number of sequences in decode.
        utilization: upper limit on the mean utilization of workers and links.
        kv_format: how decode workers store KV.
        shared_prefix: tokens with which all prompts start, and whose KV is cached on all workers.
        link_bits_per_s: bandwidth of one worker for KV transfers, in one direction; infinite if
            they are no limit; None if it is unknown, which only figures without KV sizes allow.
    """

    rate: float
    prompt: Lengths
    answer: Lengths
    ttft_s: float
    tpot_s: float
    share: float = 0.95
    utilization: float = 0.75
    kv_format: str = DENSE
    link_bits_per_s: float | None = None
    shared_prefix: int = 0

    def cached(self, tokens: float) -> float:
        """Return how many tokens of a prompt of this length are cached."""
        shared = max(0, min(self.shared_prefix, int(tokens) - 1))
        return _PLAN.filled(range(_PLAN.full(shared)), shared)

    @property
    def context(self) -> float:
        """Mean tokens of a running sequence, averaged over time."""
        return self.prompt.mean + self.answer.mean_square / (2 * self.answer.mean)


@dataclass(frozen=True)
class Prefill:
    """Number of prefill workers, with the expected load and latency.

    Attributes:
        limit: constraint that determines the number: ``ttft``, ``utilization`` or ``link``.
    """

    workers: int
    limit: str
    utilization: float
    mean_wait_s: float
    ttft_s: float


@dataclass(frozen=True)
class Decode:
    """Number of decode workers, with the expected load and latency.

    Attributes:
        limit: constraint that determines the number: ``tpot``, ``kv``, ``max_running`` or ``link``.
        max_sequences: largest number of sequences per worker that all constraints but ``link``
            allow.
        sequences: mean sequences per worker.
        kv_usage: mean share of the KV memory in use; None if the figures have none.
    """

    workers: int
    limit: str
    max_sequences: int
    sequences: float
    tpot_s: float
    kv_usage: float | None


@dataclass(frozen=True)
class Transfers:
    """KV transfers from prefill to decode workers.

    Attributes:
        bits_per_s: mean rate of all workers together.
        prefill_bits_per_s: mean rate of one prefill worker.
        decode_bits_per_s: mean rate of one decode worker.
        prompt_s: mean time in which an otherwise idle link transfers the KV of a prompt.
    """

    bits_per_s: float
    prefill_bits_per_s: float
    decode_bits_per_s: float
    prompt_s: float


@dataclass(frozen=True)
class Plan:
    """Result of `plan`.

    Attributes:
        gateways: gateway processes; None if the figures have none.
        transfers: None if the figures have no KV sizes.
        notes: what limits the accuracy of the plan.
    """

    prefill: Prefill
    decode: Decode
    gateways: int | None
    transfers: Transfers | None
    notes: tuple[str, ...]


def plan(load: Load, figures: Figures) -> Plan:
    """Return the workers that a load needs.

    Raises:
        SettingsError: if no number of workers reaches the targets, or a figure is missing.
    """
    figures.points(load.kv_format)
    links = _links(load, figures)
    prefill = _prefill(load, figures, links)
    decode = _decode(load, figures, links)
    gateways = None
    if figures.gateway_tokens_per_s is not None:
        tokens = load.rate * load.answer.mean
        gateways = math.ceil(tokens / (load.utilization * figures.gateway_tokens_per_s))
    transfers = None
    if figures.kv is not None and load.link_bits_per_s is not None:
        bits = _prompt_bits(load, figures)
        transfers = Transfers(
            load.rate * bits,
            load.rate * bits / prefill.workers,
            load.rate * bits / decode.workers,
            bits / load.link_bits_per_s,
        )
    return Plan(prefill, decode, gateways, transfers, tuple(_notes(load, figures, decode)))


def _prefill(load: Load, figures: Figures, links: int) -> Prefill:
    overhead = figures.overhead_s
    service = [_first_token_s(load, figures, n) - overhead for n in load.prompt.points]
    longest = load.prompt.quantile(load.share)
    alone_s = _first_token_s(load, figures, longest)
    if alone_s > load.ttft_s:
        raise SettingsError(
            f"a prompt of {longest:,.0f} tokens takes {alone_s:.3g} s on an idle worker, the "
            f"target for the first token is {load.ttft_s:g} s"
        )
    limit = "utilization"
    for workers in range(1, MAX_WORKERS + 1):
        found = waiting(load.rate, service, workers)
        if found.utilization > load.utilization:
            continue
        ttft_s = found.quantile(load.share) + alone_s
        if ttft_s > load.ttft_s:
            limit = "ttft"
        elif workers < links:
            limit = "link"
        else:
            return Prefill(
                workers, limit, found.utilization, found.probability * found.mean, ttft_s
            )
    raise _too_many()


def _first_token_s(load: Load, figures: Figures, tokens: float) -> float:
    """Return the time to the first token on an idle worker with the cached prefix, seconds."""
    cached = load.cached(tokens)
    saved_s = figures.first_token_s(cached) - figures.overhead_s if cached else 0.0
    return figures.first_token_s(tokens) - saved_s


def _decode(load: Load, figures: Figures, links: int) -> Decode:
    most, limit = _max_sequences(load, figures)
    mean = min(load.utilization * most, poisson_mean(most, load.share))

    def rate_of(sequences: float) -> float:
        """Requests per second of a worker with a mean number of sequences."""
        return sequences / (
            load.answer.mean * figures.token_s(sequences, load.context, load.kv_format)
        )

    workers = math.ceil(load.rate / rate_of(mean))
    if workers < links:
        workers = links
        limit = "link"
    if workers > MAX_WORKERS:
        raise _too_many()
    low, high = 0.0, mean  # `rate_of` grows with the number of sequences
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rate_of(middle) < load.rate / workers else (low, middle)
    usage = None
    if figures.kv is not None:
        shared = _shared_bytes(load, figures)
        usage = (shared + high * (_sequence_bytes(load, figures) - shared)) / figures.kv.bytes
    tpot_s = figures.token_s(high, load.context, load.kv_format)
    return Decode(workers, limit, most, high, tpot_s, usage)


def _max_sequences(load: Load, figures: Figures) -> tuple[int, str]:
    """Return the maximum sequences of a decode worker, and the name of the limit that applies."""
    limits = {"max_running": figures.max_running}
    if figures.kv is not None:
        shared = _shared_bytes(load, figures)
        own = _sequence_bytes(load, figures) - shared
        limits["kv"] = int((figures.kv.bytes - shared) / own)
        if limits["kv"] < 1:
            raise SettingsError(f"a decode worker has no memory for {load.context:,.0f} tokens")
    fitting = min(limits.values())
    alone_s = figures.token_s(1, load.context, load.kv_format)
    if alone_s > load.tpot_s * (1 + ROUNDING):
        raise SettingsError(
            f"an output token takes {alone_s:.3g} s on an idle worker with KV format "
            f"{load.kv_format}, the target is {load.tpot_s:g} s"
        )
    low, high = 1, fitting + 1  # bisect: `token_s` grows with the number of sequences
    while high - low > 1:
        middle = (low + high) // 2
        token_s = figures.token_s(middle, load.context, load.kv_format)
        is_fast = token_s <= load.tpot_s * (1 + ROUNDING)
        low, high = (middle, high) if is_fast else (low, middle)
    return low, "tpot" if low < fitting else min(limits, key=limits.__getitem__)


def _sequence_bytes(load: Load, figures: Figures) -> float:
    """Bytes of the pages of a running sequence, averaged over time.

    Half a page of each sequence is empty on average.
    """
    assert figures.kv is not None
    return figures.kv.size(load.kv_format, load.context + PAGE_SIZE / 2)


def _shared_bytes(load: Load, figures: Figures) -> float:
    """Bytes of the cached prefix of a prompt of mean length, which a decode worker holds once."""
    assert figures.kv is not None
    return load.cached(load.prompt.mean) * figures.kv.token_bytes(load.kv_format)


def _prompt_bits(load: Load, figures: Figures) -> float:
    """Bits of the KV of a prompt that is transferred, on average."""
    kv = figures.kv
    assert kv is not None
    cached = kv.token_bytes(load.kv_format)
    return 8 * fmean(
        kv.size(load.kv_format, tokens) - load.cached(tokens) * cached
        for tokens in load.prompt.points
    )


def _links(load: Load, figures: Figures) -> int:
    """Return the number of workers of each role that have enough bandwidth for all transfers."""
    if figures.kv is None:
        if load.link_bits_per_s is None or math.isinf(load.link_bits_per_s):
            return 1
        raise SettingsError("--link needs figures that contain KV sizes")
    bits_per_s = load.rate * _prompt_bits(load, figures)
    if load.link_bits_per_s is None:
        measured = figures.kv.link_bits_per_s.items()
        examples = "".join(f"{bits / 1e9:,.4g} over {name}, " for name, bits in measured)
        raise SettingsError(
            f"--link is missing: prompts of this load have {bits_per_s / 1e9:,.3g} Gbit/s of KV. "
            f"Give what one worker can transfer, in Gbit/s ({examples}as measured), or `unlimited`"
        )
    return math.ceil(bits_per_s / (load.utilization * load.link_bits_per_s))


def _notes(load: Load, figures: Figures, decode: Decode) -> list[str]:
    notes = []
    longest = load.prompt.quantile(load.share)
    measured = figures.prefill[-1].tokens
    if longest > measured:
        how = "as a quadratic" if figures.square_s else "linearly, and attention is quadratic"
        notes.append(
            f"prompts of up to {longest:,.0f} tokens are extrapolated from {measured:,}, {how}: "
            "measure at least three lengths, up to the longest one"
        )
    most = figures.points(load.kv_format)[-1].sequences
    if decode.sequences > most:
        notes.append(
            f"decode is extrapolated from {most:g} sequences, the most measured with KV format "
            f"{load.kv_format}"
        )
    if figures.kv is None:
        notes.append("KV transfers are not counted: these figures have no KV sizes")
    return notes


def _too_many() -> SettingsError:
    return SettingsError(f"this load needs more than {MAX_WORKERS:,} workers of a role")
