"""Factorize a dense checkpoint."""

import hashlib
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runtime.checkpoint.canonical import canonical_hash
from runtime.checkpoint.family import LayerLayout
from runtime.checkpoint.weights import (
    Checkpoint,
    Dense,
    Factorization,
    FactorPair,
    Linear,
    linears_of,
    parameters_kept,
)
from runtime.compress.decompose import Decomposition, decompose
from runtime.compress.methods import Allocation, Method
from runtime.compress.moments import LayerMoments, collect_moments
from runtime.compress.perplexity import Progress
from runtime.compress.ranks import Choice, allocate_ranks, log_loss_ranks, uniform_ranks
from runtime.errors import CompressionError
from runtime.models.registry import model_family

RANK_MULTIPLE = 8
"""By default, ranks are multiples of this. Rows of U in bf16 then start at multiples of 16
bytes."""

_SEED = 0
_TINY = 1e-300


@dataclass(frozen=True)
class CompressionReport:
    """Summary of a call of `compress`.

    Attributes:
        keep: requested fraction of the linears' parameters.
        parameters_kept: fraction that remains with the chosen ranks.
        ranks: one mapping per layer, from the field of each linear to its rank, or to None if the
            linear is dense.
        seconds: elapsed time in seconds.
    """

    keep: float
    parameters_kept: float
    ranks: tuple[dict[str, int | None], ...]
    seconds: float

    @property
    def factorized(self) -> int:
        """Number of linears that became factor pairs."""
        return sum(rank is not None for layer in self.ranks for rank in layer.values())


@dataclass(frozen=True)
class Part:
    """Linears that are factorized together.

    Attributes:
        members: (layer, field) of each linear.
        decomposition: rank-one terms of one matrix, the weights of all members stacked by rows.
    """

    members: tuple[tuple[int, str], ...]
    decomposition: Decomposition


@dataclass(frozen=True)
class DecomposedModel:
    """A decomposed model, which `truncate_model` turns into a checkpoint for any ``keep``.

    Attributes:
        dense: the original checkpoint.
        calibration_hash: see `calibration_hash`.
        calibration_tokens: number of calibration tokens.
    """

    dense: Checkpoint
    method: Method
    parts: tuple[Part, ...]
    calibration_hash: str
    calibration_tokens: int


def calibration_hash(tokens: Tensor) -> str:
    """Return the sha256 of calibration tokens `[n, length]`, shape included."""
    text = f"{list(tokens.shape)} {tokens.flatten().tolist()}"
    return hashlib.sha256(text.encode()).hexdigest()


def artifact_key(
    model_hash: str, keep: float, calibration_tokens: Tensor, method: Method = Method.FISHER
) -> str:
    """Return 32 hex digits that identify the result of `compress` before it is computed."""
    label = method.label(method.allocation)
    text = f"{label} {model_hash} {float(keep)!r} {calibration_hash(calibration_tokens)}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def compress(
    checkpoint: Checkpoint,
    calibration_tokens: Tensor,
    keep: float,
    progress: Progress | None = None,
    rank_multiple: int = RANK_MULTIPLE,
    *,
    method: Method = Method.FISHER,
    allocation: Allocation | None = None,
) -> tuple[Checkpoint, CompressionReport]:
    """Factorize the linears of a dense fp32 checkpoint to at most ``keep`` of their parameters.

    Args:
        checkpoint: dense checkpoint; its device is used for the computation.
        calibration_tokens: int64 ``[n, length]``; each row is a separate piece of real text.
        keep: fraction of the linears' parameters to keep; 1.0 returns ``checkpoint``.
        progress: called with "calibrating" or "factorizing" and the overall fraction done.
        rank_multiple: number of which all ranks are multiples.
        allocation: how ranks are distributed; None for the method's default.

    Raises:
        CompressionError: ``keep`` is not in (0, 1] or cannot be reached, the checkpoint is already
            factorized, or tokens are outside its vocabulary.
    """
    started = time.monotonic()
    _check_keep(keep)
    if keep == 1.0:
        return checkpoint, _report(checkpoint, keep, started)
    model = decompose_model(checkpoint, calibration_tokens, progress, method=method)
    made = truncate_model(model, keep, rank_multiple, allocation=allocation)
    return made, _report(made, keep, started)


@torch.no_grad()
def decompose_model(
    checkpoint: Checkpoint,
    calibration_tokens: Tensor,
    progress: Progress | None = None,
    *,
    method: Method = Method.FISHER,
) -> DecomposedModel:
    """Calibrate and decompose; the first step of `compress`.

    The decomposition takes about twice the memory of the linears.
    """
    _check_model(checkpoint, calibration_tokens)
    report = progress or (lambda _stage, _fraction: None)
    layout = model_family(checkpoint.config).layout(checkpoint.config)
    moments = collect_moments(
        checkpoint,
        calibration_tokens,
        _SEED,
        lambda stage, done: report(stage, 0.8 * done),
        gradients=method.uses_gradients,
    )
    groups = list(method.groups(len(moments), layout))
    parts: list[Part] = []
    for members in groups:
        decomposition = _decomposition(checkpoint, moments, members, method, layout)
        parts.append(Part(members, decomposition))
        report("factorizing", 0.8 + 0.2 * len(parts) / len(groups))
    return DecomposedModel(
        checkpoint,
        method,
        tuple(parts),
        calibration_hash(calibration_tokens),
        calibration_tokens.numel(),
    )


