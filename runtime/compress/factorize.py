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

METHOD = "fisher-svd-2"
"""Truncation-aware SVD weighted by inputs and by output gradients, ranks allocated over the whole
model by estimated loss, factors in bf16. The number changes when the same inputs would give other
factors."""

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


@dataclass(frozen=True)
class DecomposedModel:
    """A model whose projections can be truncated to any ``keep``: what takes the time, done once.

    ``parts`` are in the order of layers and, within one, of `PROJECTIONS`.
    """

    dense: Checkpoint
    parts: tuple[Decomposition, ...]
    calibration_hash: str
    calibration_tokens: int


def calibration_hash(tokens: Tensor) -> str:
    """sha256 of token ids and how they are cut into rows."""
    text = f"{list(tokens.shape)} {tokens.flatten().tolist()}"
    return hashlib.sha256(text.encode()).hexdigest()


def artifact_key(model_hash: str, keep: float, calibration_tokens: Tensor) -> str:
    """What names the result of `compress` before it is made: 32 hexadecimal digits."""
    facts = f"{METHOD} {model_hash} {float(keep)!r} {calibration_hash(calibration_tokens)}"
    return hashlib.sha256(facts.encode()).hexdigest()[:32]


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
    _check_keep(keep)
    if keep == 1.0:
        return checkpoint, _report(checkpoint, keep, started)
    model = decompose_model(checkpoint, calibration_tokens, progress)
    made = truncate_model(model, keep, rank_multiple)
    return made, _report(made, keep, started)


@torch.no_grad()
def decompose_model(
    checkpoint: Checkpoint, calibration_tokens: Tensor, progress: Progress | None = None
) -> DecomposedModel:
    """Calibrate and decompose, as `compress` does. Takes the memory of twice the projections."""
    _check_model(checkpoint, calibration_tokens)
    told = progress or (lambda _stage, _fraction: None)
    moments = collect_moments(
        checkpoint, calibration_tokens, _SEED, lambda stage, done: told(stage, 0.8 * done)
    )
    parts: list[Decomposition] = []
    for part in _decompositions(checkpoint, moments):
        parts.append(part)
        told("factorizing", 0.8 + 0.2 * len(parts) / (len(moments) * len(PROJECTIONS)))
    return DecomposedModel(
        checkpoint, tuple(parts), calibration_hash(calibration_tokens), calibration_tokens.numel()
    )


def truncate_model(
    model: DecomposedModel, keep: float, rank_multiple: int = RANK_MULTIPLE
) -> Checkpoint:
    """The factorized checkpoint at ``keep``. Errors as of `compress`."""
    _check_keep(keep)
    checkpoint = model.dense
    choices = [Choice(*part.shape, part.loss.cpu().numpy()) for part in model.parts]
    ranks = allocate_ranks(choices, keep, rank_multiple)
    linears = map(_rounded, map(Decomposition.truncate, model.parts, ranks))
    layers = tuple(
        replace(layer, **{projection: next(linears) for projection in PROJECTIONS})
        for layer in checkpoint.layers
    )
    factorization = Factorization(
        method=METHOD,
        source_hash=checkpoint.model_hash,
        calibration_hash=model.calibration_hash,
        calibration_tokens=model.calibration_tokens,
    )
    made = replace(checkpoint, layers=layers, keep=keep, factorization=factorization)
    return replace(made, model_hash=canonical_hash(made))


def _rounded(linear: Linear) -> Any:
    """Factors as bf16 has them, whatever they are computed in: half the memory to read."""
    if isinstance(linear, Dense):
        return linear
    u, v = (factor.bfloat16().to(factor.dtype) for factor in (linear.u, linear.v))
    return replace(linear, u=u, v=v)


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


def _check_keep(keep: float) -> None:
    if not 0.0 < keep <= 1.0:
        raise CompressionError(f"keep is a fraction of parameters in (0, 1], not {keep}")


def _check_model(checkpoint: Checkpoint, tokens: Tensor) -> None:
    if any(not isinstance(x, Dense) for layer in _linears(checkpoint) for x in layer.values()):
        raise CompressionError("the checkpoint is factorized already: start from the dense one")
    if tokens.ndim != 2 or tokens.numel() == 0:
        raise CompressionError(f"calibration needs [n, length] tokens, not {list(tokens.shape)}")
    if int(tokens.min()) < 0 or int(tokens.max()) >= checkpoint.config.vocab_size:
        raise CompressionError("the calibration tokens are not of this model's vocabulary")


def ranks_of(checkpoint: Checkpoint) -> tuple[dict[str, int | None], ...]:
    """The rank of each projection of each layer, None where it is dense."""
    return tuple(
        {
            name: linear.rank if isinstance(linear, FactorPair) else None
            for name, linear in layer.items()
        }
        for layer in _linears(checkpoint)
    )


def parameters_kept(checkpoint: Checkpoint) -> float:
    """The fraction of the dense projections' parameters that a checkpoint's projections have."""
    kept = total = 0
    for linear in (linear for layer in _linears(checkpoint) for linear in layer.values()):
        if isinstance(linear, FactorPair):
            kept += linear.u.numel() + linear.v.numel()
            total += linear.u.shape[0] * linear.v.shape[1]
        else:
            kept += linear.weight.numel()
            total += linear.weight.numel()
    return kept / total


def _linears(checkpoint: Checkpoint) -> list[dict[str, Linear]]:
    return [{name: getattr(layer, name) for name in PROJECTIONS} for layer in checkpoint.layers]


def _report(checkpoint: Checkpoint, keep: float, started: float) -> CompressionReport:
    return CompressionReport(
        keep=keep,
        parameters_kept=parameters_kept(checkpoint),
        ranks=ranks_of(checkpoint),
        seconds=time.monotonic() - started,
    )
