"""Batched sampling; it specifies the results of `runtime.sampling.on_device`.

The token of a row depends only on that row. Randomness is counter-based: the random number of a
draw is a hash of (seed, choice, output index). Another worker therefore draws the same token, in
any batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from runtime.core.request import SamplingParams
from runtime.core.sequence import SequenceState
from runtime.grammar.masks import MaskWords, allowed_tokens

MAX_LOGIT = 1e30
"""Bound on the magnitude of a logit after bias and penalties, so that sums stay finite."""
FORBIDDEN = -1e38
"""Logit of a token that a grammar does not allow. It is less than that of a suppressed token, so
that a suppressed token is sampled where the grammar allows no other one."""
CANDIDATES = 1024
"""Number of most probable tokens that a draw considers first. Most distributions need no more."""
ROUNDING = 1e-9
"""Relative tolerance with which a sum of probabilities counts as top-p or more. The rounding of
sums may depend on the batch, and sums of equal probabilities often meet top-p exactly."""
_MIN_EXPONENT = -700.0
"""Bound on exponents, whose exponential is a normal fp64 number."""


@dataclass(frozen=True)
class SamplingRow:
    """Sampling parameters and context of one row of logits.

    Attributes:
        tokens: token ids of the prompt and of the choice's output so far.
        prompt_tokens: number of prompt tokens in ``tokens``.
        mask: mask of the tokens that a grammar allows, `[words]`; None to allow all.
    """

    sampling: SamplingParams
    choice: int
    tokens: Sequence[int]
    prompt_tokens: int
    mask: MaskWords | None = None

    @classmethod
    def of(cls, sequence: SequenceState, mask: MaskWords | None = None) -> "SamplingRow":
        """Return the sampling row of a running sequence."""
        request = sequence.request
        return cls(request.sampling, sequence.choice, sequence.tokens, request.prompt_tokens, mask)

    @property
    def processes_logits(self) -> bool:
        """Whether a sampling parameter or the mask changes the logits of any token."""
        return self.mask is not None or self.sampling.processes_logits

    @property
    def index(self) -> int:
        """Output index of the token to be sampled."""
        return len(self.tokens) - self.prompt_tokens


class Draw(NamedTuple):
    """A sampled token, with log probabilities if requested.

    Attributes:
        token: token id.
        logprob: log probability of the token; None if not requested.
        top: most probable tokens with their log probabilities, in descending order.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class SamplingTensors:
    """Parameters of the random draws of `m` rows, each `[m, 1]`.

    Attributes:
        temperature: fp64, above 0.
        min_p, top_p: fp64.
        top_k: int64, the vocabulary size for no limit.
        uniform: fp64 in [0, 1), the random number of the draw.
    """

    temperature: Tensor
    min_p: Tensor
    top_p: Tensor
    top_k: Tensor
    uniform: Tensor

    @classmethod
    def of(cls, rows: Sequence[SamplingRow], vocab: int, device: torch.device) -> "SamplingTensors":
        def column(values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        filters = zip(*(row.sampling.filters for row in rows), strict=True)
        temperature, min_p, top_p = (column(values) for values in filters)
        top_k = column([row.sampling.top_k or vocab for row in rows], torch.int64)
        random = column([uniform(r.sampling.seed, r.choice, r.index) for r in rows])
        return cls(temperature, min_p, top_p, top_k, random)

    def select(self, rows: list[int]) -> "SamplingTensors":
        """Return the parameters of the rows with these indices."""
        return SamplingTensors(*(column[rows] for column in vars(self).values()))


class Candidates(NamedTuple):
    """The most probable tokens of `m` rows, which suffice for most draws.

    Attributes:
        values: fp32 `[m, c]`, logits of the tokens, descending. c is `CANDIDATES`, or the size
            of the vocabulary if that is smaller.
        tokens: int64 `[m, c]`.
        log_sum: fp64 `[m, 1]`, logarithm of the sum of ``exp((logit - largest) / temperature)``
            over all tokens.
    """

    values: Tensor
    tokens: Tensor
    log_sum: Tensor

    @classmethod
    def of(cls, logits: Tensor, temperature: Tensor) -> Self:
        """Return the candidates of fp32 logits `[m, vocab]`."""
        values, tokens = logits.topk(min(CANDIDATES, logits.shape[-1]), dim=-1)
        return cls(values, tokens, _log_sum(logits, temperature))


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[Draw | None]:
    """Sample one token for each row.

    Args:
        logits: fp32 `[len(rows), vocab]`, not modified.

    Returns:
        A draw for each row, or None if the row's logits are not finite.
    """
    processed = _process(logits, rows)
    random = [number for number, row in enumerate(rows) if row.sampling.temperature > 0]
    if len(random) < len(rows):
        tokens: list[int] = processed.argmax(dim=-1).tolist()
        processed = processed[random]
    else:
        tokens = [0] * len(rows)
    if random:
        drawn_rows = [rows[number] for number in random]
        parameters = SamplingTensors.of(drawn_rows, logits.shape[-1], logits.device)
        for number, token in zip(random, _draw_all(processed, parameters), strict=True):
            tokens[number] = token
    finite = logits.sum(dim=-1).isfinite().tolist()
    draws = _with_logprobs(tokens, logits, rows)
    return [draw if is_finite else None for draw, is_finite in zip(draws, finite, strict=True)]


def _process(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Return a copy of the logits, processed, or ``logits`` if no row needs processing."""
    if not any(row.processes_logits for row in rows):
        return logits
    processed = logits.clone()
    for number, row in enumerate(rows):
        if row.processes_logits:
            process_logits(processed[number], row)
    return processed


def process_logits(logits: Tensor, row: SamplingRow) -> None:
    """Apply bias, penalties, suppression and mask to a row ``[vocab]`` in place.

    The first three are those of OpenAI and vLLM.

    - The bias is added to the logit of its token.
    - The repetition penalty r applies to every token of prompt and output: it divides positive
      logits and multiplies negative ones.
    - The logit of a token that occurs c > 0 times in the output is reduced by c·frequency +
      presence.
    - Before the output index ``min_tokens``, suppressed tokens have the logit -`MAX_LOGIT`.
    - Tokens that are not allowed have this logit, and so has the last token of each bad word whose
      other tokens are the end of the output.
    - Tokens that the mask does not allow have the logit `FORBIDDEN`.
    """
    sampling = row.sampling
    if sampling.logit_bias:
        biased = torch.tensor(list(sampling.logit_bias), device=logits.device)
        bias = torch.tensor(list(sampling.logit_bias.values()), device=logits.device)
        logits[biased] = (logits[biased] + bias).clamp_(-MAX_LOGIT, MAX_LOGIT)
    if sampling.repetition_penalty != 1.0:
        seen = torch.unique(torch.tensor(row.tokens, device=logits.device))
        values = logits[seen]
        penalty = torch.tensor(sampling.repetition_penalty, device=logits.device)
        penalized = torch.where(values > 0, values / penalty, values * penalty)
        logits[seen] = penalized.clamp_(-MAX_LOGIT, MAX_LOGIT)
    output = row.tokens[row.prompt_tokens :]
    if output and (sampling.frequency_penalty or sampling.presence_penalty):
        seen, counts = torch.unique(torch.tensor(output, device=logits.device), return_counts=True)
        logits[seen] -= counts * sampling.frequency_penalty + sampling.presence_penalty
    if row.index < sampling.min_tokens and sampling.suppressed:
        logits[list(sampling.suppressed)] = -MAX_LOGIT
    if sampling.allowed_token_ids:
        allowed = torch.tensor(list(sampling.allowed_token_ids), device=logits.device)
        kept = logits[allowed]
        logits.fill_(-MAX_LOGIT)
        logits[allowed] = kept
    if excluded := sampling.excluded_by_bad_words(output):
        logits[excluded] = -MAX_LOGIT
    if row.mask is not None:
        allowed = torch.from_numpy(allowed_tokens(row.mask, 0, len(logits)))
        logits.masked_fill_(allowed.to(logits.device).logical_not_(), FORBIDDEN)


def uniform(seed: int, choice: int, index: int) -> float:
    """Return the random number in [0, 1) of one draw.

    It is a SplitMix64 hash of seed, choice and output index.

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


def _draw_all(logits: Tensor, parameters: SamplingTensors) -> list[int]:
    """Draw from the most probable tokens of each row, or from all tokens where needed."""
    vocab = logits.shape[-1]
    tokens, resolved = draw(Candidates.of(logits, parameters.temperature), parameters, vocab)
    found: list[int] = tokens.tolist()
    missing = [number for number, known in enumerate(resolved.tolist()) if not known]
    if missing:
        rest = draw_from_all(logits[missing], parameters.select(missing))
        for number, token in zip(missing, rest.tolist(), strict=True):
            found[number] = token
    return found


def draw(candidates: Candidates, parameters: SamplingTensors, vocab: int) -> tuple[Tensor, Tensor]:
    """Draw from the filtered distributions of rows by inverting the CDF.

    Tokens are in descending order of probability. Equally probable tokens are in the order of their
    ids, whatever order `Tensor.topk` gives them.

    Args:
        vocab: size of the vocabulary.

    Returns:
        Tokens int64 `[m]`, and bool `[m]`, whether the candidates sufficed. If they did not, the
        token is invalid and `draw_from_all` must be called.
    """
    values, indices, log_sum = candidates
    picks, resolved = _pick(_masses(values, log_sum, parameters), parameters, vocab)
    picked = values.gather(1, picks[:, None])  # [m, 1]
    # Rank of the pick among tokens with the same logit.
    rank = picks[:, None] - (values > picked).sum(dim=-1, keepdim=True)
    equal = torch.where(values == picked, indices, vocab - 1).sort(dim=-1).values
    # Tokens whose logit equals the smallest candidate's may be missing from the candidates.
    complete = (picked > values[:, -1:]) | (values.shape[-1] == vocab)
    return equal.gather(1, rank)[:, 0], resolved & complete[:, 0]


def draw_from_all(logits: Tensor, parameters: SamplingTensors) -> Tensor:
    """Draw as `draw` does, but from the whole vocabulary. Return the tokens, int64 `[m]`."""
    values, indices = logits.sort(dim=-1, descending=True, stable=True)
    log_sum = _log_sum(logits, parameters.temperature)
    picks, _ = _pick(_masses(values, log_sum, parameters), parameters, logits.shape[-1])
    return indices.gather(1, picks[:, None])[:, 0]


def _log_sum(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return `Candidates.log_sum` of all logits."""
    m = logits.amax(dim=-1, keepdim=True)
    scaled = (logits - m).double().div_(temperature)
    # The largest is 0, so that smaller terms than this do not change the sum. Without the bound,
    # the exponentials of masked tokens underflow, which is slow on a CPU.
    return scaled.clamp_(min=_MIN_EXPONENT).exp_().sum(dim=-1, keepdim=True).log_()


def _masses(values: Tensor, log_sum: Tensor, parameters: SamplingTensors) -> Tensor:
    """Return the fp64 probabilities, after temperature, of each row's most probable tokens.

    Args:
        values: logits of the tokens, fp32 `[m, c]`, descending.
        log_sum: see `Candidates`.
    """
    return ((values - values[:, :1]).double() / parameters.temperature - log_sum).exp()


def _pick(mass: Tensor, parameters: SamplingTensors, vocab: int) -> tuple[Tensor, Tensor]:
    """Apply min-p, top-k and top-p to the candidates, then draw one.

    Args:
        mass: fp64 `[m, c]`, probabilities of each row's most probable tokens, descending.

    Returns:
        Rank of the drawn candidate, int64 `[m]`, and bool `[m]`, whether the candidates sufficed.
    """
    count = mass.shape[-1]
    min_p, top_p = parameters.min_p, parameters.top_p
    rank = torch.arange(count, device=mass.device)
    kept = (mass >= mass[:, :1] * min_p) & (rank < parameters.top_k)
    running = torch.where(kept, mass, 0.0).cumsum(dim=-1)
    truncated = (min_p > 0) | (parameters.top_k < vocab)
    # With min-p or top-k, the total is the probability mass that they keep; otherwise it is 1.
    total = torch.where(truncated, running[:, -1:], 1.0)
    limit = top_p * total * (1 - ROUNDING)
    nucleus = kept & ((running - mass < limit) | (top_p == 1.0))
    nucleus[:, 0] = True  # keep the most probable token even if top_p * total underflows
    everything = count == vocab
    ended = ~nucleus[:, -1:] & (~kept[:, -1:] | ~truncated) | everything
    total = torch.where(ended, torch.where(nucleus, mass, 0.0).sum(dim=-1, keepdim=True), 1.0)
    ranks = ((running <= parameters.uniform * total) & nucleus).sum(dim=-1, keepdim=True)
    size = nucleus.sum(dim=-1, keepdim=True)
    resolved = ended | (~truncated & (top_p == 1.0) & (ranks < size))
    return torch.minimum(ranks, size - 1)[:, 0], resolved[:, 0]


def _with_logprobs(tokens: list[int], logits: Tensor, rows: Sequence[SamplingRow]) -> list[Draw]:
    requested = [number for number, row in enumerate(rows) if row.sampling.logprobs is not None]
    draws = [Draw(token) for token in tokens]
    if not requested:
        return draws
    logprobs = logits[requested].log_softmax(dim=-1)
    for line, number in zip(logprobs, requested, strict=True):
        num_top = rows[number].sampling.logprobs or 0
        values, indices = line.topk(min(num_top, line.shape[-1]))
        top = tuple(zip(indices.tolist(), values.tolist(), strict=True))
        draws[number] = Draw(tokens[number], float(line[tokens[number]]), top)
    return draws
