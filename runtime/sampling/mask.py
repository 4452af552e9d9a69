"""Masks of the tokens that grammars allow, on the device of a rank."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from runtime.grammar.masks import MaskWords
from runtime.graphs.host_copy import DeviceCopy
from runtime.sampling.reference import FORBIDDEN

_BITS = 32
_ALL = -1
"""A word that allows all of its tokens."""


class TokenMask:
    """Masks of a fixed number of rows, for the tokens of one rank. Initially all are allowed.

    The words are those of `runtime.grammar.masks.MaskWords` that have a token of this rank.

    Args:
        own: token ids of this rank.
        kernels: whether a Triton kernel applies the masks.
    """

    def __init__(self, rows: int, own: range, device: torch.device, *, kernels: bool) -> None:
        self._words = slice(own.start // _BITS, -(-own.stop // _BITS))
        self._first = own.start % _BITS  # bit of the first token
        self._kernels = kernels
        count = self._words.stop - self._words.start
        self._masks = torch.full((rows, count), _ALL, dtype=torch.int32, device=device)
        # The first column has the numbers of the rows.
        self._copy = DeviceCopy((rows, 1 + count), device)
        self._bits = torch.arange(_BITS, dtype=torch.int32, device=device)
        self._masked: set[int] = set()  # rows whose mask may forbid tokens

    def allow_all(self, numbers: Iterable[int]) -> None:
        """Allow all tokens in rows."""
        for number in self._masked.intersection(numbers):
            self._masked.remove(number)
            self._masks[number] = _ALL

    def load(self, numbers: Sequence[int], masks: MaskWords) -> None:
        """Set the masks of rows, given those of all token ids ``[len(numbers), words]``.

        The token masks of the previous call must have been applied.
        """
        if not numbers:
            return
        staged = self._copy.staged[: len(numbers)]
        staged[:, 0] = numbers
        staged[:, 1:] = masks[:, self._words]
        loaded = self._copy.start(len(numbers))
        self._masks.index_copy_(0, loaded[:, 0].long(), loaded[:, 1:])
        self._masked.update(numbers)

    def apply(self, logits: Tensor) -> Tensor:
        """Return logits of the first rows, fp32 `[m, own]`, with `FORBIDDEN` where it is masked."""
        masks = self._masks[: len(logits)]
        if self._kernels:
            from runtime.sampling.gpu import mask_rows  # needs Triton

            return mask_rows(logits, masks, self._first)
        bits = (masks[:, :, None] >> self._bits) & 1
        allowed = bits.flatten(1)[:, self._first : self._first + logits.shape[1]]
        return logits.masked_fill(allowed == 0, FORBIDDEN)
