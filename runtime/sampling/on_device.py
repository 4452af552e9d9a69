"""Sampling without the host: `sampling.sample` over tensors that stay, step after step.

A batch has a fixed number of rows. `StaticSampler.load` says whose logits a row is; from then on
each call draws a token for every row, counts it, and goes on to the next random number, all on the
device, so that a CUDA graph can hold it. The tokens are those of `sampling.sample`; of the most
probable ones beside them, equally probable ones may come in another order. A row that is not
decided stays where it was: from the same logits the next call would draw the same again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.core.request import SamplingParams
from runtime.graphs.host_copy import to_device
from runtime.sampling.reference import LARGEST, SamplingRow, Settings, draw, draw_from_all

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True)
class Needs:
    """What some row of a batch needs beyond the largest logit."""

    draws: bool
    shapes: bool
    logprobs: bool

    @classmethod
    def of(cls, samplings: Iterable[SamplingParams]) -> "Needs":
        draws = shapes = logprobs = False
        for sampling in samplings:
            draws |= sampling.temperature > 0
            shapes |= sampling.reshapes
            logprobs |= sampling.logprobs is not None
        return cls(draws, shapes, logprobs)


EVERYTHING = Needs(draws=True, shapes=True, logprobs=True)

_WORDS, _REALS = 5, 6
"""Of a row: greedy, top-k, seed, choice, output index; temperature, min-p, top-p, penalties."""


class StaticSampler:
    """What a batch's rows are drawn by.

    Args:
        rows, vocab: of the logits; thirteen bytes are kept for each.
        top: how many of the most probable tokens can be found beside each one.

    Attributes:
        drawn: int64 `[rows, 3]`: the three below.
        tokens: int64 `[rows]`, drawn last.
        finite: int64 `[rows]`, 1 where there was anything to draw from.
        decided: int64 `[rows]`: where it is 0 the row is flat beyond its best thousand logits, and
            `redraw` finds its token.
        logprobs: fp32 `[rows, 1]`; ``top_logprobs`` fp32 and ``top_tokens`` int64 `[rows, top]`.
    """

    def __init__(self, rows: int, vocab: int, device: torch.device, *, top: int = 0) -> None:
        self._vocab, self._top, self._device = vocab, top, device

        def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.drawn = numbers(rows, 3)
        self.tokens, self.finite, self.decided = self.drawn.unbind(dim=1)
        self.logprobs = numbers(rows, 1, dtype=torch.float32)
        self.top_logprobs = numbers(rows, top, dtype=torch.float32)
        self.top_tokens = numbers(rows, top)
        self._settings_of = numbers(_WORDS + _REALS, rows)  # reals as their bits
        self._greedy, self._top_k = self._settings_of[0], self._settings_of[1, :, None]
        self._counter = self._settings_of[2:_WORDS]
        reals = self._settings_of[_WORDS:].view(torch.float64)[:, :, None]
        self._drawn_by = reals[:3]
        self._shapes = _Shapes(
            bias=numbers(rows, vocab, dtype=torch.float32),
            outputs=numbers(rows, vocab, dtype=torch.int32),
            seen=numbers(rows, vocab, dtype=torch.bool),
            penalties=reals[3:],
        )
        self._last = numbers(rows, vocab, dtype=torch.float32)
        self.load(range(rows), [SamplingRow(SamplingParams(), 0, (), 0)] * rows)

    @property
    def state(self) -> list[Tensor]:
        """What a call changes and the next one reads."""
        return [self._counter, self._shapes.outputs]

    def load(self, numbers: Sequence[int], rows: Sequence[SamplingRow]) -> None:
        """From now on the logits of these numbers are those rows', each number once."""
        words = np.empty((1 + _WORDS + _REALS, len(rows)), np.int64)
        words[0] = numbers
        reals = words[1 + _WORDS :].view(np.float64)
        for column, row in enumerate(rows):
            own = row.sampling
            counted = (_signed(own.seed), _signed(row.choice), row.index)
            words[1 : 1 + _WORDS, column] = (
                own.temperature == 0,
                own.top_k or self._vocab,
                *counted,
            )
            reals[:, column] = (
                own.temperature or 1.0, own.min_p, own.top_p,
                own.repetition_penalty, own.frequency_penalty, own.presence_penalty,
            )  # fmt: skip
        loaded = to_device(words, self._device)
        self._settings_of.index_copy_(1, loaded[0], loaded[1:])
        for number, row in zip(numbers, rows, strict=True):
            self._shapes.load(number, row)

    def __call__(self, logits: Tensor, needs: Needs = EVERYTHING) -> None:
        """Draw for the first `m` rows, from fp32 `[m, vocab]`, which stay as they are.

        What no row ``needs`` is left out: then the tokens are the same, at less work.
        """
        rows = slice(len(logits))
        shaped = self._shapes.apply(logits, rows) if needs.shapes else logits
        tokens = shaped.argmax(dim=-1)
        if needs.draws:
            drawn, decided = draw(shaped, self._settings(rows))
            greedy = self._greedy[rows] > 0
            tokens = torch.where(greedy, tokens, drawn)
            self.decided[rows] = decided | greedy
            self._last[rows] = shaped
        else:
            self.decided[rows] = 1
        self.tokens[rows] = tokens
        self.finite[rows] = logits.sum(dim=-1).isfinite()
        if needs.logprobs:
            logprobs = logits.log_softmax(dim=-1)
            self.logprobs[rows] = logprobs.gather(1, tokens[:, None])
            self.top_logprobs[rows], self.top_tokens[rows] = logprobs.topk(self._top)
        self._counter[2, rows] += self.decided[rows]
        if needs.shapes:
            self._shapes.count(tokens[:, None], self.decided[rows], rows)

    def redraw(self, logits: Tensor, numbers: Sequence[int]) -> None:
        """Find the tokens of these rows, which the last call, of these logits, left undecided."""
        missing = to_device(np.array(numbers, np.int64), self._device)
        tokens = draw_from_all(self._last[missing], self._settings(missing))
        logprobs = logits[missing].log_softmax(dim=-1)
        self.logprobs[missing] = logprobs.gather(1, tokens[:, None])
        self.tokens[missing] = tokens
        self.decided[missing] = 1
        self._counter[2, missing] += 1
        self._shapes.outputs[missing, tokens] += 1

    def _settings(self, rows: slice | Tensor) -> Settings:
        temperature, min_p, top_p = self._drawn_by[:, rows]
        drawn = uniforms(*self._counter[:, rows])[:, None]
        return Settings(temperature, min_p, top_p, self._top_k[rows], drawn)


