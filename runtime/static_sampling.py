"""Sampling without the host: `sampling.sample` over tensors that stay, step after step.

A batch has a fixed number of rows. `StaticSampler.load` says whose logits a row is; from then on
each call draws a token for every row, counts it, and goes on to the next random number, all on the
device, so that a CUDA graph can hold it. The tokens are those of `sampling.sample`; of the most
probable ones beside them, equally probable ones may come in another order.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.sampling import LARGEST, Row, Settings, draw, draw_from_all
from runtime.sequence import Sampling

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True)
class Needs:
    """What some row of a batch needs beyond the largest logit."""

    draws: bool
    shapes: bool
    logprobs: bool

    @classmethod
    def of(cls, samplings: Iterable[Sampling]) -> "Needs":
        draws = shapes = logprobs = False
        for sampling in samplings:
            draws |= sampling.temperature > 0
            shapes |= sampling.reshapes
            logprobs |= sampling.logprobs is not None
        return cls(draws, shapes, logprobs)


EVERYTHING = Needs(draws=True, shapes=True, logprobs=True)


class StaticSampler:
    """What a batch's rows are drawn by.

    Args:
        rows, vocab: of the logits; thirteen bytes are kept for each.
        top: how many of the most probable tokens can be found beside each one.

    Attributes:
        tokens: int64 `[rows]`, drawn last.
        finite: bool `[rows]`: whether there was anything to draw from.
        decided: bool `[rows]`: if not, the row is flat beyond its best thousand logits, and
            `redraw` finds its token.
        logprobs: fp32 `[rows]`; ``top_logprobs`` fp32 and ``top_tokens`` int64 `[rows, top]`.
    """

    def __init__(self, rows: int, vocab: int, device: torch.device, *, top: int = 0) -> None:
        self._vocab, self._top = vocab, top

        def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.tokens = numbers(rows, dtype=torch.int64)
        self.finite = numbers(rows, dtype=torch.bool)
        self.decided = numbers(rows, dtype=torch.bool)
        self.logprobs = numbers(rows, dtype=torch.float32)
        self.top_logprobs = numbers(rows, top, dtype=torch.float32)
        self.top_tokens = numbers(rows, top, dtype=torch.int64)
        self._greedy = numbers(rows, dtype=torch.bool)
        self._drawn_by = numbers(3, rows, 1, dtype=torch.float64)  # temperature, min-p, top-p
        self._top_k = numbers(rows, 1, dtype=torch.int64)
        self._counter = numbers(3, rows, dtype=torch.int64)  # seed, choice, output index
        self._shapes = _Shapes(
            bias=numbers(rows, vocab, dtype=torch.float32),
            outputs=numbers(rows, vocab, dtype=torch.int32),
            seen=numbers(rows, vocab, dtype=torch.bool),
            penalties=numbers(3, rows, 1, dtype=torch.float32),
        )
        self._last = numbers(rows, vocab, dtype=torch.float32)
        for row in range(rows):
            self.load(row, Row(Sampling(), 0, (), 0))

    @property
    def state(self) -> list[Tensor]:
        """What a call changes and the next one reads."""
        return [self._counter, self._shapes.outputs]

    def load(self, number: int, row: Row) -> None:
        """From now on the logits of this number are that row's."""
        sampling = row.sampling
        self._greedy[number] = sampling.temperature == 0
        drawn_by = (sampling.temperature or 1.0, sampling.min_p, sampling.top_p)
        self._drawn_by[:, number, 0] = torch.tensor(drawn_by, dtype=torch.float64)
        self._top_k[number, 0] = sampling.top_k or self._vocab
        words = [_signed(word) for word in (sampling.seed, row.choice, row.index)]
        self._counter[:, number] = torch.tensor(words)
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
            tokens = torch.where(self._greedy[rows], tokens, drawn)
            self.decided[rows] = decided | self._greedy[rows]
            self._last[rows] = shaped
        else:
            self.decided[rows] = True
        self.tokens[rows] = tokens
        self.finite[rows] = logits.sum(dim=-1).isfinite()
        if needs.logprobs:
            logprobs = logits.log_softmax(dim=-1)
            self.logprobs[rows] = logprobs.gather(1, tokens[:, None])[:, 0]
            self.top_logprobs[rows], self.top_tokens[rows] = logprobs.topk(self._top)
        self._count(rows, 1)

    def redraw(self, logits: Tensor) -> None:
        """Find the tokens of the last call that were not decided. Not for a graph: it looks."""
        rows = slice(len(logits))
        missing = (~self.decided[rows]).nonzero()[:, 0]
        if not len(missing):
            return
        self._count(rows, -1)
        settings = self._settings(rows).where(missing.tolist())
        self.tokens[missing] = draw_from_all(self._last[missing], settings)
        logprobs = logits[missing].log_softmax(dim=-1)
        self.logprobs[missing] = logprobs.gather(1, self.tokens[missing, None])[:, 0]
        self.decided[rows] = True
        self._count(rows, 1)

    def _settings(self, rows: slice) -> Settings:
        temperature, min_p, top_p = self._drawn_by[:, rows]
        drawn = uniforms(*self._counter[:, rows])[:, None]
        return Settings(temperature, min_p, top_p, self._top_k[rows], drawn)

    def _count(self, rows: slice, step: int) -> None:
        """The tokens are output: penalties know them, and the next draw is another one."""
        self._counter[2, rows] += step
        self._shapes.count(self.tokens[rows], rows, step)


class _Shapes:
    """Bias and penalties of all rows, as `sampling.reshape` applies them."""

    def __init__(self, bias: Tensor, outputs: Tensor, seen: Tensor, penalties: Tensor) -> None:
        self._bias, self.outputs, self._seen = bias, outputs, seen
        self._penalties = penalties  # repetition, frequency, presence

    def load(self, number: int, row: Row) -> None:
        sampling, device = row.sampling, self._bias.device
        self._bias[number] = 0.0
        if sampling.logit_bias:
            biased = torch.tensor(list(sampling.logit_bias), device=device)
            self._bias[number, biased] = torch.tensor(
                list(sampling.logit_bias.values()), dtype=torch.float32, device=device
            )
        self._penalties[:, number, 0] = torch.tensor(
            [sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty]
        )
        tokens = torch.tensor(row.tokens, dtype=torch.int64, device=device)
        self._seen[number] = False
        self._seen[number, tokens[: row.prompt_tokens]] = True
        output = tokens[row.prompt_tokens :]
        self.outputs[number] = torch.bincount(output, minlength=self._bias.shape[1])

    def apply(self, logits: Tensor, rows: slice) -> Tensor:
        repetition, frequency, presence = self._penalties[:, rows]
        bias, outputs = self._bias[rows], self.outputs[rows]
        logits = torch.where(bias != 0, (logits + bias).clamp(-LARGEST, LARGEST), logits)
        penalized = torch.where(logits > 0, logits / repetition, logits * repetition)
        known = (self._seen[rows] | (outputs > 0)) & (repetition != 1)
        logits = torch.where(known, penalized.clamp(-LARGEST, LARGEST), logits)
        return torch.where(outputs > 0, logits - (outputs * frequency + presence), logits)

    def count(self, tokens: Tensor, rows: slice, step: int) -> None:
        steps = torch.full_like(tokens, step, dtype=self.outputs.dtype)[:, None]
        self.outputs[rows].scatter_add_(1, tokens[:, None], steps)


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
