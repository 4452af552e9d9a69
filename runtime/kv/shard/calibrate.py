"""Mean, basis and scales of `shard` from second moments of k before RoPE."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from runtime.errors import KVFormatError
from runtime.kv.calibration import Artifact, KVMoments, spectral_basis

NAME, VERSION = "shard", 2


@dataclass(frozen=True)
class ShardOptions:
    """Options of the calibration.

    Attributes:
        rank: number of PCA coefficients of K per layer and token. It is rounded up to a multiple
            of ``2 kv_heads``. None is 3/16 of ``kv_heads * dim``: 192 for 8 heads of 128.
        step: quantization step of a coefficient, in units of its standard deviation. Coefficients
            are clipped at 7 steps.
    """

    rank: int | None = None
    step: float = 0.4


def calibrate(layers: Iterable[KVMoments], options: ShardOptions, model_hash: str) -> Artifact:
    """Compute mean, basis and scales.

    Args:
        layers: moments of each layer, in order.
        model_hash: hash of the model that the moments were measured on.

    Returns:
        Artifact with fp32 tensors for each layer: ``k_mean.<layer>`` ``[kv_heads * dim]``,
        ``k_basis.<layer>`` ``[kv_heads * dim, rank]`` and ``k_scale.<layer>`` ``[rank]``, the
        value of one quantization step of each coefficient.

    Raises:
        KVFormatError: an option is out of range, or no tokens were measured.
    """
    if options.step <= 0:
        raise KVFormatError(f"step {options.step} is not positive")
    tensors: dict[str, Tensor] = {}
    for index, moments in enumerate(layers):
        if not moments.tokens:
            raise KVFormatError(f"layer {index}: no tokens were measured")
        mean = moments.unrotated_sum / moments.tokens
        covariance = moments.unrotated_keys / moments.tokens - torch.outer(mean, mean)
        rank = _rank(options.rank, *moments.values.shape[:2])
        deviations, vectors = spectral_basis(covariance)
        # A coefficient that never varies still needs a scale other than 0.
        scales = (deviations[:rank] * options.step).clamp_min(torch.finfo(torch.float32).tiny)
        for name, tensor in (("mean", mean), ("basis", vectors[:, :rank]), ("scale", scales)):
            tensors[f"k_{name}.{index}"] = tensor.float().cpu()
    return Artifact(NAME, VERSION, model_hash, asdict(options), tensors)


def _rank(requested: int | None, kv_heads: int, dim: int) -> int:
    width, multiple = kv_heads * dim, 2 * kv_heads
    wanted = -(-width * 3 // 16) if requested is None else requested
    rank = -(-wanted // multiple) * multiple
    if not 0 < rank <= width:
        raise KVFormatError(f"rank {requested} of {width}-dimensional keys is not possible")
    return rank
