"""Sampling on the device, in static tensors, so that a CUDA graph can capture it.

`DeviceSampler.load` assigns sequences to rows. Each call then samples a token for every row, counts
it and increments the row's output index, all on the device. The tokens equal those of
`runtime.sampling.reference.sample`. Only the order of equally probable tokens in ``top_tokens`` may
differ.

The device considers only the 1,024 largest logits. If a row's distribution is too flat for them,
the row is unresolved. Its state does not advance, so another call with the same logits gives the
same result. `DeviceSampler.resolve` draws its token from the whole vocabulary.

The ranks of a worker divide the vocabulary (`runtime.layers.vocabulary`): each has the logits and
the state of its own tokens, and all sample the same tokens. Log probabilities may differ from those
of one rank in the last bits. The probabilities of draws may have a relative difference of about
1e-7, because each rank subtracts its own largest logit in fp32 before it adds probabilities in
fp64. This changes a token only if the random number is that close to the boundary between two
tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.core.request import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams
from runtime.grammar.masks import MaskWords
from runtime.graphs.host_copy import to_device
from runtime.layers.vocabulary import Vocabulary
from runtime.sampling.mask import TokenMask
from runtime.sampling.reductions import RankReductions, Reductions
from runtime.sampling.reference import (
    MAX_LOGIT,
    Candidates,
    SamplingRow,
    SamplingTensors,
    draw,
    draw_from_all,
)

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True)
class SamplingFeatures:
    """Sampling features that at least one row of a batch uses. Greedy decoding uses none.

    Attributes:
        random: whether a row has a temperature above 0.
        processing: whether a row has a bias, penalties or excluded tokens.
        logprobs: whether a row requests log probabilities.
        masking: whether a grammar constrains a row.
    """

    random: bool
    processing: bool
    logprobs: bool
    masking: bool = False

    @classmethod
    def of(cls, samplings: Sequence[SamplingParams]) -> "SamplingFeatures":
        return cls(
            random=any(sampling.temperature > 0 for sampling in samplings),
            processing=any(sampling.processes_logits for sampling in samplings),
            logprobs=any(sampling.logprobs is not None for sampling in samplings),
            masking=any(sampling.constrained for sampling in samplings),
        )


ALL_FEATURES = SamplingFeatures(random=True, processing=True, logprobs=True, masking=True)

_WORDS, _REALS = 6, 6
"""Number of int64 parameters of a row (greedy, top-k, min-tokens, seed, choice, output index), and
number of its fp64 parameters (temperature, min-p, top-p, and repetition, frequency and presence
penalty).
"""
_IN_PROMPT, _SUPPRESSED, _FORBIDDEN = 1, 2, 4
"""Flags of a token."""
_NO_TOKEN = -1
"""Entry of a bad word or of the recent tokens that is not used."""


class DeviceSampler:
    """Sampler with static state for a fixed number of rows.

    Args:
        rows: number of rows.
        vocabulary: division of the token ids among the ranks. The state takes 13 bytes and a bit
            for each row and each token of this rank.
        top: maximum number of most probable tokens that a row reports.
        kernels: whether Triton kernels draw; by default on a GPU only.

    Attributes:
        sampled: int64 `[rows, 3]`, the storage of ``tokens``, ``finite`` and ``resolved``.
        tokens: int64 `[rows]`, token that the last call sampled.
        finite: int64 `[rows]`, 1 where the logits were finite.
        resolved: int64 `[rows]`, 0 where the token is invalid and `resolve` must draw it.
        logprobs: fp32 `[rows, 1]`, log probability of each token.
        top_logprobs: fp32 `[rows, top]`, log probabilities of ``top_tokens``, descending.
        top_tokens: int64 `[rows, top]`, most probable tokens.
    """

    def __init__(
        self,
        rows: int,
        vocabulary: Vocabulary,
        device: torch.device,
        *,
        top: int = 0,
        kernels: bool | None = None,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._vocabulary = vocabulary
        self._kernels = device.type == "cuda" if kernels is None else kernels
        find = _candidates_on_gpu if self._kernels else Candidates.of
        self._reductions = (
            RankReductions(vocabulary, find) if vocabulary.divided else Reductions(find)
        )
        own = len(vocabulary.own)
        self.sampled = zeros(rows, 3)
        self.tokens, self.finite, self.resolved = self.sampled.unbind(dim=1)
        self.logprobs = zeros(rows, 1, dtype=torch.float32)
        self.top_logprobs = zeros(rows, top, dtype=torch.float32)
        self.top_tokens = zeros(rows, top)
        # int64 parameters by row; those from _WORDS on hold the bits of fp64 values.
        self._parameters = zeros(_WORDS + _REALS, rows)
        self._greedy = self._parameters[0]
        self._top_k = self._parameters[1, :, None]
        self._min_tokens = self._parameters[2]
        self._counter = self._parameters[3:_WORDS]  # seed, choice, output index
        reals = self._parameters[_WORDS:].view(torch.float64)[:, :, None]  # [_REALS, rows, 1]
        self._filters = reals[:3]
        self._processor = _LogitsProcessor(
            vocabulary,
            bias=zeros(rows, own, dtype=torch.float32),
            outputs=zeros(rows, own, dtype=torch.int32),
            flags=zeros(rows, own, dtype=torch.uint8),
            penalties=reals[3:],
        )
        self._bad_words = _BadWords(rows, vocabulary, device)
        self._processed = zeros(rows, own, dtype=torch.float32)
        self._mask = TokenMask(rows, vocabulary.own, device, kernels=self._kernels)
        self.load(range(rows), [SamplingRow(SamplingParams(), 0, (), 0)] * rows)

    @property
    def state(self) -> list[Tensor]:
        """Tensors that carry state from one call to the next."""
        return [self._counter, self._processor.outputs, self._bad_words.recent]

    def load(self, numbers: Sequence[int], rows: Sequence[SamplingRow]) -> None:
        """Assign sequences to rows.

        Args:
            numbers: row indices, without repetition.
            rows: parameters and context of the sequence of each row.
        """
        words = np.empty((1 + _WORDS + _REALS, len(rows)), np.int64)
        words[0] = numbers
        reals = words[1 + _WORDS :].view(np.float64)
        for column, row in enumerate(rows):
            sampling = row.sampling
            words[1 : 1 + _WORDS, column] = (
                sampling.temperature == 0,
                sampling.top_k or self._vocabulary.size,
                sampling.min_tokens if sampling.suppressed else 0,
                _signed(sampling.seed),
                _signed(row.choice),
                row.index,
            )
            reals[:, column] = *sampling.filters, *sampling.penalties
        loaded = to_device(words, self.sampled.device)
        self._parameters.index_copy_(1, loaded[0], loaded[1:])
        for number, row in zip(numbers, rows, strict=True):
            self._processor.load(number, row)
            self._bad_words.load(number, row)
        self._mask.allow_all(
            number
            for number, row in zip(numbers, rows, strict=True)
            if not row.sampling.constrained
        )

    def load_masks(self, numbers: Sequence[int], masks: MaskWords) -> None:
        """Set the masks of rows before each call that samples constrained tokens.

        Args:
            numbers: row indices, without repetition.
            masks: masks of the whole vocabulary, `[len(numbers), words]`.
        """
        self._mask.load(numbers, masks)

    def __call__(self, logits: Tensor, features: SamplingFeatures = ALL_FEATURES) -> None:
        """Sample a token for each of the first `m` rows.

        Args:
            logits: logits of this rank's tokens, fp32 `[m, own]`; not modified.
            features: features to compute. They must include all features that the rows use.
        """
        rows = slice(len(logits))
        processed = self._process(logits, rows) if features.processing else logits
        if features.masking:
            processed = self._mask.apply(processed)
        temperature = self._filters[0, rows] if features.random else None
        best, finite, candidates = self._reductions.find(logits, processed, temperature)
        if candidates is not None:
            self._draw(candidates, best, rows)
            self._processed[rows] = processed
        else:
            self.tokens[rows] = best
            self.resolved[rows] = 1
            self._counter[2, rows] += 1
        self.finite[rows] = finite
        tokens = self.tokens[rows]
        if features.logprobs:
            top = self.top_tokens.shape[1]
            found = self._reductions.logprobs(logits, tokens, top)
            self.logprobs[rows], self.top_logprobs[rows], self.top_tokens[rows] = found
        if features.processing:
            places, counted = self._reductions.own(tokens, self.resolved[rows])
            self._processor.count(places[:, None], counted, rows)
            self._bad_words.append(tokens, self.resolved[rows], rows)

    def _draw(self, candidates: Candidates, best: Tensor, rows: slice) -> None:
        """Draw the tokens of the first rows, and advance the output index of resolved ones.

        Args:
            best: tokens of greedy rows.
        """
        if self._kernels:
            from runtime.sampling.gpu import draw_rows

            words, reals = self._parameters[:_WORDS], self._filters[:, :, 0]
            draw_rows(candidates, best, words, reals, self.sampled, self._vocabulary.size)
            return
        drawn, resolved = draw(candidates, self._tensors(rows), self._vocabulary.size)
        greedy = self._greedy[rows] > 0
        self.tokens[rows] = torch.where(greedy, best, drawn)
        self.resolved[rows] = resolved | greedy
        self._counter[2, rows] += self.resolved[rows]

    def resolve(self, logits: Tensor, numbers: Sequence[int]) -> None:
        """Draw the tokens of rows that the last call left unresolved. All ranks must call it.

        Args:
            logits: logits of that call, fp32 `[rows, own]`.
            numbers: indices of the unresolved rows.
        """
        missing = to_device(np.array(numbers, np.int64), self.sampled.device)
        processed = self._vocabulary.whole(self._processed[missing])
        tokens = draw_from_all(processed, self._tensors(missing))
        logprobs = self._vocabulary.whole(logits[missing]).log_softmax(dim=-1)
        self.logprobs[missing] = logprobs.gather(1, tokens[:, None])
        self.tokens[missing] = tokens
        self.resolved[missing] = 1
        self._counter[2, missing] += 1
        places, counted = self._reductions.own(tokens, self.resolved[missing])
        self._processor.outputs[missing, places] += counted.int()
        self._bad_words.append(tokens, self.resolved[missing], missing)

    def _process(self, logits: Tensor, rows: slice) -> Tensor:
        suppresses = self._counter[2, rows] < self._min_tokens[rows]
        processed = self._processor.apply(logits, rows, suppresses)
        self._bad_words.exclude(processed, rows)
        return processed

    def _tensors(self, rows: slice | Tensor) -> SamplingTensors:
        temperature, min_p, top_p = self._filters[:, rows]
        uniform = uniforms(*self._counter[:, rows])[:, None]
        return SamplingTensors(temperature, min_p, top_p, self._top_k[rows], uniform)


def _candidates_on_gpu(logits: Tensor, temperature: Tensor) -> Candidates:
    from runtime.sampling.gpu import find_candidates  # needs Triton

    return find_candidates(logits, temperature)


class _LogitsProcessor:
    """Processing of the logits of all rows, as in `runtime.sampling.reference.process_logits`.

    If any row of a batch needs processing, output tokens are counted for all its rows. The counts
    of rows without penalties have no effect.

    Args:
        vocabulary: division of the token ids among the ranks.
        bias: fp32 `[rows, own]`, logit bias.
        outputs: int32 `[rows, own]`, occurrences of each token in the output.
        flags: uint8 `[rows, own]`, flags of each token: whether it is in the prompt, whether it is
            suppressed before the output index ``min_tokens``, and whether it is not allowed.
        penalties: fp64 `[3, rows, 1]`, repetition, frequency and presence penalty.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        bias: Tensor,
        outputs: Tensor,
        flags: Tensor,
        penalties: Tensor,
    ) -> None:
        self._vocabulary = vocabulary
        self._bias = bias
        self.outputs = outputs
        self._flags = flags
        self._penalties = penalties
        self._biased: set[int] = set()  # rows with a bias other than 0

    def load(self, number: int, row: SamplingRow) -> None:
        """Load bias, token counts and flags of a row, if its logits are processed.

        `DeviceSampler.load` writes the penalties and ``min_tokens``.
        """
        sampling, vocab = row.sampling, self._vocabulary.size
        if number in self._biased:
            self._biased.remove(number)
            self._bias[number] = 0.0
        if not sampling.processes_logits:
            return
        if sampling.logit_bias:
            bias = np.zeros(vocab, np.float32)
            bias[list(sampling.logit_bias)] = list(sampling.logit_bias.values())
            self._write(self._bias, number, bias)
            self._biased.add(number)
        tokens = np.array(row.tokens, np.int64)
        flags = np.zeros(vocab, np.uint8)
        flags[tokens[: row.prompt_tokens]] = _IN_PROMPT
        flags[list(sampling.suppressed)] |= _SUPPRESSED
        if allowed := sampling.allowed_token_ids:
            flags |= _FORBIDDEN
            flags[list(allowed)] &= ~np.uint8(_FORBIDDEN)
        self._write(self._flags, number, flags)
        counts = np.bincount(tokens[row.prompt_tokens :], minlength=vocab)
        self._write(self.outputs, number, counts.astype(np.int32))

    def apply(self, logits: Tensor, rows: slice, suppresses: Tensor) -> Tensor:
        """Return the processed logits ``[m, own]``.

        Args:
            suppresses: bool `[m]`, whether each row is before its ``min_tokens``.
        """
        repetition, frequency, presence = self._penalties[:, rows].float()
        bias, outputs, flags = self._bias[rows], self.outputs[rows], self._flags[rows]
        logits = torch.where(bias != 0, (logits + bias).clamp(-MAX_LOGIT, MAX_LOGIT), logits)
        penalized = torch.where(logits > 0, logits / repetition, logits * repetition)
        known = ((flags & _IN_PROMPT > 0) | (outputs > 0)) & (repetition != 1)
        logits = torch.where(known, penalized.clamp(-MAX_LOGIT, MAX_LOGIT), logits)
        logits = torch.where(outputs > 0, logits - (outputs * frequency + presence), logits)
        excluded = (flags & _SUPPRESSED > 0) & suppresses[:, None] | (flags & _FORBIDDEN > 0)
        return logits.masked_fill(excluded, -MAX_LOGIT)

    def count(self, tokens: Tensor, counted: Tensor, rows: slice) -> None:
        """Count the tokens of rows for which ``counted`` is 1.

        Args:
            tokens: int64 `[m, 1]`, index of each token within the tokens of this rank.
        """
        self.outputs[rows].scatter_add_(1, tokens, counted.int()[:, None])

    def _write(self, target: Tensor, number: int, values: NDArray[np.generic]) -> None:
        """Write the values of this rank's tokens into a row; ``values`` has those of all tokens."""
        own = self._vocabulary.own
        target[number].copy_(to_device(values[own.start : own.stop], target.device))


