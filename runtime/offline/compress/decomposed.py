"""Calibrate and decompose a model, block by block."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.checkpoint.family import LayerLayout
from runtime.checkpoint.weights import Checkpoint, FactorPair, linears_of
from runtime.errors import CompressionError
from runtime.models.registry import model_family
from runtime.offline.compress.decompose import Decomposition, decompose
from runtime.offline.compress.layerwise import LayerwiseModel
from runtime.offline.compress.methods import Method
from runtime.offline.compress.moments import CalibratedLayers, backward_moments, forward_moments
from runtime.offline.compress.perplexity import Progress
from runtime.offline.compress.work import WorkFolder

_SEED = 0
_FORWARD_SHARE = 0.1
"""Fraction of the progress reserved for the forward pass, if the method uses gradients."""


@dataclass(frozen=True)
class Part:
    """Linears that are factorized together.

    Attributes:
        members: (layer, field) of each linear.
        decomposition: rank-one terms of one matrix, the weights of all members stacked by rows, in
            host memory. The factors are rounded to bf16.
    """

    members: tuple[tuple[int, str], ...]
    decomposition: Decomposition


@dataclass(frozen=True)
class DecomposedModel:
    """A decomposed model, which `truncate_model` turns into a checkpoint for any ``keep``.

    Attributes:
        dense: the original checkpoint.
        calibration_hash: result of the function of this name.
        calibration_tokens: number of calibration tokens.
        seconds: elapsed seconds by part of the computation.
        peak_device_bytes: largest memory of tensors on the GPU; 0 on the CPU.
    """

    dense: Checkpoint
    method: Method
    parts: tuple[Part, ...]
    calibration_hash: str
    calibration_tokens: int
    seconds: dict[str, float]
    peak_device_bytes: int


def calibration_hash(tokens: Tensor) -> str:
    """Return the sha256 of calibration tokens `[n, length]`, shape included."""
    text = f"{list(tokens.shape)} {tokens.flatten().tolist()}"
    return hashlib.sha256(text.encode()).hexdigest()


@torch.no_grad()
def decompose_model(
    checkpoint: Checkpoint,
    calibration_tokens: Tensor,
    progress: Progress | None = None,
    *,
    method: Method = Method.FISHER,
    device: torch.device | str = "cpu",
    work: WorkFolder | None = None,
) -> DecomposedModel:
    """Calibrate and decompose; the first step of `compress`.

    Layers are processed one at a time, or two at a time where they share bases: from the first to
    the last, or from the last to the first if the method uses gradients. The decomposition has
    about the size of the linears in bf16, or in fp32 if the checkpoint is fp32.

    Args:
        work: folder that keeps the decomposition, and from which an interrupted call continues;
            None keeps the decomposition in host memory.

    Other arguments and errors are those of `compress`.
    """
    _check_model(checkpoint, calibration_tokens)
    report = progress or (lambda _stage, _fraction: None)
    layout = model_family(checkpoint.config).layout(checkpoint.config)
    model = LayerwiseModel(checkpoint, device)
    if model.device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.reset_peak_memory_stats(model.device)
    blocks = method.blocks(checkpoint.config.num_layers)
    found = {first: work.load(first) for first in work.finished()} if work is not None else {}
    carry = None
    if work is not None and found:
        carry = work.carry(min(found) if method.uses_gradients else max(found))
    missing = [block for block in blocks if block.start not in found]
    for calibrated in _calibrate(model, calibration_tokens, method, missing, carry, report):
        first = calibrated.layers.start
        with model.watch.measure("decomposing"):
            found[first] = [
                _decomposition(calibrated, members, method, layout, checkpoint.embedding.dtype)
                for members in method.groups(calibrated.layers, layout)
            ]
        if work is not None:
            with model.watch.measure("saving"):
                work.save(first, found[first], calibrated.carry)
                found[first] = work.load(first)
        del calibrated
        report("factorizing", _FORWARD_SHARE + (1 - _FORWARD_SHARE) * len(found) / len(blocks))
    return DecomposedModel(
        dense=checkpoint,
        method=method,
        parts=tuple(_parts(found, method, blocks, layout)),
        calibration_hash=calibration_hash(calibration_tokens),
        calibration_tokens=calibration_tokens.numel(),
        seconds=model.watch.seconds,
        peak_device_bytes=(
            torch.cuda.max_memory_allocated(model.device) if model.device.type == "cuda" else 0
        ),
    )


def _parts(
    found: Mapping[int, Sequence[Decomposition]],
    method: Method,
    blocks: Sequence[range],
    layout: LayerLayout,
) -> Iterator[Part]:
    """Yield the parts of all blocks in order.

    Args:
        found: decompositions of each block, by the block's first layer.
    """
    for block in blocks:
        for members, decomposition in zip(
            method.groups(block, layout), found[block.start], strict=True
        ):
            yield Part(members, decomposition)


def _calibrate(
    model: LayerwiseModel,
    tokens: Tensor,
    method: Method,
    missing: list[range],
    carry: Tensor | None,
    report: Progress,
) -> Iterator[CalibratedLayers]:
    """Yield the moments of missing blocks, in the order in which the method computes them."""
    if not method.uses_gradients:
        return forward_moments(model, tokens, missing, carry)
    layers = range(len(missing))  # blocks of one layer; the last ones are finished first

    def report_forward(fraction: float) -> None:
        report("calibrating", _FORWARD_SHARE * fraction)

    return backward_moments(
        model, tokens, layers, _SEED, carry, report_forward, by_row=method.by_row
    )


def _decomposition(
    calibrated: CalibratedLayers,
    members: tuple[tuple[int, str], ...],
    method: Method,
    layout: LayerLayout,
    dtype: torch.dtype,
) -> Decomposition:
    """Decompose the stacked weights of linears, using the sum of their input moments.

    Without input moments, all inputs count alike.

    Factors are rounded to bf16, so that kernels can store them in bf16 without loss. They are
    returned in host memory, in fp32 if ``dtype`` is fp32, and else in bf16.
    """
    first = calibrated.layers.start
    moments = [calibrated.moments[layer - first] for layer, _ in members]
    field = members[0][1]
    inputs = [moment.inputs[layout.input_of(field)] for moment in moments]
    weights = [getattr(calibrated.weights[layer - first], field).weight for layer, _ in members]
    found = decompose(
        weights[0] if len(weights) == 1 else torch.cat(weights),
        _summed(inputs) if method.uses_inputs else None,
        moments[0].gradients[field] if method.uses_gradients else None,
        method.input_damping,
    )
    stored = dtype if dtype == torch.float32 else torch.bfloat16
    u, v = (factor.bfloat16().cpu().to(stored).contiguous() for factor in (found.u, found.v))
    return Decomposition(u, v, found.loss.cpu())


def _summed(matrices: list[Tensor]) -> Tensor:
    return matrices[0] if len(matrices) == 1 else torch.stack(matrices).sum(0)


def _check_model(checkpoint: Checkpoint, tokens: Tensor) -> None:
    linears = (linear for layer in checkpoint.layers for _, linear in linears_of(layer))
    if any(isinstance(linear, FactorPair) for linear in linears):
        raise CompressionError("the checkpoint is already factorized: start from the dense one")
    if tokens.ndim != 2 or tokens.numel() == 0:
        raise CompressionError(f"calibration needs [n, length] tokens, not {list(tokens.shape)}")
    if int(tokens.min()) < 0 or int(tokens.max()) >= checkpoint.config.vocab_size:
        raise CompressionError("calibration tokens are outside the model's vocabulary")
