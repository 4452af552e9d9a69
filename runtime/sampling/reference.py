"""From logits to tokens, for a whole batch; each row's draw depends on that row alone.

Randomness is counter-based: the uniform number of a draw is a hash of (seed, choice, output
index), so that a replay on another worker, in another batch, draws the same token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.core.request import SamplingParams
from runtime.core.sequence import Sequence as RunningSequence

LARGEST = 1e30
"""What a bias or a penalty may bring a logit to, so that sums of logits stay finite."""
_CANDIDATES = 1024
"""How many of the most probable tokens are sorted before it is known whether they suffice."""


@dataclass(frozen=True)
class SamplingRow:
    """Whose logits a row is: how to sample, and what came before.

    ``tokens`` is the prompt, of ``prompt_tokens``, and the choice's output so far.
    """

    sampling: SamplingParams
    choice: int
    tokens: Sequence[int]
    prompt_tokens: int

    @classmethod
    def of(cls, sequence: RunningSequence) -> "SamplingRow":
        """The row of a sequence's next token."""
        request = sequence.request
        return cls(request.sampling, sequence.choice, sequence.tokens, request.prompt_tokens)

    @property
    def index(self) -> int:
        """Output index of the token to be sampled."""
        return len(self.tokens) - self.prompt_tokens


class Draw(NamedTuple):
    """A token, and the log probabilities that its row asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Settings:
    """How rows are drawn from, a number of each `[m, 1]`.

    Attributes:
        temperature: fp64, above 0.
        min_p, top_p: fp64.
        top_k: int64, the whole vocabulary where it is off.
        uniform: fp64, the row's random number.
    """

    temperature: Tensor
    min_p: Tensor
    top_p: Tensor
    top_k: Tensor
    uniform: Tensor

    @classmethod
    def of(cls, rows: Sequence[SamplingRow], vocab: int, device: torch.device) -> "Settings":
        def column(values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        samplings = [row.sampling for row in rows]
        return cls(
            column([s.temperature for s in samplings]),
            column([s.min_p for s in samplings]),
            column([s.top_p for s in samplings]),
            column([s.top_k or vocab for s in samplings], torch.int64),
            column([uniform(r.sampling.seed, r.choice, r.index) for r in rows]),
        )

    def where(self, numbers: list[int]) -> "Settings":
        """Those of some rows."""
        return Settings(
            *(
                column[numbers]
                for column in (self.temperature, self.min_p, self.top_p, self.top_k, self.uniform)
            )
        )


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[Draw | None]:
    """One token for each row of ``logits`` fp32 ``[len(rows), vocab]``; None where a row is not
    finite."""
    if not any(row.sampling.reshapes for row in rows):
        shaped = logits
    else:
        shaped = logits.clone()
        for number, row in enumerate(rows):
            if row.sampling.reshapes:
                reshape(shaped[number], row)
    tokens = shaped.argmax(dim=-1).tolist()
    drawn = [number for number, row in enumerate(rows) if row.sampling.temperature > 0]
    if drawn:
        settings = Settings.of([rows[number] for number in drawn], logits.shape[-1], logits.device)
        for number, token in zip(drawn, _drawn(shaped[drawn], settings), strict=True):
            tokens[number] = token
    finite = logits.sum(dim=-1).isfinite().tolist()
    draws = _with_logprobs(tokens, logits, rows)
    return [draw if fine else None for draw, fine in zip(draws, finite, strict=True)]


def reshape(logits: Tensor, row: SamplingRow) -> None:
    """Apply bias and penalties to one row ``[vocab]``, in place.

    As in OpenAI's API and in vLLM: a biased token's logit grows by its bias; the repetition
    penalty r divides the positive logits, and multiplies the negative ones, of every token in
    prompt or output; a token that is in the output c > 0 times loses c·frequency + presence.
    """
    sampling = row.sampling
    if sampling.logit_bias:
        biased = torch.tensor(list(sampling.logit_bias), device=logits.device)
        bias = torch.tensor(list(sampling.logit_bias.values()), device=logits.device)
        logits[biased] = (logits[biased] + bias).clamp_(-LARGEST, LARGEST)
    if sampling.repetition_penalty != 1.0:
        seen = torch.unique(torch.tensor(row.tokens, device=logits.device))
        values = logits[seen]
        penalty = torch.tensor(sampling.repetition_penalty, device=logits.device)
        penalized = torch.where(values > 0, values / penalty, values * penalty)
        logits[seen] = penalized.clamp_(-LARGEST, LARGEST)
    output = row.tokens[row.prompt_tokens :]
    if output and (sampling.frequency_penalty or sampling.presence_penalty):
        seen, counts = torch.unique(torch.tensor(output, device=logits.device), return_counts=True)
        logits[seen] -= counts * sampling.frequency_penalty + sampling.presence_penalty


def uniform(seed: int, choice: int, index: int) -> float:
    """The number in [0, 1) of one draw: SplitMix64 over seed, choice and output index.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014), figure 12.
    """
    state = 0
    for word in (seed, choice, index):
        state = _mix64(state ^ (word & _MASK64))
    return (state >> 11) * 2.0**-53


_MASK64 = (1 << 64) - 1


def _mix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _drawn(logits: Tensor, settings: Settings) -> list[int]:
    tokens, decided = draw(logits, settings)
    found: list[int] = tokens.tolist()
    missing = [number for number, known in enumerate(decided.tolist()) if not known]
    if missing:
        rest = draw_from_all(logits[missing], settings.where(missing))
        for number, token in zip(missing, rest.tolist(), strict=True):
            found[number] = token
    return found


def draw(logits: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Inverse-CDF draws from the filtered distributions of rows ``[m, vocab]``.

    The CDF runs from the most probable token down, and a few candidates decide most rows.

    Returns:
        int64 `[m]`, the tokens, and bool `[m]`, whether the candidates were enough: if not, the
        token is what `draw_from_all` says.
    """
    values, indices = logits.topk(min(_CANDIDATES, logits.shape[-1]), dim=-1)
    picks, decided = _pick(_masses(values, logits, settings), settings, logits.shape[-1])
    return indices.gather(1, picks[:, None])[:, 0], decided


