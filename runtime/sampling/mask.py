"""Masks of the tokens that grammars allow, on the device of a rank."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from runtime.grammar.masks import MaskWords
from runtime.graphs.host_copy import DeviceCopy
from runtime.sampling.reference import FORBIDDEN

_BITS = 32


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
        self._masks = DeviceCopy((rows, self._words.stop - self._words.start), device)
        # The index of the mask of each row; -1 if all tokens are allowed.
        self._index = DeviceCopy((rows,), device)
        self._bits = torch.arange(_BITS, dtype=torch.int32, device=device)
        self._masked: set[int] = set()  # rows that have a mask

    def allow_all(self, numbers: Iterable[int]) -> None:
        """Allow all tokens in rows."""
        for number in self._masked.intersection(numbers):
            self._masked.remove(number)
            self._index.copied[number] = -1

    def load(self, numbers: Sequence[int], masks: MaskWords) -> None:
        """Set the masks of rows, given those of all token ids, and allow all tokens in other rows.

        Args:
            masks: masks `[len(numbers), words]`.
        """
        count = len(numbers)
        index = self._index.stage()
        index[:] = -1
        index[list(numbers)] = range(count)
        self._index.start(len(index))
        self._masked = set(numbers)
        if count:
            self._masks.stage()[:count] = masks[:, self._words]
            self._masks.start(count)

    def apply(self, logits: Tensor) -> Tensor:
        """Return logits of the first rows, fp32 `[m, own]`, with `FORBIDDEN` where it is masked."""
        index = self._index.copied[: len(logits)]
        if self._kernels:
            from runtime.sampling.gpu import mask_rows  # needs Triton

            return mask_rows(logits, self._masks.copied, index, self._first)
        masks = self._masks.copied[index.clamp(min=0)]
        bits = (masks[:, :, None] >> self._bits) & 1
        allowed = bits.flatten(1)[:, self._first : self._first + logits.shape[1]]
        return logits.masked_fill((allowed == 0) & (index >= 0)[:, None], FORBIDDEN)
