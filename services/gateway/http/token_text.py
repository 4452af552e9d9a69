"""Tokens and log probabilities as they are in responses."""

from collections.abc import Sequence

_MIN_LOGPROB = -9999.0
"""Lowest log probability in a response, in place of minus infinity, which JSON lacks."""


def token_text(pieces: Sequence[bytes], token: int) -> str:
    """Return a token as text, or its escaped bytes if they are not valid UTF-8."""
    piece = pieces[token] if token < len(pieces) else b""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def finite(logprob: float) -> float:
    """Return a log probability that JSON can represent."""
    return max(logprob, _MIN_LOGPROB)
