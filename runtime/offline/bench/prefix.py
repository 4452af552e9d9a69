"""CPU time of the prefix cache: ``python -m runtime.offline.bench prefix --help``.

A prompt passes through the engine's bookkeeping of pages, without a model: it is queued, its cached
prefix is searched, its pages are allocated, recorded chunk by chunk, and released. The figures of a
prompt without a hit are compared with those of an engine without a cache. The floor is the time of
the hashes alone: one BLAKE2b over each page of token ids, and the hash before it.
"""

import argparse
import json
import time
from array import array
from dataclasses import asdict, dataclass
from hashlib import blake2b
from statistics import median

from runtime.core.limits import Limits
from runtime.core.request import Request, SamplingParams
from runtime.core.sequence import Purpose
from runtime.engine.scheduler import Scheduler
from runtime.pages.plan import PAGE_SIZE, PageCount, PagePlan
from runtime.pages.prefix import root_hash

ROUNDS = 21
PLAN = PagePlan(PAGE_SIZE)


@dataclass(frozen=True)
class Figure:
    """Median CPU times of a prompt in milliseconds.

    Attributes:
        cached: whether another request with the same prompt has left its pages.
        admit_ms: search, and allocation or sharing of all pages.
        off_ms: the same without a cache.
        chunks_ms: recording all pages of the prompt, over all of its chunks.
        release_ms: release of all pages.
        searches_ms: submission and admission on a decode worker, after its two other searches: to
            choose who computes the prompt, and to ask for what is missing.
        hash_ms: the hashes of all pages alone.
    """

    tokens: int
    cached: bool
    admit_ms: float
    off_ms: float
    chunks_ms: float
    release_ms: float
    searches_ms: float
    hash_ms: float


@dataclass
class _Times:
    admit: float
    chunks: float
    release: float


def measure(tokens: int, *, cached: bool) -> Figure:
    """Measure a prompt of ``tokens`` tokens."""
    on = [_run(tokens, root_hash("bench"), cached=cached) for _ in range(ROUNDS)]
    off = [_run(tokens, None, cached=False) for _ in range(ROUNDS)]
    searches = [_search(tokens, cached=cached) for _ in range(ROUNDS)]
    hashes = [_hash(tokens) for _ in range(ROUNDS)]
    return Figure(
        tokens,
        cached,
        admit_ms=1e3 * median(each.admit for each in on),
        off_ms=1e3 * median(each.admit for each in off),
        chunks_ms=1e3 * median(each.chunks for each in on),
        release_ms=1e3 * median(each.release for each in on),
        searches_ms=1e3 * median(searches),
        hash_ms=1e3 * median(hashes),
    )


def _run(tokens: int, root: bytes | None, *, cached: bool) -> _Times:
    """Return the times of one prompt, after another one with the same or other tokens."""
    return _serve(_used(tokens, root, cached=cached), _request("r", tokens, 0))


def _search(tokens: int, *, cached: bool) -> float:
    """Return the time of all searches of one prompt, as in `_run`."""
    scheduler = _used(tokens, root_hash("bench"), cached=cached)
    request = _request("r", tokens, 0)
    began = time.thread_time()
    scheduler.uncached_tokens(request)
    scheduler.cached_tokens(request)
    scheduler.submit(request, Purpose.RECEIVE)
    scheduler.plan()
    return time.thread_time() - began


def _used(tokens: int, root: bytes | None, *, cached: bool) -> Scheduler:
    """Return a scheduler that has served a prompt."""
    scheduler = Scheduler(
        Limits(max_running=4, max_waiting=4, step_tokens=1024, chunk_tokens=1024),
        plan=PLAN,
        total=PageCount(3 * PLAN.pages(tokens)),
        context_length=tokens + 64,
        prefix_root=root,
    )
    _serve(scheduler, _request("before", tokens, 0 if cached else 1))
    return scheduler


def _serve(scheduler: Scheduler, request: Request) -> _Times:
    """Compute a prompt, and drop it; return the times."""
    scheduler.submit(request, Purpose.HOLD)
    began = time.thread_time()
    plan = scheduler.plan()
    admit = time.thread_time() - began
    chunks = 0.0
    while plan.chunks:
        sampled = scheduler.step_launched(plan)
        began = time.thread_time()
        scheduler.step_completed(sampled)
        chunks += time.thread_time() - began
        plan = scheduler.plan()
    began = time.thread_time()
    scheduler.drop(request.id)
    return _Times(admit, chunks, time.thread_time() - began)


def _request(name: str, tokens: int, first: int) -> Request:
    return Request(name, tuple(range(first, first + tokens)), tokens, SamplingParams(), 8)


def _hash(tokens: int) -> float:
    pages = [
        array("I", range(first, first + PAGE_SIZE)).tobytes()
        for first in range(0, tokens, PAGE_SIZE)
    ]
    began = time.thread_time()
    found = b"\0" * 32
    for page in pages:
        found = blake2b(found + page, digest_size=32).digest()
    return time.thread_time() - began


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m runtime.offline.bench prefix")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_000, 8_000, 32_000])
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    figures = [measure(n, cached=cached) for n in options.tokens for cached in (False, True)]
    if options.json:
        print(json.dumps([asdict(figure) for figure in figures]))
        return
    print(
        "tokens  cached  admit ms  without cache  chunks ms  release ms  all searches ms  "
        "hashes alone ms"
    )
    for each in figures:
        print(
            f"{each.tokens:6}  {each.cached!s:6}  {each.admit_ms:8.3f}  {each.off_ms:13.3f}  "
            f"{each.chunks_ms:9.3f}  {each.release_ms:10.3f}  {each.searches_ms:15.3f}  "
            f"{each.hash_ms:15.3f}"
        )


if __name__ == "__main__":
    main()
