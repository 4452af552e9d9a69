"""Inputs of encoders, and ragged batches of them: concatenated, without padding."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class EncoderInput:
    """One text, or the pair of texts of a cross encoder.

    Attributes:
        tokens: token ids, complete with special tokens such as ``[CLS]`` and ``[SEP]``.
        types: token type of each token; empty if all are 0.
    """

    tokens: tuple[int, ...]
    types: tuple[int, ...] = ()


@dataclass(frozen=True)
class RaggedBatch:
    """Ragged input of one pass over `s` inputs with `n` tokens in total.

    Attributes:
        tokens: int64 `[n]`, token ids, grouped by input.
        types: int64 `[n]`, token types; None if all are 0.
        positions: int64 `[n]`, position of each token in its input.
        starts: int32 `[s + 1]`, index of each input's first token, then the index after the last
            token. The first index is 0, unless the batch is a part of another; see `divided`.
        lengths: number of tokens of each input.
    """

    tokens: Tensor
    types: Tensor | None
    positions: Tensor
    starts: Tensor
    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Number of tokens of the longest input."""
        return max(self.lengths, default=0)

    def divided(self, tokens: int) -> "list[RaggedBatch]":
        """Divide into consecutive batches of at most ``tokens`` tokens, or of one input.

        All tensors are views. ``starts`` keep their values.
        """
        parts = in_parts(self.lengths, tokens)
        return [self._part(part) for part in parts] if len(parts) > 1 else [self]

    def _part(self, inputs: slice) -> "RaggedBatch":
        before = sum(self.lengths[: inputs.start])
        lengths = self.lengths[inputs]
        rows = slice(before, before + sum(lengths))
        return RaggedBatch(
            tokens=self.tokens[rows],
            types=None if self.types is None else self.types[rows],
            positions=self.positions[rows],
            starts=self.starts[inputs.start : inputs.stop + 1],
            lengths=lengths,
        )

    @staticmethod
    def of(inputs: Sequence[EncoderInput], device: torch.device | str = "cpu") -> "RaggedBatch":
        """Build a batch of inputs, in their order."""
        lengths = tuple(len(each.tokens) for each in inputs)
        starts = np.zeros(len(inputs) + 1, np.int32)
        np.cumsum(lengths, out=starts[1:])
        total = int(starts[-1])
        types = None
        if any(any(each.types) for each in inputs):
            kinds = (each.types or (0,) * len(each.tokens) for each in inputs)
            types = np.fromiter(chain.from_iterable(kinds), np.int64, total)
        tokens = chain.from_iterable(each.tokens for each in inputs)

        def placed(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).to(device)

        return RaggedBatch(
            tokens=placed(np.fromiter(tokens, np.int64, total)),
            types=None if types is None else placed(types),
            positions=placed(np.arange(total) - np.repeat(starts[:-1], lengths)),
            starts=placed(starts),
            lengths=lengths,
        )


def in_parts(lengths: Sequence[int], most: int) -> list[slice]:
    """Divide inputs into consecutive parts of at most ``most`` tokens, or of one input.

    Args:
        lengths: number of tokens of each input; at least one input.
    """
    parts, first, tokens = [], 0, 0
    for index, length in enumerate(lengths):
        if tokens and tokens + length > most:
            parts.append(slice(first, index))
            first, tokens = index, 0
        tokens += length
    return [*parts, slice(first, len(lengths))]
