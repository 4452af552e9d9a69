"""The target's tokenizer: from a file of its model, or by asking the target."""

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import orjson
import tokenizers

from loadgen.errors import UsageError
from loadgen.workload.base import Tokenizer

_T = TypeVar("_T")
_R = TypeVar("_R")

_AT_ONCE = 8
"""Texts in the tokenizer's hands together, so that a distant one costs few waits."""


class LocalTokenizer:
    """A ``tokenizer.json``, by its path or by its directory's. Safe to use from many threads.

    Raises:
        UsageError: there is no such file, or it is damaged.
    """

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise UsageError(f"there is no tokenizer at {file}")
        try:
            self._backend = tokenizers.Tokenizer.from_file(os.fspath(file))
        except Exception as error:
            raise UsageError(f"{file} is no tokenizer: {error}") from error
        self._backend.no_truncation()
        self._backend.no_padding()

    def encode(self, text: str) -> list[int]:
        """Token ids, those that the model expects around a text included."""
        return list(self._backend.encode(text).ids)

    def decode(self, tokens: list[int]) -> str:
        """The text of token ids, special ones shown."""
        return self._backend.decode(tokens, skip_special_tokens=False)


class RemoteTokenizer:
    """Asks a server, by the endpoints that vLLM and Headrace have. Safe to use from many threads.

    ``POST /tokenize`` takes ``{"prompt": text}`` and gives ``{"tokens": [id, …]}``;
    ``POST /detokenize`` the other way round.

    Args:
        base: the server's address; a ``/v1`` at its end is left out, as the endpoints are beside.
        model: for servers of several; None: theirs.
        headers: of each request, such as an authorization.
        timeout: seconds for each answer.
    """

    def __init__(
        self,
        base: str,
        *,
        model: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60.0,
    ) -> None:
        self._base = base.rstrip("/").removesuffix("/v1")
        self._extra = {} if model is None else {"model": model}
        self._client = httpx.Client(headers=dict(headers or {}), timeout=timeout)

    def encode(self, text: str) -> list[int]:
        """Token ids, as the server counts the text as a prompt.

        Raises:
            UsageError: the server cannot be reached, or has no tokenizer to ask.
        """
        tokens = self._ask("/tokenize", {"prompt": text}, "tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise UsageError(f"{self._base}/tokenize gave something that is no list of token ids")
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """The text of token ids. Raises `UsageError` as `encode` does."""
        text = self._ask("/detokenize", {"tokens": tokens}, "prompt")
        if not isinstance(text, str):
            raise UsageError(f"{self._base}/detokenize gave something that is no text")
        return text

    def close(self) -> None:
        """Lets go of the connections."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self, path: str, body: dict[str, Any], key: str) -> Any:
        url = self._base + path
        try:
            response = self._client.post(url, json=body | self._extra)
            response.raise_for_status()
            return orjson.loads(response.content)[key]
        except httpx.HTTPStatusError as error:
            raise UsageError(
                f"{url} answers {error.response.status_code}, so that lengths in tokens are not "
                "known; name a tokenizer.json of the model instead"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UsageError(f"{url} cannot be asked: {error or type(error).__name__}") from error
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise UsageError(f"{url} gave an answer without {key!r}") from error


def together(ask: Callable[[_T], _R], about: Iterable[_T]) -> list[_R]:
    """What ``ask`` gives for each, several at a time: ``ask`` waits for a tokenizer."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(ask, about))


def special_around(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer puts before each text, and after it: a BOS, say, and nothing.

    Raises:
        UsageError: it does not tell one word from another.
    """
    first, second = (tokenizer.encode(word) for word in ("the", "on"))
    lead = _shared(first, second)
    trail = _shared(first[len(lead) :][::-1], second[len(lead) :][::-1])
    if len(lead) + len(trail) in (len(first), len(second)):
        raise UsageError("the target's tokenizer knows no English words, so no prompts can be made")
    return tuple(lead), tuple(trail[::-1])


def _shared(first: list[int], second: list[int]) -> list[int]:
    both = zip(first, second, strict=False)
    length = next((i for i, (a, b) in enumerate(both) if a != b), min(len(first), len(second)))
    return first[:length]
