"""Requests from files: prompts, and Mooncake traces of times and lengths.

A file is read and validated when opened; errors name the file and the line. Prompts are tokenized
or generated lazily. Requests with times are ordered by time, the first at 0. Requests without times
are shuffled by the seed. If the file has more requests than a run, different seeds select different
requests.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from loadgen.errors import UsageError
from loadgen.workload.base import RequestSpec, Text, Tokenizer
from loadgen.workload.lengths import IntArray, Lengths
from loadgen.workload.prefix import salts
from loadgen.workload.prompts import PromptWriter, draft_of, in_blocks
from loadgen.workload.rows import Row, read_lines
from loadgen.workload.tokenizer import map_concurrently


@dataclass(frozen=True, slots=True)
class _Line:
    prompt: Text
    output_tokens: int | None
    at: float | None


@dataclass(frozen=True, slots=True)
class _Request:
    input_tokens: int
    output_tokens: int
    hashes: tuple[int, ...]
    at: float | None


class PromptFile:
    """JSONL with one request per line.

    ``prompt`` is a text or a list of token ids. ``output_tokens`` or ``max_tokens`` is the output
    length. The optional ``timestamp`` is the time in milliseconds.

    Args:
        outputs: distribution of output lengths, for lines without an output length; if None, every
            line must have one.

    Raises:
        UsageError: if the file or a line is invalid.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer, outputs: Lengths | None = None) -> None:
        self._tokenizer = tokenizer
        self._outputs = outputs
        lines = [
            _Line(_prompt(row), self._answer(row), row.seconds("timestamp"))
            for row in read_lines(path)
        ]
        self._lines = _by_time(path, lines)

    def requests(self, seed: int) -> Iterator[RequestSpec]:
        """Yield one request per line."""
        lines = _ordered(self._lines, seed)
        rng = np.random.default_rng(np.random.SeedSequence(seed).spawn(1)[0])
        drawn = [] if self._outputs is None else self._outputs.draw(rng, len(lines)).tolist()
        for block in in_blocks(range(len(lines))):
            counts = map_concurrently(self._count, [lines[i].prompt for i in block])
            for i, tokens in zip(block, counts, strict=True):
                line = lines[i]
                answer = drawn[i] if line.output_tokens is None else line.output_tokens
                yield RequestSpec(line.prompt, tokens, answer, line.at)

    def _answer(self, row: Row) -> int | None:
        key = next((k for k in ("output_tokens", "max_tokens") if k in row.values), None)
        if key is not None:
            return row.integer(key, minimum=1)
        if self._outputs is None:
            raise row.error("has neither output_tokens nor max_tokens")
        return None

    def _count(self, prompt: Text) -> int:
        return len(self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)


class MooncakeTrace:
    """Times, lengths and prefix structure of recorded requests, with generated prompts.

    JSONL with ``timestamp`` (milliseconds), ``input_length``, ``output_length`` (tokens) and
    ``hash_ids``, one per block of the prompt; the last block may be shorter. For one seed, blocks
    with the same id have the same words. Without ``hash_ids`` no prompts share blocks.

    Args:
        block_tokens: tokens per block; 512 in the published traces.
        cold: whether the first words of each prompt are unique, so that no prefix cache holds any
            part of it. Lengths do not change.
        variant: runs of one seed with different variants have different words.

    Raises:
        UsageError: if the file or a line is invalid.
    """

    def __init__(
        self,
        path: Path,
        writer: PromptWriter,
        block_tokens: int = 512,
        *,
        cold: bool = False,
        variant: int = 0,
    ) -> None:
        self._writer = writer
        self._cold, self._variant = cold, variant
        self._block_tokens = block_tokens
        self._requests = _by_time(path, [self._request(row) for row in read_lines(path)])

    def requests(self, seed: int) -> Iterator[RequestSpec]:
        """Yield one request per line."""
        entropy = (seed, self._variant) if self._variant else seed
        own, blocks = np.random.SeedSequence(entropy).spawn(2)
        words, unique = np.random.default_rng(own), salts() if self._cold else None
        for some in in_blocks(_ordered(self._requests, seed)):
            drafts = [
                draft_of(self._writer, self._parts(request, words, blocks), unique)
                for request in some
            ]
            for request, written in zip(some, self._writer.write(drafts), strict=True):
                yield RequestSpec(written.prompt, written.tokens, request.output_tokens, request.at)

    def _request(self, row: Row) -> _Request:
        tokens = row.integer("input_length", minimum=1)
        # Some recorded requests have output length 0, but max_tokens must be at least 1.
        answer = max(1, row.integer("output_length", minimum=0))
        hashes = row.integer_list("hash_ids") if row.values.get("hash_ids") else ()
        if hashes and len(hashes) != -(-tokens // self._block_tokens):
            raise row.error(
                f"{len(hashes)} hash_ids do not match {tokens} tokens in blocks of "
                f"{self._block_tokens}"
            )
        return _Request(tokens, answer, hashes, row.seconds("timestamp"))

    def _parts(
        self, request: _Request, words: np.random.Generator, blocks: np.random.SeedSequence
    ) -> list[IntArray]:
        """Return the words of the blocks of a prompt, or of the whole prompt without hash ids."""
        draw, left = self._writer.vocabulary.draw, request.input_tokens
        if not request.hashes:
            return [draw(words, left)]
        parts = []
        for hash_id in request.hashes:
            own = np.random.SeedSequence(blocks.entropy, spawn_key=(*blocks.spawn_key, hash_id))
            parts.append(draw(np.random.default_rng(own), self._block_tokens)[:left])
            left -= len(parts[-1])
        return parts


_R = TypeVar("_R", _Line, _Request)


def _by_time(path: Path, rows: list[_R]) -> list[_R]:
    """Return the rows sorted by time, with the first time shifted to 0.

    Rows are returned unchanged if none has a time.
    """
    times = [row.at for row in rows if row.at is not None]
    if not rows:
        raise UsageError(f"{path}: no requests")
    if not times:
        return rows
    if len(times) < len(rows):
        raise UsageError(f"{path}: only some requests have a timestamp")
    first = min(times)
    timed = [replace(row, at=at - first) for row, at in zip(rows, times, strict=True)]
    return sorted(timed, key=lambda row: row.at or 0.0)


def _ordered(rows: list[_R], seed: int) -> list[_R]:
    if rows[0].at is not None:
        return rows
    return [rows[i] for i in np.random.default_rng(seed).permutation(len(rows)).tolist()]


def _prompt(row: Row) -> Text:
    prompt = row.values.get("prompt")
    if isinstance(prompt, list):
        return row.integer_list("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise row.error("prompt is neither text nor a list of token ids")
    return prompt
