"""Cached pages: which are found, which are evicted first, and which a prompt needs."""

import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import OutOfPages
from runtime.pages.groups import PageGroup, Part
from runtime.pages.plan import PagePlan
from runtime.pages.pool import PagePool
from runtime.pages.prefix import PageHasher, PageHashes, cached_pages, root_hash
from tests.runtime.pages.plans import compressed_plan, sliding_plan

PAGE = 4
ROOT = root_hash("model")


def hashes_of(tokens: list[int], root: bytes = ROOT) -> list[bytes]:
    hashes = PageHashes(root, PAGE)
    return hashes.of(tokens, range(len(tokens) // PAGE))


def test_a_hash_covers_all_earlier_tokens_and_the_root() -> None:
    tokens = list(range(12))
    alone = hashes_of(tokens)
    assert len(set(alone)) == 3
    assert hashes_of([*tokens[:8], 99, 99, 99, 99])[:2] == alone[:2]
    assert not set(hashes_of([99, *tokens[1:]])) & set(alone)
    assert not set(hashes_of(tokens, root_hash("model", "salt"))) & set(alone)


def test_borders_of_facts_change_the_root() -> None:
    assert len({root_hash("ab", "c"), root_hash("a", "bc"), root_hash("abc"), root_hash()}) == 4


def test_hashes_are_computed_once_and_only_as_far_as_needed() -> None:
    class Tokens(list[int]):
        read = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            found = super().__getitem__(key)
            Tokens.read += len(found)
            return found

    tokens, hashes = Tokens(range(400)), PageHashes(ROOT, PAGE)
    first = hashes.of(tokens, range(8, 10))
    assert Tokens.read == 10 * PAGE
    assert hashes.copy().of(tokens, range(8, 10)) == hashes.of(tokens, range(8, 10)) == first
    assert Tokens.read == 10 * PAGE
    pool = PagePool(4)
    assert cached_pages(PagePlan(PAGE), [pool], hashes.copy(), tokens, received=False) == 0
    found = cached_pages(PagePlan(PAGE), [pool], PageHashes(ROOT, PAGE), tokens, received=False)
    assert (found, Tokens.read) == (0, 11 * PAGE)


@given(
    st.lists(st.lists(st.integers(0, 1), max_size=40), max_size=4), st.sampled_from([b"", b"salt"])
)
def test_hashes_of_recent_prompts_are_those_of_their_tokens(
    recent: list[list[int]], salt: bytes
) -> None:
    hasher = PageHasher(ROOT, PAGE)
    for tokens in recent:
        hashes = hasher.hashes(array("I", tokens), salt)
        pages = range(len(tokens) // PAGE)
        assert hashes.of(tokens, pages) == hashes_of(tokens, root_hash(ROOT, salt))
        hasher.remember(hashes)


def test_pages_of_recent_prompts_are_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hasher, tokens = PageHasher(ROOT, PAGE), array("I", range(41))
    first = hasher.hashes(tokens, b"")
    known = first.of(tokens, range(10))
    hasher.remember(first)
    other = hasher.hashes(tokens, b"salt")
    hashed = count_hashes(monkeypatch)
    again = tokens[:30] + array("I", range(100, 110))  # equal in seven pages
    assert hasher.hashes(again, b"").of(again, range(7)) == known[:7]
    assert len(hashed) == 0
    assert hasher.hashes(again, b"").of(again, range(8))[7] != known[7]
    assert len(hashed) == 1
    other.of(tokens, range(10))
    assert len(hashed) == 1 + 10


def count_hashes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return a list of the pages that are hashed from now on."""
    hashed: list[bytes] = []

    def count(page: bytes = b"", *, digest_size: int) -> Any:
        if page:  # a root is hashed by updates
            hashed.append(page)
        return blake2b(page, digest_size=digest_size)

    monkeypatch.setattr("runtime.pages.prefix.blake2b", count)
    return hashed


def fill(pool: PagePool, tokens: list[int], pages: range, root: bytes = ROOT) -> list[int]:
    """Allocate pages of a sequence, record their content and release them."""
    found = pool.allocate(len(pages))
    for page, index in zip(found, pages, strict=True):
        pool.keep(page, hashes_of(tokens, root)[index])
    pool.release(found)
    return found


def match(plan: PagePlan, pools: list[PagePool], tokens: list[int], *, received: bool) -> int:
    return cached_pages(plan, pools, PageHashes(ROOT, PAGE), tokens, received=received)


def test_one_token_is_always_left() -> None:
    plan, pool = PagePlan(PAGE), PagePool(8)
    fill(pool, list(range(16)), range(4))
    for length, pages in ((3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (16, 3), (17, 4)):
        for received in (False, True):
            tokens = list(range(length))
            assert match(plan, [pool], tokens, received=received) == pages


def test_other_salts_find_nothing() -> None:
    pool = PagePool(8)
    tokens = list(range(16))
    fill(pool, tokens, range(4), root_hash("model", "salt"))
    assert match(PagePlan(PAGE), [pool], tokens, received=False) == 0


def test_a_sliding_window_needs_its_last_pages_alone() -> None:
    """Window of 8 tokens: a prefix of p pages needs the pages from `p - 2`."""
    plan, tokens = sliding_plan(PAGE, 8), list(range(41))
    everything, window = PagePool(10), PagePool(10)
    fill(everything, tokens, range(10))
    for held, pages in ((range(8, 10), 10), (range(3, 6), 6), (range(9, 10), 0), (range(2), 2)):
        window = PagePool(10)
        fill(window, tokens, held)
        assert match(plan, [everything, window], tokens, received=False) == pages
    # A received prompt of 41 tokens needs the pages from (41 - 8) // 4 on.
    fill(window := PagePool(10), tokens, range(8, 9))
    assert match(plan, [everything, window], tokens, received=True) == 9


def test_a_shorter_prefix_is_found_if_one_of_two_windows_lacks_a_page() -> None:
    plan = PagePlan(
        PAGE,
        (PageGroup("a", Part.ENDS, 0, 4), PageGroup("b", Part.ENDS, 0, 8)),
    )
    tokens = list(range(41))
    narrow, wide = PagePool(10), PagePool(10)
    fill(narrow, tokens, range(4, 9))
    fill(wide, tokens, range(3, 7))
    assert match(plan, [narrow, wide], tokens, received=False) == 7
    narrow.forget(next(page for page in range(10) if narrow._hashes[page] == hashes_of(tokens)[6]))
    assert match(plan, [narrow, wide], tokens, received=False) == 6


def test_a_computed_prompt_of_an_encoding_format_needs_all_pages_of_both_groups() -> None:
    plan, tokens = compressed_plan(PAGE, 1, 8), list(range(41))
    exact, encoded = PagePool(10), PagePool(10)
    fill(exact, tokens, range(9))
    fill(encoded, tokens, range(1, 7))
    assert match(plan, [exact, encoded], tokens, received=False) == 7
    # Of a prompt of 33 tokens, pages from (33 - 8) // 4 on are not encoded.
    assert match(plan, [exact, encoded], tokens[:33], received=False) == 8
    exact.forget(0)
    assert match(plan, [exact, encoded], tokens, received=False) == 0


def test_a_received_prompt_of_an_encoding_format_needs_what_would_be_sent() -> None:
    plan, tokens = compressed_plan(PAGE, 1, 8), list(range(41))
    exact, encoded = PagePool(10), PagePool(10)
    fill(exact, tokens, range(1))
    fill(encoded, tokens, range(1, 8))
    assert match(plan, [exact, encoded], tokens, received=True) == 8
    fill(exact, tokens, range(8, 9))
    assert match(plan, [exact, encoded], tokens, received=True) == 9
    assert match(plan, [exact, encoded], tokens, received=False) == 1


@dataclass
class Model:
    """Simple model of a pool, with which the pool is compared.

    Attributes:
        content: content of each page that has some.
        freed: time at which each free page became free.
    """

    total: int
    references: dict[int, int] = field(default_factory=dict)
    content: dict[int, bytes] = field(default_factory=dict)
    freed: dict[int, int] = field(default_factory=dict)
    now: int = 0

    def __post_init__(self) -> None:
        self.freed = {page: page - self.total for page in range(self.total)}

    def allocate(self, count: int) -> list[int]:
        order = sorted(self.freed, key=lambda page: (page in self.content, self.freed[page]))
        for page in order[:count]:
            del self.freed[page]
            self.content.pop(page, None)
            self.references[page] = 1
        return order[:count]

    def share(self, page: int) -> None:
        self.references[page] = self.references.get(page, 0) + 1
        self.freed.pop(page, None)

    def release(self, pages: list[int]) -> None:
        freed = []
        for page in pages:
            self.references[page] -= 1
            if not self.references[page]:
                freed.append(page)
        for page in (page for page in freed if page not in self.content):
            self.freed[page] = self.now = self.now + 1
        for page in reversed(freed):
            if page in self.content:
                self.freed[page] = self.now = self.now + 1

    def keep(self, page: int, content: bytes) -> None:
        if content not in self.content.values():
            self.content[page] = content

    def find(self, content: bytes) -> int | None:
        return next((page for page, known in self.content.items() if known == content), None)

    def forget(self, page: int) -> None:
        if self.content.pop(page, None) and page in self.freed:
            self.freed[page] = self.now = self.now + 1

    @property
    def findable(self) -> dict[bytes, tuple[int, bool]]:
        """The page with each content, and whether it has references."""
        return {
            content: (page, self.references.get(page, 0) > 0)
            for page, content in self.content.items()
        }


def play(pool: PagePool, rng: random.Random, operations: int) -> None:
    """Run random operations on a pool and on the model, and compare them after each."""
    model = Model(pool.total)
    held: list[list[int]] = []
    for _ in range(operations):
        findable, version = model.findable, pool.version
        action = rng.choices("asrkf", (4, 3, 4, 5, 0.3))[0]
        if action == "a":
            count = rng.randint(1, 4)
            if count <= len(model.freed):
                pages = pool.allocate(count)
                assert pages == model.allocate(count)
                held.append(pages)
            else:
                with pytest.raises(OutOfPages):
                    pool.allocate(count)
        elif action == "s":
            chosen = rng.choice([*model.content, *model.references, -1])
            if chosen >= 0 and (model.references.get(chosen) or chosen in model.content):
                pool.share([chosen])
                model.share(chosen)
                held.append([chosen])
        elif action == "r" and held:
            pages = held.pop(rng.randrange(len(held)))
            pool.release(pages)
            model.release(pages)
        elif action == "k" and held:
            page = rng.choice(rng.choice(held))
            content = bytes([rng.randrange(40)])
            if model.content.get(page, content) == content:
                pool.keep(page, content)
                model.keep(page, content)
        elif action == "f":
            page = rng.randrange(pool.total)
            pool.forget(page)
            model.forget(page)
        assert model.findable == findable or pool.version > version
        assert pool.free == len(model.freed)
        assert pool.cached == sum(page in model.content for page in model.freed)
        content = bytes([rng.randrange(40)])
        assert pool.find([content]) == [page for page in (model.find(content),) if page is not None]


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32), pages=st.integers(1, 24))
def test_a_pool_equals_its_model(seed: int, pages: int) -> None:
    """In total 10^5 operations."""
    play(PagePool(pages), random.Random(seed), 1000)


class EvictsLastUsed(PagePool):
    def _evict(self) -> int:
        self._cached.move_to_end(next(reversed(self._cached)), last=False)
        return super()._evict()


class EvictsParentsFirst(PagePool):
    def release(self, pages: Sequence[int]) -> None:
        super().release(pages[::-1])


class FindsEvictedPages(PagePool):
    def _evict(self) -> int:
        page = next(iter(self._cached))
        content = self._hashes[page]
        assert content is not None
        super()._evict()
        self._pages[content] = page
        return page


class AllocatesSharedPages(PagePool):
    def share(self, pages: Iterable[int]) -> None:
        cached = [page for page in pages if page in self._cached]
        super().share(pages)
        self._cached.update(dict.fromkeys(cached))


class ReplacesEqualPages(PagePool):
    def keep(self, page: int, content: bytes) -> None:
        self._pages.pop(content, None)
        super().keep(page, content)


class CountsNoReleases(PagePool):
    def release(self, pages: Sequence[int]) -> None:
        version = self.version
        super().release(pages)
        self.version = version


@pytest.mark.parametrize(
    "pool",
    [
        EvictsLastUsed,
        EvictsParentsFirst,
        FindsEvictedPages,
        AllocatesSharedPages,
        ReplacesEqualPages,
        CountsNoReleases,
    ],
)
def test_the_model_finds_planted_faults(pool: type[PagePool]) -> None:
    with pytest.raises((AssertionError, KeyError, ValueError)):
        play(pool(8), random.Random(0), 20_000)


def test_pages_are_evicted_before_the_pages_that_precede_them() -> None:
    """Sequences with common prefixes end in any order; what is left is always a prefix."""
    rng, pool, plan = random.Random(0), PagePool(20), PagePlan(PAGE)
    for _ in range(300):
        tokens = [rng.randrange(2) for _ in range(PAGE * 6 + 1)]
        hashes = PageHashes(ROOT, PAGE)
        found = cached_pages(plan, [pool], hashes, tokens, received=False)
        table = pool.find(hashes.of(tokens, range(found)))
        pool.share(table)
        table += pool.allocate(6 - found)
        for page, content in zip(table, hashes.of(tokens, range(6)), strict=True):
            pool.keep(page, content)
        pool.release(table)
        assert len(pool._pages) <= pool.total
        present = [bool(pool.find([content])) for content in hashes_of(tokens)]
        assert present == sorted(present, reverse=True)
