"""Reductions over the vocabulary that sampling needs, on one rank or over the ranks of a worker."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from runtime.layers.vocabulary import Vocabulary
from runtime.sampling.reference import CANDIDATES, Candidates

FindCandidates = Callable[[Tensor, Tensor], Candidates]


class Found(NamedTuple):
    """Result of `Reductions.find` for `m` rows of logits.

    Attributes:
        best: int64 `[m]`, token with the largest processed logit, the lowest id if several have it.
        finite: `[m]`, whether the logits are finite: bool, or fp64 0 or 1 with several ranks.
        candidates: the most probable tokens; None without a temperature.
    """

    best: Tensor
    finite: Tensor
    candidates: Candidates | None


class Reductions:
    """Reductions over the logits of this rank's tokens.

    All tensors of logits are fp32 `[m, own]`, one row for each sequence.

    Args:
        find_candidates: function with the arguments and the result of `Candidates.of`.
    """

    def __init__(self, find_candidates: FindCandidates = Candidates.of) -> None:
        self._find_candidates = find_candidates

    def find(self, logits: Tensor, processed: Tensor, temperature: Tensor | None) -> Found:
        """Find the candidates of greedy and random draws.

        Args:
            processed: logits after bias, penalties and suppression.
            temperature: fp64 `[m, 1]`; None if all rows are greedy.
        """
        best = processed.argmax(dim=-1)
        candidates = None
        if temperature is not None:
            candidates = self._find_candidates(processed, temperature)
        return Found(best, logits.sum(dim=-1).isfinite(), candidates)

    def logprobs(self, logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return log probabilities.

        Args:
            tokens: token of each row, int64 `[m]`.
            top: number of most probable tokens to return.

        Returns:
            Log probabilities of ``tokens``, `[m, 1]`; log probabilities of the most probable
            tokens, descending, and these tokens, `[m, top]` each.
        """
        logprobs = logits.log_softmax(dim=-1)
        return logprobs.gather(1, tokens[:, None]), *logprobs.topk(top)

    def ranks(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return the number of logits that are at least as large as that of each row's token.

        Args:
            tokens: int64 `[m]`.

        Returns:
            int64 `[m, 1]`, from 1.
        """
        return (logits >= logits.gather(1, tokens[:, None])).sum(dim=1, keepdim=True)

    def own(self, tokens: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of each token within the tokens of this rank, and its value.

        Both are 0 for tokens of other ranks.

        Args:
            tokens: int64 `[m]`.
            values: a value for each token, `[m]`.
        """
        return tokens, values


class RankReductions(Reductions):
    """Reductions over the logits of all tokens, which the ranks of a worker divide.

    `find` and `logprobs` each gather one record from every rank, and `ranks` two. All ranks compute
    the result from the same records, so that it is bitwise identical on all of them.
    """

    def __init__(
        self, vocabulary: Vocabulary, find_candidates: FindCandidates = Candidates.of
    ) -> None:
        super().__init__(find_candidates)
        self._vocabulary = vocabulary

    def find(self, logits: Tensor, processed: Tensor, temperature: Tensor | None) -> Found:
        own = super().find(logits, processed, temperature)  # tokens are indices within `own`
        best = own.best[:, None]
        columns = [processed.gather(1, best), self._ids(best), own.finite[:, None]]
        if own.candidates is not None:
            values, tokens, log_sum = own.candidates
            columns += [log_sum, *self._padded(values, tokens, CANDIDATES)]
        largest, ids, finite, *rest = self._gathered(columns)
        # The first of the ranks with the largest logit has the lowest ids.
        best = ids.gather(1, largest.argmax(dim=1, keepdim=True))
        candidates = None
        if temperature is not None:
            log_sums, values, tokens = rest
            offsets = (largest - largest.amax(dim=1, keepdim=True)) / temperature
            log_sum = (log_sums + offsets).logsumexp(dim=1, keepdim=True)
            candidates = Candidates(*self._largest(values, tokens, CANDIDATES), log_sum)
        return Found(best[:, 0].long(), finite.amin(dim=1), candidates)

    def logprobs(self, logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
        places, is_own = self._vocabulary.places(tokens[:, None])
        chosen = logits.gather(1, places).where(is_own, -torch.inf)
        most = logits.topk(min(top, logits.shape[1]))
        columns = [chosen, logits.logsumexp(dim=1, keepdim=True), *self._padded(*most, top)]
        chosen, log_sums, values, tokens = self._gathered(columns)
        log_sum = log_sums.logsumexp(dim=1, keepdim=True)
        values, tokens = self._largest(values, tokens, top)
        return chosen.amax(dim=1, keepdim=True) - log_sum, values - log_sum, tokens

    def ranks(self, logits: Tensor, tokens: Tensor) -> Tensor:
        places, is_own = self._vocabulary.places(tokens[:, None])
        (chosen,) = self._gathered([logits.gather(1, places).where(is_own, -torch.inf)])
        larger = logits >= chosen.amax(dim=1, keepdim=True).float()
        (counts,) = self._gathered([larger.sum(dim=1, keepdim=True)])
        return counts.sum(dim=1, keepdim=True).long()

    def own(self, tokens: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        places, is_own = self._vocabulary.places(tokens)
        return places, values.where(is_own, 0)

    def _ids(self, places: Tensor) -> Tensor:
        return places + self._vocabulary.own.start

    def _padded(self, values: Tensor, places: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Pad logits of tokens `[m, c]` to the same width on all ranks; return them and the ids.

        Args:
            places: indices of the tokens within the tokens of this rank, `[m, c]`.
            count: maximum of c, which is smaller on ranks with fewer tokens.
        """
        missing = min(count, self._vocabulary.widest) - values.shape[1]
        if missing:
            values = functional.pad(values, (0, missing), value=-torch.inf)
            places = functional.pad(places, (0, missing))
        return values, self._ids(places)

    def _gathered(self, columns: Sequence[Tensor]) -> list[Tensor]:
        """Gather tensors `[m, w]` from all ranks with one collective: fp64 `[m, ranks * w]` each.

        Logits and token ids are exact in fp64.
        """
        parts = [column.double() for column in columns]
        record = torch.cat(parts, dim=1)
        group = self._vocabulary.group
        records = group.all_gather(record).view(len(record), group.size, record.shape[1])
        widths = [part.shape[1] for part in parts]
        return [part.flatten(1) for part in torch.split(records, widths, dim=2)]

    def _largest(self, values: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the ``count`` largest of gathered logits, fp32, and their token ids, int64."""
        values, places = values.float().topk(min(count, self._vocabulary.size), dim=-1)
        return values, ids.gather(1, places).long()
