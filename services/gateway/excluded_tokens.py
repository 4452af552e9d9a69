"""Tokens that are not sampled: bad words, and all but the allowed ones."""

from collections.abc import Callable, Collection, Sequence

from services.common.errors import InvalidRequest
from services.common.messages import MAX_BAD_WORD_TOKENS

_MAX_CHARS = 128
"""Maximum characters of a bad word."""


def bad_word_ids(
    words: Sequence[str], encode: Callable[[str], list[int]]
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word, as vLLM does.

    A word is excluded at the beginning of a text, and after a space if the tokens with the space
    are as many and begin with another token. Other divisions of its text into tokens may still
    occur in an output.

    Args:
        encode: function from a text to its token ids.

    Raises:
        InvalidRequest: a word is empty or too long.
    """
    found: list[tuple[int, ...]] = []
    for at, word in enumerate(words):
        text = word.lstrip()
        if not text or len(text) > _MAX_CHARS:
            raise _invalid(at, f"must have 1 to {_MAX_CHARS} characters, after spaces")
        alone, after_space = tuple(encode(text)), tuple(encode(f" {text}"))
        if not 1 <= len(alone) <= MAX_BAD_WORD_TOKENS:
            raise _invalid(at, f"must have 1 to {MAX_BAD_WORD_TOKENS} tokens, not {len(alone)}")
        found.append(alone)
        if len(after_space) == len(alone) and after_space[0] != alone[0]:
            found.append(after_space)
    return tuple(found)


def check_allowed(
    allowed: Collection[int], *, stops: Collection[int], bad_words: Sequence[Sequence[int]]
) -> None:
    """Check that an allowed token is always left.

    Args:
        allowed: the only tokens that may be sampled; empty for all.
        stops: tokens that are not sampled at the beginning of the output.

    Raises:
        InvalidRequest: there may be none.
    """
    if not allowed:
        return
    if stops and set(allowed) <= set(stops):
        raise InvalidRequest(
            "min_tokens excludes all allowed_token_ids, because they are stop_token_ids",
            param="min_tokens",
        )
    if set(allowed) <= {word[-1] for word in bad_words}:
        raise InvalidRequest(
            "bad_words may exclude all allowed_token_ids: each of these ends a bad word",
            param="bad_words",
        )


def _invalid(at: int, fault: str) -> InvalidRequest:
    param = f"bad_words[{at}]"
    return InvalidRequest(f"{param} {fault}", param=param)
