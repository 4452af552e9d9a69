"""Log probabilities of prompt tokens, computed by the passes that prefill them.

A pass logs the hidden states of the positions in `Chunk.scored`. Their logits are then computed in
blocks of bounded size, and each block is reduced on the device to the values that are reported.
Logits of a whole prompt never exist at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.attention.base import HiddenLog
from runtime.core.plan import Chunk
from runtime.core.request import PromptLogprobs
from runtime.graphs.host_copy import to_device
from runtime.models.model import Model
from runtime.sampling.reductions import RankReductions, Reductions

_MAX_ROWS = 256
"""Maximum number of positions in a block."""
_MAX_LOGITS = 1 << 23
"""Maximum number of logits in a block of one rank: 32 MiB in fp32. With temporary tensors, a block
needs about four times as much memory."""


@dataclass(frozen=True)
class ScoredChunk:
    """Log probabilities of the tokens that follow some positions of a chunk.

    Attributes:
        first: position of the first of these tokens.
        top: number of most probable tokens to report.
        values: fp64 `[n, 2 + 2 * width]` on the host: the log probability and the rank of each
            token, the ids of the ``width`` most probable tokens, and their log probabilities.
    """

    first: int
    top: int
    values: Tensor

    def read(self) -> PromptLogprobs:
        """Return the values. Call it after the step has been read."""
        width, top = (self.values.shape[1] - 2) // 2, self.top
        ids, logprobs = self.values[:, 2 : 2 + top], self.values[:, 2 + width : 2 + width + top]
        return PromptLogprobs(
            self.first,
            top,
            logprobs=tuple(self.values[:, 0].tolist()),
            ranks=tuple(self.values[:, 1].long().tolist()),
            top_tokens=tuple(ids.flatten().long().tolist()),
            top_logprobs=tuple(logprobs.flatten().tolist()),
        )


class PromptScorer:
    """Computes log probabilities of prompt tokens. All ranks of a worker must call it alike.

    Args:
        block_rows: maximum number of positions in a block.
    """

    def __init__(self, model: Model, block_rows: int = _MAX_ROWS) -> None:
        self._model = model
        vocabulary = model.vocabulary
        self._reductions = RankReductions(vocabulary) if vocabulary.divided else Reductions()
        self._rows = max(1, min(block_rows, _MAX_LOGITS // vocabulary.widest))

    def log(self, chunks: Sequence[Chunk]) -> HiddenLog | None:
        """Return a log for a pass whose first tokens are those of ``chunks``; None for no log."""
        rows: list[int] = []
        start = 0
        for chunk in chunks:
            rows += range(
                start + chunk.scored.start - chunk.first, start + chunk.scored.stop - chunk.first
            )[: len(chunk.scored)]
            start += chunk.count
        if not rows:
            return None
        return HiddenLog(to_device(np.array(rows, np.int64), self._model.device))

    def score(self, chunks: Sequence[Chunk], log: HiddenLog | None) -> tuple[ScoredChunk, ...]:
        """Launch the computation and the copy to the host, in stream order.

        Args:
            log: result of `log`, which the pass has filled.

        Returns:
            One item for each chunk with scored positions.
        """
        if log is None:
            return ()
        scored = [chunk for chunk in chunks if chunk.scored]
        followed = [
            chunk.group.tokens[position + 1] for chunk in scored for position in chunk.scored
        ]
        tops = [chunk.group.request.sampling.prompt_logprobs or 0 for chunk in scored]
        tokens = to_device(np.array(followed, np.int64), self._model.device)
        (hidden,) = log.hidden
        values = torch.cat(list(self._blocks(hidden, tokens, max(tops))))
        on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        on_host.copy_(values, non_blocking=True)
        parts = torch.split(on_host, [len(chunk.scored) for chunk in scored])
        return tuple(
            ScoredChunk(chunk.scored.start + 1, top, part)
            for chunk, top, part in zip(scored, tops, parts, strict=True)
        )

    def _blocks(self, hidden: Tensor, tokens: Tensor, top: int) -> Iterator[Tensor]:
        """Yield the rows of `ScoredChunk.values` for blocks of hidden states `[n, hidden]`."""
        blocks = zip(torch.split(hidden, self._rows), torch.split(tokens, self._rows), strict=True)
        for states, following in blocks:
            logits = self._model.lm_head(states).float()
            chosen, most, ids = self._reductions.logprobs(logits, following, top)
            ranks = self._reductions.ranks(logits, following)
            yield torch.cat([column.double() for column in (chosen, ranks, ids, most)], dim=1)