def truncate_model(
    model: DecomposedModel,
    keep: float,
    rank_multiple: int = RANK_MULTIPLE,
    *,
    allocation: Allocation | None = None,
) -> Checkpoint:
    """Return the factorized checkpoint for ``keep``; the second step of `compress`.

    Arguments and errors are those of `compress`.
    """
    _check_keep(keep)
    checkpoint, allocation = model.dense, allocation or model.method.allocation
    ranks = _ranks(model, keep, rank_multiple, allocation)
    made: list[dict[str, Linear]] = [{} for _ in checkpoint.layers]
    for part, rank in zip(model.parts, ranks, strict=True):
        for (index, field), linear in _truncated(checkpoint, part, rank).items():
            made[index][field] = linear
    layers = tuple(
        replace(layer, **linears) for layer, linears in zip(checkpoint.layers, made, strict=True)
    )
    factorization = Factorization(
        method=model.method.label(allocation),
        source_hash=checkpoint.model_hash,
        calibration_hash=model.calibration_hash,
        calibration_tokens=model.calibration_tokens,
    )
    result = replace(checkpoint, layers=layers, keep=keep, factorization=factorization)
    return replace(result, model_hash=canonical_hash(result))


def _ranks(
    model: DecomposedModel, keep: float, multiple: int, allocation: Allocation
) -> list[int | None]:
    choices = [
        Choice(*part.decomposition.shape, part.decomposition.loss.cpu().numpy())
        for part in model.parts
    ]
    match allocation:
        case Allocation.UNIFORM:
            return uniform_ranks(choices, keep, multiple)
        case Allocation.LOSS:
            if not model.method.uses_gradients:
                # Losses are squared output errors; normalize them by the output power.
                choices = [replace(c, loss=c.loss / max(c.loss.sum(), _TINY)) for c in choices]
            return allocate_ranks(choices, keep, multiple)
        case Allocation.LOG_LOSS:
            kinds = [(part.members[0][1], len(part.members)) for part in model.parts]
            return log_loss_ranks(choices, kinds, keep, multiple, model.calibration_tokens)


def _truncated(
    checkpoint: Checkpoint, part: Part, rank: int | None
) -> dict[tuple[int, str], Linear]:
    """Return the linears of a part by (layer, field); its factor pairs share one V.

    Factors are rounded to bf16 for any dtype of the checkpoint, so that kernels can store them in
    bf16 without loss.
    """
    dense = {member: _dense(checkpoint, *member) for member in part.members}
    pair = part.decomposition.truncate(rank)
    if isinstance(pair, Dense):
        return dict(dense)
    u, v = (factor.bfloat16().to(factor.dtype) for factor in (pair.u, pair.v))
    pairs: dict[tuple[int, str], Linear] = {}
    end = 0
    for member, linear in dense.items():
        start, end = end, end + len(linear.weight)
        pairs[member] = FactorPair(u[start:end].clone(), v, linear.bias)
    return pairs


def _decomposition(
    checkpoint: Checkpoint,
    moments: tuple[LayerMoments, ...],
    members: tuple[tuple[int, str], ...],
    method: Method,
    layout: LayerLayout,
) -> Decomposition:
    """Decompose the stacked weights of linears, using the sum of their input moments."""
    inputs = [moments[index].inputs[layout.input_of(field)] for index, field in members]
    first, field = members[0]
    weights = [_dense(checkpoint, *member).weight for member in members]
    return decompose(
        Dense(weights[0] if len(weights) == 1 else torch.cat(weights)),
        inputs[0] if len(inputs) == 1 else torch.stack(inputs).sum(0),
        moments[first].gradients[field] if method.uses_gradients else None,
        method.input_damping,
    )


def _dense(checkpoint: Checkpoint, index: int, field: str) -> Dense:
    linear = getattr(checkpoint.layers[index], field)
    assert isinstance(linear, Dense)  # checked by `_check_model`
    return linear


def _check_keep(keep: float) -> None:
    if not 0.0 < keep <= 1.0:
        raise CompressionError(f"keep must be a fraction in (0, 1], not {keep}")


def _check_model(checkpoint: Checkpoint, tokens: Tensor) -> None:
    if any(rank is not None for layer in ranks_of(checkpoint) for rank in layer.values()):
        raise CompressionError("the checkpoint is already factorized: start from the dense one")
    if tokens.ndim != 2 or tokens.numel() == 0:
        raise CompressionError(f"calibration needs [n, length] tokens, not {list(tokens.shape)}")
    if int(tokens.min()) < 0 or int(tokens.max()) >= checkpoint.config.vocab_size:
        raise CompressionError("calibration tokens are outside the model's vocabulary")


def ranks_of(checkpoint: Checkpoint) -> tuple[dict[str, int | None], ...]:
    """Return, for each layer, the rank of each linear by field. Dense linears have None."""
    return tuple(
        {
            field: linear.rank if isinstance(linear, FactorPair) else None
            for field, linear in linears_of(layer)
        }
        for layer in checkpoint.layers
    )


def _report(checkpoint: Checkpoint, keep: float, started: float) -> CompressionReport:
    return CompressionReport(
        keep=keep,
        parameters_kept=parameters_kept(checkpoint),
        ranks=ranks_of(checkpoint),
        seconds=time.monotonic() - started,
    )
