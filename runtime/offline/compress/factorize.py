"""Factorize a dense checkpoint."""

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runtime.checkpoint.canonical import canonical_hash
from runtime.checkpoint.weights import (
    Checkpoint,
    Dense,
    Factorization,
    FactorPair,
    Linear,
    linears_of,
    parameters_kept,
)
from runtime.errors import CompressionError
from runtime.offline.compress.decomposed import (
    DecomposedModel,
    Part,
    calibration_hash,
    decompose_model,
)
from runtime.offline.compress.methods import Allocation, Method
from runtime.offline.compress.perplexity import Progress
from runtime.offline.compress.ranks import Choice, allocate_ranks, log_loss_ranks, uniform_ranks
from runtime.offline.compress.work import WorkFolder

RANK_MULTIPLE = 8
"""Default multiple to which ranks are rounded. It aligns the rows of U in bf16 to 16 bytes."""

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
        seconds_by_part: elapsed seconds of the parts of calibration and decomposition.
        peak_device_bytes: largest memory of tensors on the GPU; 0 on the CPU.
    """

    keep: float
    parameters_kept: float
    ranks: tuple[dict[str, int | None], ...]
    seconds: float
    seconds_by_part: Mapping[str, float]
    peak_device_bytes: int

    @property
    def factorized(self) -> int:
        """Number of linears that became factor pairs."""
        return sum(rank is not None for layer in self.ranks for rank in layer.values())


def artifact_key(
    model_hash: str,
    keep: float,
    calibration_tokens: Tensor,
    method: Method = Method.FISHER,
    allocation: Allocation | None = None,
) -> str:
    """Return 32 hex digits that identify the result of `compress` before it is computed."""
    label = method.label(allocation or method.allocation)
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
    device: torch.device | str = "cpu",
    work: WorkFolder | None = None,
) -> tuple[Checkpoint, CompressionReport]:
    """Factorize the linears of a dense checkpoint to at most ``keep`` of their parameters.

    Args:
        checkpoint: dense checkpoint in host memory, of any dtype; it may be memory-mapped.
        calibration_tokens: int64 ``[n, length]``; each row is a separate piece of real text.
        keep: fraction of the linears' parameters to keep; 1.0 returns ``checkpoint``.
        progress: called with "calibrating" or "factorizing" and the overall fraction done.
        rank_multiple: number of which all ranks are multiples.
        allocation: how ranks are distributed; None for the method's default.
        device: device of the computation. It holds one layer at a time.
        work: folder that keeps finished layers; an interrupted call with an equal `artifact_key`
            continues from them. None keeps them in host memory.

    Returns:
        The factorized checkpoint, whose factors are views of the decomposition, and a report.

    Raises:
        CompressionError: ``keep`` is not in (0, 1] or cannot be reached, the checkpoint is already
            factorized, tokens are outside its vocabulary, or the work folder is damaged.
    """
    started = time.monotonic()
    _check_keep(keep)
    made = checkpoint
    model = None
    if keep < 1.0:
        model = decompose_model(
            checkpoint, calibration_tokens, progress, method=method, device=device, work=work
        )
        made = truncate_model(model, keep, rank_multiple, allocation=allocation)
    return made, CompressionReport(
        keep=keep,
        parameters_kept=parameters_kept(made),
        ranks=ranks_of(made),
        seconds=time.monotonic() - started,
        seconds_by_part=model.seconds if model else {},
        peak_device_bytes=model.peak_device_bytes if model else 0,
    )


def truncate_model(
    model: DecomposedModel,
    keep: float,
    rank_multiple: int = RANK_MULTIPLE,
    *,
    allocation: Allocation | None = None,
) -> Checkpoint:
    """Return the factorized checkpoint for ``keep``; the second step of `compress`.

    The factors are views of the decomposition. Arguments and errors are those of `compress`.
    """
    _check_keep(keep)
    checkpoint = model.dense
    allocation = allocation or model.method.allocation
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
    """Return the linears of a part by (layer, field); its factor pairs share one V."""
    dense = {member: _dense(checkpoint, *member) for member in part.members}
    if rank is None:
        return dict(dense)
    pair = part.decomposition.truncate(rank)
    pairs: dict[tuple[int, str], Linear] = {}
    end = 0
    for member, linear in dense.items():
        start, end = end, end + len(linear.weight)
        pairs[member] = FactorPair(pair.u[start:end], pair.v, linear.bias)
    return pairs


def _dense(checkpoint: Checkpoint, index: int, field: str) -> Dense:
    linear = getattr(checkpoint.layers[index], field)
    assert isinstance(linear, Dense)  # checked by `decompose_model`
    return linear


def _check_keep(keep: float) -> None:
    if not 0.0 < keep <= 1.0:
        raise CompressionError(f"keep must be a fraction in (0, 1], not {keep}")


def ranks_of(checkpoint: Checkpoint) -> tuple[dict[str, int | None], ...]:
    """Return, for each layer, the rank of each linear by field. Dense linears have None."""
    return tuple(
        {
            field: linear.rank if isinstance(linear, FactorPair) else None
            for field, linear in linears_of(layer)
        }
        for layer in checkpoint.layers
    )
