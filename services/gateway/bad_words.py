"""Bad words: texts that an output must not contain, as sequences of tokens."""

from collections.abc import Callable, Sequence

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


def _invalid(at: int, fault: str) -> InvalidRequest:
    param = f"bad_words[{at}]"
    return InvalidRequest(f"{param} {fault}", param=param)
