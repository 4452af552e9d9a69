"""Hashes of the beginning of a prompt: equal only for equal tokens and salts, few, and bounded."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.prefix_hashes import (
    BLOCK_TOKENS,
    ENDS,
    LENGTHS,
    MAX_BLOCKS,
    decode_hashes,
    encode_hashes,
    prefix_hashes,
)
from services.common.token_ids import pack_tokens


def hashes_of(tokens: Sequence[int], salt: bytes = b"") -> tuple[bytes, ...]:
    return prefix_hashes(pack_tokens(tokens), salt)


def test_blocks_are_an_eighth_of_what_precedes_them() -> None:
    assert len(ENDS) == len(LENGTHS) == MAX_BLOCKS
    assert ENDS[0] == BLOCK_TOKENS
    assert sum(LENGTHS) == ENDS[-1] > 200_000
    for before, end in pairwise(ENDS):
        assert BLOCK_TOKENS <= end - before <= max(BLOCK_TOKENS, before / 8)


@pytest.mark.parametrize(
    ("tokens", "number"), [(0, 0), (1, 0), (63, 0), (64, 1), (65, 1), (127, 1), (128, 2)]
)
def test_only_whole_blocks_have_a_hash(tokens: int, number: int) -> None:
    assert len(hashes_of(range(tokens))) == number


def test_number_of_hashes_is_bounded() -> None:
    assert len(hashes_of(range(ENDS[-1] + 100_000))) == MAX_BLOCKS


@given(
    length=st.integers(64, 3000), changed=st.integers(0, 2999), token=st.integers(0, (1 << 32) - 1)
)
def test_hash_covers_all_tokens_up_to_the_end_of_its_block(
    length: int, changed: int, token: int
) -> None:
    prompt = list(range(length))
    other = list(prompt)
    if changed < length:
        other[changed] = token
    equal = [
        end for end, a, b in zip(ENDS, hashes_of(prompt), hashes_of(other), strict=False) if a == b
    ]
    assert equal == [end for end in ENDS if end <= length and prompt[:end] == other[:end]], (
        "a hash depends on no token after its block"
    )


def test_prompts_with_different_salts_have_no_hash_in_common() -> None:
    salts = [b"", b"\0", b"a", b"ab", b"b" * 100]
    hashes = [set(hashes_of(range(1000), salt)) for salt in salts]
    assert len(set[bytes]().union(*hashes)) == sum(map(len, hashes))


def test_hashes_are_the_same_in_all_processes() -> None:
    """Gateways of different releases must agree."""
    assert encode_hashes(hashes_of(range(128))) == "a5565e97d8d3e4cee5e531ca507490ae"


@given(st.lists(st.binary(min_size=8, max_size=8), max_size=MAX_BLOCKS))
def test_header_has_the_hashes(hashes: list[bytes]) -> None:
    assert decode_hashes(encode_hashes(hashes)) == tuple(hashes)


def test_header_with_too_many_hashes_is_cut() -> None:
    assert len(decode_hashes("00" * 8 * (MAX_BLOCKS + 9))) == MAX_BLOCKS


@pytest.mark.parametrize("value", ["0", "00", "xx" * 8, "00" * 9, "é" * 16])
def test_malformed_header_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"hex|hashes"):
        decode_hashes(value)
