"""Token ids in internal messages."""

import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.token_ids import count_tokens, pack_tokens, unpack_tokens


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids_are_unpacked_as_they_were_packed(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert unpack_tokens(packed) == tuple(tokens)
    assert count_tokens(packed) == len(tokens)
    assert pack_tokens(array("I", tokens)) == pack_tokens(array("Q", tokens)) == packed


@pytest.mark.parametrize("token", [-1, 1 << 32, 1 << 70])
def test_ids_that_do_not_fit_are_refused(token: int) -> None:
    with pytest.raises(struct.error):
        pack_tokens([1, token])


def test_ids_are_little_endian() -> None:
    assert pack_tokens([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"


def test_incomplete_id_is_refused() -> None:
    with pytest.raises(ValueError, match="7 bytes are not a sequence of token ids"):
        unpack_tokens(bytes(7))
