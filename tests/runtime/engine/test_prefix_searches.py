"""Cost of searches for cached pages: what is hashed, and when a search is repeated."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import pytest

from runtime.core.limits import Limits
from runtime.core.request import Request, SampledToken, SamplingParams
from runtime.engine import Add, Arrived, Cancel, Engine, Reserve
from runtime.pages.prefix import PageHashes, cached_pages, root_hash
from tests.runtime.engine.fake_executor import PAGE_SIZE as PAGE
from tests.runtime.engine.fake_executor import FakeExecutor
from tests.runtime.tiny import drive

ROOT = root_hash("tiny")


def fake_engine(pages: int = 64) -> Engine:
    """Return an engine with a prefix cache that computes nothing."""
    executor = FakeExecutor(pages, Limits(max_running=16, max_waiting=64, chunk_tokens=32))
    options = replace(executor.shape.options, prefix_root=ROOT)
    executor.shape = replace(executor.shape, options=options)
    return Engine(executor)


def request(name: str, tokens: Sequence[int], max_tokens: int = 8, *, choices: int = 1) -> Request:
    return Request(name, tuple(tokens), len(tokens), SamplingParams(), max_tokens, choices=choices)


def test_a_page_is_hashed_once_on_its_way_through_a_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = fake_engine()
    hashed: list[bytes] = []

    def count(page: bytes = b"", *, digest_size: int) -> object:
        hashed.append(page)
        return blake2b(page, digest_size=digest_size)

    monkeypatch.setattr("runtime.pages.prefix.blake2b", count)
    one = request("one", range(100), choices=2)
    assert engine.scheduler.cached_tokens(one) == 0
    assert engine.scheduler.uncached_tokens(one) is None
    engine.plan([Reserve(one, may_compute=10)])
    engine.plan([Arrived("one", (SampledToken(0, 0, 1), SampledToken(1, 0, 1)))])
    assert engine.scheduler.cached_tokens(request("two", range(100))) == 96
    pages = [page[32:] for page in hashed if len(page) == 32 + 4 * PAGE]
    assert len(pages) == len(set(pages)) == 6  # those of the second request are copied


def test_a_blocked_request_is_searched_again_only_after_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts of 13 and 24 pages, of which 12 are equal, do not fit into 24 pages together."""
    engine = fake_engine(pages=24)
    drive(engine, Add(request("first", range(200), 4)))
    searches = 0

    def count(*arguments: Any, **options: Any) -> int:
        nonlocal searches
        searches += 1
        return cached_pages(*arguments, **options)

    monkeypatch.setattr("runtime.engine.prefixes.cached_pages", count)
    engine.step([Add(request("a", range(200), 60))])
    engine.step([Add(request("b", (*range(200), *range(180)), 4))])
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (1, 1)
    searches = 0
    for _ in range(12):
        engine.step([])
    assert (engine.scheduler.num_waiting, searches) == (1, 0)
    engine.step([Cancel("a")])
    assert (engine.scheduler.num_waiting, searches > 0) == (0, True)


def test_requests_do_not_get_hashes_of_outputs() -> None:
    engine = fake_engine()
    one = request("one", range(20), max_tokens=40)
    drive(engine, Add(one))
    hasher = engine.scheduler.pages.prefixes.hasher
    assert hasher is not None
    hashes = one.page_hashes(hasher)
    other = [*range(20), *range(1000, 1020)]
    assert hashes.of(other, range(2)) == PageHashes(root_hash(ROOT, b""), PAGE).of(other, range(2))