def draw_from_all(logits: Tensor, settings: Settings) -> Tensor:
    """The same over the whole vocabulary, sorted: int64 `[m]`."""
    values, indices = logits.sort(dim=-1, descending=True, stable=True)
    picks, _ = _pick(_masses(values, logits, settings), settings, logits.shape[-1])
    return indices.gather(1, picks[:, None])[:, 0]


def _masses(values: Tensor, logits: Tensor, settings: Settings) -> Tensor:
    """fp64 probabilities of some logits of each row, after the temperature."""
    peak = logits.amax(dim=-1, keepdim=True)
    total = ((logits - peak).double() / settings.temperature).logsumexp(dim=-1, keepdim=True)
    return ((values - peak).double() / settings.temperature - total).exp()


def _pick(mass: Tensor, settings: Settings, vocab: int) -> tuple[Tensor, Tensor]:
    """Filter, then draw.

    Args:
        mass: fp64 `[m, c]`, the probabilities of each row's most probable tokens, descending.

    Returns:
        int64 `[m]`, the rank drawn, and bool `[m]`, whether the candidates were enough to know it.
    """
    count = mass.shape[-1]
    min_p, top_p = settings.min_p, settings.top_p
    rank = torch.arange(count, device=mass.device)
    kept = (mass >= mass[:, :1] * min_p) & (rank < settings.top_k)
    running = torch.where(kept, mass, 0.0).cumsum(dim=-1)
    truncated = (min_p > 0) | (settings.top_k < vocab)
    # min-p and top-k leave a distribution of their own total; without them the total is 1.
    total = torch.where(truncated, running[:, -1:], 1.0)
    nucleus = kept & ((running - mass < top_p * total) | (top_p == 1.0))
    nucleus[:, 0] = True  # also where top_p times the total is too small for a number
    everything = count == vocab
    ended = ~nucleus[:, -1:] & (~kept[:, -1:] | ~truncated) | everything
    total = torch.where(ended, torch.where(nucleus, mass, 0.0).sum(dim=-1, keepdim=True), 1.0)
    ranks = ((running <= settings.uniform * total) & nucleus).sum(dim=-1, keepdim=True)
    size = nucleus.sum(dim=-1, keepdim=True)
    decided = ended | (~truncated & (top_p == 1.0) & (ranks < size))
    return torch.minimum(ranks, size - 1)[:, 0], decided[:, 0]


def _with_logprobs(tokens: list[int], logits: Tensor, rows: Sequence[SamplingRow]) -> list[Draw]:
    asked = [number for number, row in enumerate(rows) if row.sampling.logprobs is not None]
    draws = [Draw(token) for token in tokens]
    if not asked:
        return draws
    logprobs = logits[asked].log_softmax(dim=-1)
    for line, number in zip(logprobs, asked, strict=True):
        wanted = rows[number].sampling.logprobs or 0
        values, indices = line.topk(min(wanted, line.shape[-1]))
        top = tuple(zip(indices.tolist(), values.tolist(), strict=True))
        draws[number] = Draw(tokens[number], float(line[tokens[number]]), top)
    return draws
