"""Inputs of encoders, and ragged batches of them: concatenated, without padding."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
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
        starts: int32 `[s + 1]`, index of each input's first token, then `n`.
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

    @staticmethod
    def of(inputs: Sequence[EncoderInput], device: torch.device | str = "cpu") -> "RaggedBatch":
        """Build a batch of inputs, in their order."""
        lengths = tuple(len(each.tokens) for each in inputs)

        def ints(values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        types = None
        if any(any(each.types) for each in inputs):
            types = ints(
                [kind for each in inputs for kind in each.types or (0,) * len(each.tokens)]
            )
        return RaggedBatch(
            tokens=ints([token for each in inputs for token in each.tokens]),
            types=types,
            positions=ints([position for length in lengths for position in range(length)]),
            starts=ints(list(accumulate(lengths, initial=0)), torch.int32),
            lengths=lengths,
        )
