"""Makes a factorized checkpoint of a dense one."""

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoint.assemble import PROJECTIONS
from runtime.checkpoint.canonical import canonical_hash
from runtime.checkpoint.weights import Checkpoint, Dense, Factorization, FactorPair, Linear
from runtime.compress.decompose import Decomposition, decompose
from runtime.compress.moments import INPUT_OF, LayerMoments, collect_moments
from runtime.compress.perplexity import Progress
from runtime.compress.ranks import Choice, allocate_ranks
from runtime.errors import CompressionError

METHOD = "fisher-svd-1"
"""Truncation-aware SVD weighted by inputs and by output gradients, ranks allocated over the whole
model by estimated loss. The number changes when the same inputs would give other factors."""

RANK_MULTIPLE = 8
"""Rows of U in bf16 then start at multiples of 16 bytes."""

_SEED = 0


@dataclass(frozen=True)
class CompressionReport:
    """What was made. ``keep`` was asked for, ``parameters_kept`` is what the ranks add up to, both
    fractions of the projections' parameters. ``ranks`` are by layer and projection, None dense."""

    keep: float
    parameters_kept: float
    ranks: tuple[dict[str, int | None], ...]
    seconds: float

    @property
    def factorized(self) -> int:
        """How many projections are factor pairs."""
        return sum(rank is not None for layer in self.ranks for rank in layer.values())


def calibration_hash(tokens: Tensor) -> str:
    """sha256 of token ids and how they are cut into rows."""
    text = f"{list(tokens.shape)} {tokens.flatten().tolist()}"
    return hashlib.sha256(text.encode()).hexdigest()


def artifact_key(model_hash: str, keep: float, calibration_tokens: Tensor) -> str:
    """What names the result of `compress` before it is made: 32 hexadecimal digits."""
    facts = f"{METHOD} {model_hash} {float(keep)!r} {calibration_hash(calibration_tokens)}"
    return hashlib.sha256(facts.encode()).hexdigest()[:32]


@torch.no_grad()
def compress(
    checkpoint: Checkpoint,
    calibration_tokens: Tensor,
    keep: float,
    progress: Progress | None = None,
    rank_multiple: int = RANK_MULTIPLE,
) -> tuple[Checkpoint, CompressionReport]:
    """Factorize the projections of a dense fp32 checkpoint to at most ``keep`` of their parameters.

    Args:
        checkpoint: dense, on the device that is to do the work.
        calibration_tokens: ``[n, length]`` int64, real text; each row is a text of its own.
        keep: the fraction of the projections' parameters to keep; 1.0 is the dense model itself.
        progress: told "calibrating" and "factorizing", and the fraction of the whole that is done.
        rank_multiple: ranks are multiples of it.

    Raises `CompressionError` for a ``keep`` that is out of (0, 1] or cannot be reached, for a
    checkpoint that is factorized already, and for tokens that are none of the model's.
    """
    started = time.monotonic()
    _check(checkpoint, calibration_tokens, keep)
    if keep == 1.0:
        return checkpoint, _report(checkpoint, keep, started)
    told = progress or (lambda _stage, _fraction: None)
    moments = collect_moments(
        checkpoint, calibration_tokens, _SEED, lambda stage, done: told(stage, 0.8 * done)
    )
    parts: list[Decomposition] = []
    for index, part in enumerate(_decompositions(checkpoint, moments)):
        parts.append(part)
        told("factorizing", 0.8 + 0.2 * (index + 1) / (len(moments) * len(PROJECTIONS)))
    ranks = allocate_ranks(
        [Choice(*part.shape, part.loss.cpu().numpy()) for part in parts], keep, rank_multiple
    )
    linears: Iterator[Any] = map(Decomposition.truncate, parts, ranks)
    layers = tuple(
        replace(layer, **{projection: next(linears) for projection in PROJECTIONS})
        for layer in checkpoint.layers
    )
    factorization = Factorization(
        method=METHOD,
        source_hash=checkpoint.model_hash,
        calibration_hash=calibration_hash(calibration_tokens),
        calibration_tokens=calibration_tokens.numel(),
    )
    made = replace(checkpoint, layers=layers, keep=keep, factorization=factorization)
    made = replace(made, model_hash=canonical_hash(made))
    return made, _report(made, keep, started)


def _decompositions(
    checkpoint: Checkpoint, moments: tuple[LayerMoments, ...]
) -> Iterator[Decomposition]:
    for layer, moment in zip(checkpoint.layers, moments, strict=True):
        for projection in PROJECTIONS:
            yield decompose(
                getattr(layer, projection),
                moment.inputs[INPUT_OF[projection]],
                moment.gradients[projection],
            )


def _check(checkpoint: Checkpoint, tokens: Tensor, keep: float) -> None:
    if not 0.0 < keep <= 1.0:
        raise CompressionError(f"keep is a fraction of parameters in (0, 1], not {keep}")
    if any(not isinstance(linear, Dense) for layer in _linears(checkpoint) for linear in layer):
        raise CompressionError("the checkpoint is factorized already: start from the dense one")
    if tokens.ndim != 2 or tokens.numel() == 0:
        raise CompressionError(f"calibration needs [n, length] tokens, not {list(tokens.shape)}")
    if int(tokens.min()) < 0 or int(tokens.max()) >= checkpoint.config.vocab_size:
        raise CompressionError("the calibration tokens are not of this model's vocabulary")


def _linears(checkpoint: Checkpoint) -> list[list[Linear]]:
    return [[getattr(layer, name) for name in PROJECTIONS] for layer in checkpoint.layers]


def _report(checkpoint: Checkpoint, keep: float, started: float) -> CompressionReport:
    kept = total = 0
    ranks: list[dict[str, int | None]] = []
    for layer in _linears(checkpoint):
        ranks.append({})
        for projection, linear in zip(PROJECTIONS, layer, strict=True):
            if isinstance(linear, FactorPair):
                out, inner = linear.u.shape[0], linear.v.shape[1]
                kept += linear.u.numel() + linear.v.numel()
            else:
                out, inner = linear.weight.shape
                kept += out * inner
            total += out * inner
            ranks[-1][projection] = linear.rank if isinstance(linear, FactorPair) else None
    return CompressionReport(keep, kept / total, tuple(ranks), time.monotonic() - started)
