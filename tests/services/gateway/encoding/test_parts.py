"""The cut of a request into parts."""

import pytest

from services.gateway.encoding.request import cut
from services.tokenizer.encoder import EncoderTokens


def inputs_of(*lengths: int) -> list[EncoderTokens]:
    return [EncoderTokens((1,) * length, bytes(length)) for length in lengths]


def lengths(
    *given: int, dimension: int = 4, tokens: int = 10, size: int = 1 << 20
) -> list[list[int]]:
    parts = list(cut(inputs_of(*given), dimension, max_tokens=tokens, max_bytes=size))
    assert [part.first for part in parts] == [
        sum(len(part.inputs) for part in parts[:at]) for at in range(len(parts))
    ]
    return [[len(each.tokens) for each in part.inputs] for part in parts]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((), []),
        ((5,), [[5]]),
        ((5, 5), [[5, 5]]),
        ((5, 5, 1), [[5, 5], [1]]),
        ((50, 1, 50), [[50], [1], [50]]),
        ((1,) * 25, [[1] * 10, [1] * 10, [1] * 5]),
    ],
)
def test_parts_are_bounded_in_tokens(given: tuple[int, ...], expected: list[list[int]]) -> None:
    assert lengths(*given) == expected


def test_parts_are_bounded_in_bytes_of_the_request_and_of_the_reply() -> None:
    assert lengths(*[4] * 6, tokens=1000, size=120) == [[4, 4]] * 3
    assert lengths(*[1] * 6, tokens=1000, dimension=100, size=900) == [[1, 1]] * 3