class _BadWords:
    """Bad words of all rows, and the output tokens by which they are found.

    Words and recent tokens are aligned to the right: the last entry of a word is its last token,
    and that of the recent tokens is the last output token.

    Args:
        vocabulary: division of the token ids among the ranks.

    Attributes:
        recent: int64 `[rows, MAX_BAD_WORD_TOKENS - 1]`, last output tokens, after `_NO_TOKEN`. Only
            those of rows with bad words are kept.
    """

    def __init__(self, rows: int, vocabulary: Vocabulary, device: torch.device) -> None:
        def unused(*shape: int) -> Tensor:
            return torch.full(shape, _NO_TOKEN, dtype=torch.int64, device=device)

        self._vocabulary = vocabulary
        # [rows, words, tokens]
        self._words = unused(rows, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)
        self.recent = unused(rows, MAX_BAD_WORD_TOKENS - 1)
        self._used: set[int] = set()  # rows with bad words

    def load(self, number: int, row: SamplingRow) -> None:
        """Load the bad words and the last output tokens of a row."""
        words = row.sampling.bad_words
        if number in self._used:
            self._used.remove(number)
            self._words[number] = _NO_TOKEN
        if not words:
            return
        self._used.add(number)
        table = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), _NO_TOKEN, np.int64)
        for line, word in zip(table, words, strict=False):
            line[-len(word) :] = word
        recent = np.full(MAX_BAD_WORD_TOKENS - 1, _NO_TOKEN, np.int64)
        if output := row.tokens[row.prompt_tokens :][-len(recent) :]:
            recent[-len(output) :] = output
        device = self.recent.device
        self._words[number].copy_(to_device(table, device))
        self.recent[number].copy_(to_device(recent, device))

    def exclude(self, logits: Tensor, rows: slice) -> None:
        """Give the smallest logit to the token that would complete a bad word, in place.

        Args:
            logits: processed logits of this rank's tokens, `[m, own]`.
        """
        words = self._words[rows]
        before, last = words[:, :, :-1], words[:, :, -1]
        found = (before == self.recent[rows][:, None]) | (before == _NO_TOKEN)
        places, is_own = self._vocabulary.places(last)
        excluded = found.all(dim=2) & is_own
        bound = torch.where(excluded, -MAX_LOGIT, torch.inf)
        logits.scatter_reduce_(1, places, bound, "amin")

    def append(self, tokens: Tensor, counted: Tensor, rows: slice | Tensor) -> None:
        """Append the tokens of rows for which ``counted`` is 1.

        Args:
            tokens: int64 `[m]`, token ids.
            counted: int64 `[m]`.
        """
        recent = self.recent[rows]
        moved = torch.cat([recent[:, 1:], tokens[:, None]], dim=1)
        self.recent[rows] = torch.where(counted[:, None] > 0, moved, recent)


def uniforms(seed: Tensor, choice: Tensor, index: Tensor) -> Tensor:
    """Compute `runtime.sampling.reference.uniform` for each row.

    Args:
        seed, choice, index: int64 `[m]`.

    Returns:
        fp64 `[m]` in [0, 1).
    """
    state = torch.zeros_like(seed)
    for word in (seed, choice, index):
        state = _mix64(state ^ word)
    return _shifted(state, 11).double() * 2.0**-53


def _mix64(value: Tensor) -> Tensor:
    value = value + _GOLDEN
    value = (value ^ _shifted(value, 30)) * _FIRST
    value = (value ^ _shifted(value, 27)) * _SECOND
    return value ^ _shifted(value, 31)


def _shifted(value: Tensor, count: int) -> Tensor:
    """Shift int64 right logically, without sign extension."""
    return (value >> count) & ((1 << 64 - count) - 1)


def _signed(word: int) -> int:
    """Convert the low 64 bits of an integer to the int64 with the same bits."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word
