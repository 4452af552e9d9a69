"""Reductions over the vocabulary that sampling needs, on one rank or over the ranks of a worker."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from runtime.layers.vocabulary import Vocabulary
from runtime.sampling.reference import CANDIDATES, Candidates, SamplingTensors


class Found(NamedTuple):
    """Result of `Reductions.find` for `m` rows of logits.

    Attributes:
        best: int64 `[m]`, token of the largest processed logit, the lowest of several.
        finite: `[m]`, whether the logits are finite.
        candidates: the most probable tokens, if a row is random.
    """

    best: Tensor
    finite: Tensor
    candidates: Candidates | None


class Reductions:
    """Reductions over the logits of this rank's tokens.

    All tensors of logits are fp32 `[m, own]`, one row for each sequence.
    """

    def find(self, logits: Tensor, processed: Tensor, parameters: SamplingTensors | None) -> Found:
        """Find the candidates of greedy and random draws.

        Args:
            processed: logits after bias, penalties and suppression.
            parameters: those of the draws, if a row is random.
        """
        best = processed.argmax(dim=-1)
        candidates = None
        if parameters is not None:
            candidates = Candidates.of(processed, parameters.temperature)
        return Found(best, logits.sum(dim=-1).isfinite(), candidates)

    def logprobs(self, logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return log probabilities.

        Args:
            tokens: int64 `[m]`.

        Returns:
            Log probabilities of the tokens `[m, 1]`; those of the ``top`` most probable tokens,
            descending, and these tokens, `[m, top]` each.
        """
        logprobs = logits.log_softmax(dim=-1)
        return logprobs.gather(1, tokens[:, None]), *logprobs.topk(top)

    def own(self, tokens: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places of tokens among this rank's, and the values of these tokens.

        Tokens of other ranks have place 0 and value 0.
        """
        return tokens, values


class RankReductions(Reductions):
    """Reductions over the logits of all tokens, which the ranks of a worker divide.

    Each method gathers a record of every rank once. All ranks compute the result from the same
    records, so that it is bitwise identical.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def find(self, logits: Tensor, processed: Tensor, parameters: SamplingTensors | None) -> Found:
        own = super().find(logits, processed, parameters)  # tokens are places among `own`
        best = own.best[:, None]
        columns = [processed.gather(1, best), self._ids(best), own.finite[:, None]]
        if own.candidates is not None:
            values, tokens, log_sum = own.candidates
            columns += [log_sum, *self._padded(values, tokens, CANDIDATES)]
        largest, ids, finite, *rest = self._gathered(columns)
        # The first of the ranks with the largest logit has the lowest ids.
        best = ids.gather(1, largest.argmax(dim=1, keepdim=True))
        candidates = None
        if parameters is not None:
            log_sums, values, tokens = rest
            offsets = (largest - largest.amax(dim=1, keepdim=True)) / parameters.temperature
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

    def own(self, tokens: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        places, is_own = self._vocabulary.places(tokens)
        return places, values.where(is_own, 0)

    def _ids(self, places: Tensor) -> Tensor:
        return places + self._vocabulary.own.start

    def _padded(self, values: Tensor, places: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return logits and ids of tokens `[m, c]`, in the width of the rank with most tokens.

        Args:
            count: maximum of c; ranks with fewer tokens than others have less.
        """
        missing = min(count, self._vocabulary.widest) - values.shape[1]
        if missing:
            values = functional.pad(values, (0, missing), value=-torch.inf)
            places = functional.pad(places, (0, missing))
        return values, self._ids(places)

    def _gathered(self, columns: Sequence[Tensor]) -> list[Tensor]:
        """Gather `[m, w]` of every rank, each as fp64 `[m, ranks * w]`, with one collective.

        Logits and token ids are exact in fp64.
        """
        parts = [column.double() for column in columns]
        record = torch.cat(parts, dim=1)
        group = self._vocabulary.group
        records = group.all_gather(record).view(len(record), group.size, record.shape[1])
        widths = [part.shape[1] for part in parts]
        return [part.flatten(1) for part in torch.split(records, widths, dim=2)]

    def _largest(self, values: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the largest of gathered logits and their tokens."""
        values, places = values.float().topk(min(count, self._vocabulary.size), dim=-1)
        return values, ids.gather(1, places).long()
