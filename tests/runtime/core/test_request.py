"""Token ids of requests: their bounds, and the hashes of their pages."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from runtime.core.request import Request, SamplingParams
from runtime.errors import InvalidRequest
from runtime.pages.prefix import PageHasher, PageHashes, root_hash
from tests.runtime.tiny import CONFIG

ROOT = root_hash("model")


def request(*tokens: int, salt: bytes = b"") -> Request:
    return Request("r", tokens, len(tokens), SamplingParams(), 8, salt=salt)


@pytest.mark.parametrize("token", [0, CONFIG.vocab_size - 1])
def test_ids_of_the_vocabulary_are_valid(token: int) -> None:
    request(1, token, 2).validate(CONFIG)


@pytest.mark.parametrize("token", [-1, CONFIG.vocab_size, 1 << 31, 1 << 32, 1 << 70])
def test_other_ids_are_refused(token: int) -> None:
    with pytest.raises(InvalidRequest, match="token ids must be between 0 and"):
        request(1, token, 2).validate(CONFIG)


def test_hashes_belong_to_a_root_a_salt_and_a_page_size() -> None:
    one, hasher = request(*range(40)), PageHasher(ROOT, 16)
    hashes = one.page_hashes(hasher)
    assert one.page_hashes(hasher) is hashes
    expected = PageHashes(root_hash(ROOT, b""), 16).of(one.tokens, range(2))
    assert hashes.of(one.tokens, range(2)) == expected
    others = [
        one.page_hashes(PageHasher(root_hash("other"), 16)),
        replace(one, salt=b"s").page_hashes(hasher),
        one.page_hashes(PageHasher(ROOT, 8)),
    ]
    assert all(other.of(one.tokens, range(2)) != expected for other in others)


def test_threads_that_share_hashes_get_the_same_ones() -> None:
    tokens, hasher = range(16 * 64), PageHasher(ROOT, 16)
    expected = PageHashes(root_hash(ROOT, b""), 16).of(tokens, range(64))
    for _ in range(50):
        one = request(*tokens)
        with ThreadPoolExecutor(4) as pool:
            found = pool.map(
                lambda end, one=one: one.page_hashes(hasher).of(one.tokens, range(end)),
                (64, 3, 17, 40, 64, 1),
            )
            assert all(hashes == expected[: len(hashes)] for hashes in found)
        assert one.page_hashes(hasher).of(one.tokens, range(64)) == expected