class _Shapes:
    """Bias and penalties of all rows, as `sampling.reshape` applies them.

    Outputs are counted where some row is reshaped; what is counted for the others has no effect.
    """

    def __init__(self, bias: Tensor, outputs: Tensor, seen: Tensor, penalties: Tensor) -> None:
        self._bias, self.outputs, self._seen = bias, outputs, seen
        self._penalties = penalties  # repetition, frequency, presence
        self._biased: set[int] = set()

    def load(self, number: int, row: SamplingRow) -> None:
        """What a row's sampling leaves as it is costs nothing. Penalties are there already."""
        sampling, vocab = row.sampling, self._bias.shape[1]
        if number in self._biased:
            self._biased.remove(number)
            self._bias[number] = 0.0
        if not sampling.reshapes:
            return
        if sampling.logit_bias:
            bias = np.zeros(vocab, np.float32)
            bias[list(sampling.logit_bias)] = list(sampling.logit_bias.values())
            self._write(self._bias, number, bias)
            self._biased.add(number)
        tokens = np.array(row.tokens, np.int64)
        seen = np.zeros(vocab, np.bool_)
        seen[tokens[: row.prompt_tokens]] = True
        self._write(self._seen, number, seen)
        counts = np.bincount(tokens[row.prompt_tokens :], minlength=vocab)
        self._write(self.outputs, number, counts.astype(np.int32))

    def apply(self, logits: Tensor, rows: slice) -> Tensor:
        repetition, frequency, presence = self._penalties[:, rows].float()
        bias, outputs = self._bias[rows], self.outputs[rows]
        logits = torch.where(bias != 0, (logits + bias).clamp(-LARGEST, LARGEST), logits)
        penalized = torch.where(logits > 0, logits / repetition, logits * repetition)
        known = (self._seen[rows] | (outputs > 0)) & (repetition != 1)
        logits = torch.where(known, penalized.clamp(-LARGEST, LARGEST), logits)
        return torch.where(outputs > 0, logits - (outputs * frequency + presence), logits)

    def count(self, tokens: Tensor, counted: Tensor, rows: slice) -> None:
        self.outputs[rows].scatter_add_(1, tokens, counted.int()[:, None])

    @staticmethod
    def _write(target: Tensor, number: int, values: NDArray[np.generic]) -> None:
        target[number].copy_(to_device(values, target.device))


def uniforms(seed: Tensor, choice: Tensor, index: Tensor) -> Tensor:
    """`sampling.uniform` of each row: int64 words to fp64 in [0, 1)."""
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
    """Shifted right without its sign."""
    return (value >> count) & ((1 << 64 - count) - 1)


def _signed(word: int) -> int:
    """64 bits as torch holds them."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word
