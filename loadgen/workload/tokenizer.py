"""Tokenizer of the target's model: a local file, or the target's HTTP endpoints."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import orjson
import tokenizers

from loadgen.errors import UsageError
from loadgen.http_client import http_client
from loadgen.workload.base import Tokenizer

_T = TypeVar("_T")
_R = TypeVar("_R")

_CONCURRENCY = 8
"""Maximum concurrent tokenizer calls. Concurrency hides the latency of a remote tokenizer."""


class LocalTokenizer:
    """Tokenizer from a ``tokenizer.json``, given by its path or its folder. Thread-safe.

    Raises:
        UsageError: if the file is missing or invalid.
    """

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise UsageError(f"no tokenizer at {file}")
        try:
            self._backend = tokenizers.Tokenizer.from_file(os.fspath(file))
        except Exception as error:
            raise UsageError(f"{file} is not a valid tokenizer: {error}") from error
        self._backend.no_truncation()
        self._backend.no_padding()

    def encode(self, text: str) -> list[int]:
        """Return token ids, including special tokens."""
        return list(self._backend.encode(text).ids)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of token ids, including special tokens."""
        return self._backend.decode(tokens, skip_special_tokens=False)


class RemoteTokenizer:
    """Tokenizer of a server with the endpoints of vLLM and Headrace. Thread-safe.

    ``POST /tokenize`` maps ``{"prompt": text}`` to ``{"tokens": [id, …]}``, and ``POST
    /detokenize`` maps ``{"tokens": [id, …]}`` to ``{"prompt": text}``.

    Args:
        base: address of the server; a trailing ``/v1`` is removed.
        model: model name, for servers with several; omitted if None.
        headers: headers of each request, such as authorization.
        timeout: seconds per request.
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
        self._client = http_client(headers, timeout_s=timeout)

    def encode(self, text: str) -> list[int]:
        """Return token ids of the text as a prompt.

        Raises:
            UsageError: if the server is unreachable or has no tokenizer endpoint.
        """
        tokens = self._post("/tokenize", {"prompt": text}, "tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise UsageError(f"{self._base}/tokenize did not return a list of token ids")
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """Return the text of token ids. Raises `UsageError` as `encode` does."""
        text = self._post("/detokenize", {"tokens": tokens}, "prompt")
        if not isinstance(text, str):
            raise UsageError(f"{self._base}/detokenize did not return text")
        return text

    def close(self) -> None:
        """Close the connections."""
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

    def _post(self, path: str, body: dict[str, Any], key: str) -> Any:
        url = self._base + path
        try:
            response = self._client.post(url, json=body | self._extra)
            response.raise_for_status()
            return orjson.loads(response.content)[key]
        except httpx.HTTPStatusError as error:
            raise UsageError(
                f"{url} answered {error.response.status_code}, so lengths in tokens are unknown; "
                "give the model's tokenizer.json with --tokenizer"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UsageError(f"cannot reach {url}: {error or type(error).__name__}") from error
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise UsageError(f"{url} returned no {key!r}") from error


@contextmanager
def open_tokenizer(
    file: Path | None, base: str | None, model: str, headers: Mapping[str, str]
) -> Iterator[Tokenizer]:
    """Yield the tokenizer in ``file``, or if None, the tokenizer of the server at ``base``.

    The tokenizer is closed at the end of the block.

    Raises:
        UsageError: if neither is given, or the file is invalid.
    """
    if file is not None:
        yield LocalTokenizer(file)
        return
    if base is None:
        raise UsageError("a gRPC target has no /tokenize: give --tokenizer or --tokenizer-url")
    with RemoteTokenizer(base, model=model, headers=headers) as remote:
        yield remote


def map_concurrently(call: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
    """Apply ``call``, which waits for a tokenizer, to all items, up to `_CONCURRENCY` at a time."""
    with ThreadPoolExecutor(_CONCURRENCY) as pool:
        return list(pool.map(call, items))


def special_tokens(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens that the tokenizer adds before and after each text, such as BOS.

    Raises:
        UsageError: if the tokenizer returns the same tokens for different words.
    """
    first, second = (tokenizer.encode(word) for word in ("the", "on"))
    lead = _common_prefix(first, second)
    trail = _common_prefix(first[len(lead) :][::-1], second[len(lead) :][::-1])
    if len(lead) + len(trail) in (len(first), len(second)):
        raise UsageError(
            "the target's tokenizer cannot encode English words, which prompts consist of"
        )
    return tuple(lead), tuple(trail[::-1])


def _common_prefix(first: list[int], second: list[int]) -> list[int]:
    both = zip(first, second, strict=False)
    length = next((i for i, (a, b) in enumerate(both) if a != b), min(len(first), len(second)))
    return first[:length]
