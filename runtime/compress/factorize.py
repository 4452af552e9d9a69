"""Makes a factorized checkpoint of a dense one."""

import hashlib
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoint.assemble import PROJECTIONS
from runtime.checkpoint.canonical import canonical_hash
from runtime.checkpoint.weights import (
    Checkpoint,
    Dense,
    Factorization,
    FactorPair,
    Linear,
    parameters_kept,
)
from runtime.compress.decompose import Decomposition, decompose
from runtime.compress.methods import Allocation, Method
from runtime.compress.moments import INPUT_OF, LayerMoments, collect_moments
from runtime.compress.perplexity import Progress
from runtime.compress.ranks import Choice, allocate_ranks, log_loss_ranks, uniform_ranks
from runtime.errors import CompressionError

RANK_MULTIPLE = 8
"""Rows of U in bf16 then start at multiples of 16 bytes."""

_SEED = 0
_TINY = 1e-300


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
class Part:
    """Projections, by layer and field, that are factorized together: their W stacked by rows."""

    members: tuple[tuple[int, str], ...]
    decomposition: Decomposition


@dataclass(frozen=True)
class DecomposedModel:
    """A model that can be truncated to any ``keep``: what takes the time, done once."""

    dense: Checkpoint
    method: Method
    parts: tuple[Part, ...]
    calibration_hash: str
    calibration_tokens: int


def calibration_hash(tokens: Tensor) -> str:
    """sha256 of token ids and how they are cut into rows."""
    text = f"{list(tokens.shape)} {tokens.flatten().tolist()}"
    return hashlib.sha256(text.encode()).hexdigest()


def artifact_key(
    model_hash: str, keep: float, calibration_tokens: Tensor, method: Method = Method.FISHER
) -> str:
    """What names the result of `compress` before it is made: 32 hexadecimal digits."""
    label = method.label(method.allocation)
    facts = f"{label} {model_hash} {float(keep)!r} {calibration_hash(calibration_tokens)}"
    return hashlib.sha256(facts.encode()).hexdigest()[:32]


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
    """Factorize the projections of a dense fp32 checkpoint to at most ``keep`` of their parameters.

    Args:
        checkpoint: dense, on the device that is to do the work.
        calibration_tokens: ``[n, length]`` int64, real text; each row is a text of its own.
        keep: the fraction of the projections' parameters to keep; 1.0 is the dense model itself.
        progress: told "calibrating" and "factorizing", and the fraction of the whole that is done.
        rank_multiple: ranks are multiples of it.
        method, allocation: how; None is the method's own allocation of ranks.

    Raises `CompressionError` for a ``keep`` that is out of (0, 1] or cannot be reached, for a
    checkpoint that is factorized already, and for tokens that are none of the model's.
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
    """Calibrate and decompose, as `compress` does. Takes the memory of twice the projections."""
    _check_model(checkpoint, calibration_tokens)
    told = progress or (lambda _stage, _fraction: None)
    moments = collect_moments(
        checkpoint,
        calibration_tokens,
        _SEED,
        lambda stage, done: told(stage, 0.8 * done),
        gradients=method.uses_gradients,
    )
    groups = list(method.groups(len(moments)))
    parts: list[Part] = []
    for members in groups:
        parts.append(Part(members, _decomposition(checkpoint, moments, members, method)))
        told("factorizing", 0.8 + 0.2 * len(parts) / len(groups))
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
    """The factorized checkpoint at ``keep``. Errors as of `compress`."""
    _check_keep(keep)
    checkpoint, allocation = model.dense, allocation or model.method.allocation
    ranks = _ranks(model, keep, rank_multiple, allocation)
    made: dict[tuple[int, str], Any] = {}
    for part, rank in zip(model.parts, ranks, strict=True):
        made |= _truncated(checkpoint, part, rank)
    layers = tuple(
        replace(layer, **{projection: made[index, projection] for projection in PROJECTIONS})
        for index, layer in enumerate(checkpoint.layers)
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
            if not model.method.uses_gradients:  # an error of the output: a share of its power
                choices = [replace(c, loss=c.loss / max(c.loss.sum(), _TINY)) for c in choices]
            return allocate_ranks(choices, keep, multiple)
        case Allocation.LOG_LOSS:
            kinds = [(part.members[0][1], len(part.members)) for part in model.parts]
            return log_loss_ranks(choices, kinds, keep, multiple, model.calibration_tokens)


def _truncated(
    checkpoint: Checkpoint, part: Part, rank: int | None
) -> dict[tuple[int, str], Linear]:
    """The projections of a part; pairs share V, and factors are as bf16 has them, whatever they are
    computed in: half the memory to read."""
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
) -> Decomposition:
    """Of projections together: their inputs' moments add up."""
    inputs = [moments[index].inputs[INPUT_OF[projection]] for index, projection in members]
    first, projection = members[0]
    weights = [_dense(checkpoint, *member).weight for member in members]
    return decompose(
        Dense(weights[0] if len(weights) == 1 else torch.cat(weights)),
        inputs[0] if len(inputs) == 1 else torch.stack(inputs).sum(0),
        moments[first].gradients[projection] if method.uses_gradients else None,
        method.input_damping,
    )


def _dense(checkpoint: Checkpoint, index: int, projection: str) -> Dense:
    linear = getattr(checkpoint.layers[index], projection)
    assert isinstance(linear, Dense)  # `_check_model` has seen to it
    return linear


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


def _linears(checkpoint: Checkpoint) -> list[dict[str, Linear]]:
    return [{name: getattr(layer, name) for name in PROJECTIONS} for layer in checkpoint.layers]


def _report(checkpoint: Checkpoint, keep: float, started: float) -> CompressionReport:
    return CompressionReport(
        keep=keep,
        parameters_kept=parameters_kept(checkpoint),
        ranks=ranks_of(checkpoint),
        seconds=time.monotonic() - started,
    )
