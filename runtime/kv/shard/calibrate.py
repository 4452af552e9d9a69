"""Mean, basis, bits and scales of `shard` from moments of k before RoPE, and codebooks of V."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from runtime.errors import KVFormatError
from runtime.kv.calibration import Artifact, KVMoments, spectral_basis
from runtime.kv.shard.allocation import allocate
from runtime.kv.shard.codebook import train
from runtime.kv.shard.codes import STEPS
from runtime.kv.shard.commuting import commuting_basis

NAME, VERSION = "shard", 5
K_BITS = 4
"""Bits of a coefficient of K with uniform allocation."""


@dataclass(frozen=True)
class ShardOptions:
    """Options of the calibration.

    Attributes:
        rank: number of PCA coefficients of K per layer and token. It is rounded up to a multiple
            of ``2 kv_heads``. None is 3/16 of ``kv_heads * dim``: 192 for 8 heads of 128.
        step: quantization step of a coefficient of 4 bits, in units of its standard deviation.
            Coefficients are clipped at 7 steps.
        allocation: "uniform" gives 4 bits to each of ``rank`` coefficients; "dynamic" distributes
            the same number of bits to groups of all coefficients, 0 to 8 per coefficient.
        group: coefficients of a group; a multiple of 4 that divides ``kv_heads * dim``. None is
            64, or 1/16 of ``kv_heads * dim`` if that is less: 12 for 3 heads of 64.
        values: codes of V: "scalar", or "vq" with a codebook of 256 vectors of 4 elements.
        k_basis: "pca" for the principal components of all heads, or "commuting" for those that
            commute with RoPE; see `runtime.kv.shard.commuting`.
        seed: seed of the initial vectors of codebooks.
    """

    rank: int | None = None
    step: float = STEPS[K_BITS]
    allocation: str = "uniform"
    group: int | None = None
    values: str = "scalar"
    k_basis: str = "pca"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.step <= 0:
            raise KVFormatError(f"step {self.step} is not positive")
        for name, found, known in (
            ("allocation", self.allocation, ("uniform", "dynamic")),
            ("values", self.values, ("scalar", "vq")),
            ("k_basis", self.k_basis, ("pca", "commuting")),
        ):
            if found not in known:
                raise KVFormatError(f"{name} {found!r} is unknown: choose {' or '.join(known)}")


def calibrate(layers: Iterable[KVMoments], options: ShardOptions, model_hash: str) -> Artifact:
    """Compute means, bases, bits and scales, and with option ``values="vq"`` codebooks.

    Args:
        layers: moments of each layer, in order; with samples of V for codebooks.
        model_hash: hash of the model that the moments were measured on.

    Returns:
        Artifact with tensors for each layer: fp32 ``k_mean.<layer>`` ``[kv_heads * dim]``,
        ``k_basis.<layer>`` ``[kv_heads * dim, rank]`` and ``k_scale.<layer>`` ``[rank]``, the
        value of one quantization step of each coefficient; int64 ``k_bits.<layer>`` ``[rank]``;
        and, with codebooks, fp32 ``v_book.<layer>`` ``[256, 4]``.

    Raises:
        KVFormatError: an option is out of range, or too few tokens were measured.
    """
    tensors: dict[str, Tensor] = {}
    for index, moments in enumerate(layers):
        if not moments.tokens:
            raise KVFormatError(f"layer {index}: no tokens were measured")
        mean = moments.unrotated_sum / moments.tokens
        covariance = moments.unrotated_keys / moments.tokens - torch.outer(mean, mean)
        if options.k_basis == "pca":
            deviations, vectors = spectral_basis(covariance)
        else:
            deviations, vectors = commuting_basis(covariance, moments.values.shape[0])
        bits = _bits(deviations.square(), options, *moments.values.shape[:2])
        kept = bits.nonzero()[:, 0]
        bits = bits[kept]
        on_device = kept.to(deviations.device)
        steps = torch.tensor([(STEPS | {K_BITS: options.step})[b] for b in bits.tolist()])
        # A coefficient that never varies still needs a scale other than 0.
        scales = deviations[on_device].cpu() * steps
        scales = scales.clamp_min(torch.finfo(torch.float32).tiny)
        tensors[f"k_bits.{index}"] = bits
        for name, tensor in (("mean", mean), ("basis", vectors[:, on_device]), ("scale", scales)):
            tensors[f"k_{name}.{index}"] = tensor.float().cpu()
        if options.values == "vq":
            if not moments.value_samples:
                raise KVFormatError(f"layer {index}: no values were kept for a codebook")
            tensors[f"v_book.{index}"] = train(torch.cat(moments.value_samples, 1), options.seed)
    return Artifact(NAME, VERSION, model_hash, asdict(options), tensors)


def _bits(variances: Tensor, options: ShardOptions, kv_heads: int, dim: int) -> Tensor:
    """Return the bits of all coefficients, int64 ``[kv_heads * dim]``; 0 for those not stored."""
    width = kv_heads * dim
    rank = _rank(options.rank, kv_heads, dim)
    if options.allocation == "uniform":
        return torch.where(torch.arange(width) < rank, K_BITS, 0)
    group = options.group or _default_group(width)
    if group % 4 or width % group:
        raise KVFormatError(
            f"groups of {group} coefficients: expected a multiple of 4 that divides {width}"
        )
    budget = rank * K_BITS // group
    of_groups = allocate(variances.view(-1, group).sum(1).tolist(), budget)
    return torch.tensor(of_groups).repeat_interleave(group)


def _rank(requested: int | None, kv_heads: int, dim: int) -> int:
    width, multiple = kv_heads * dim, 2 * kv_heads
    wanted = -(-width * 3 // 16) if requested is None else requested
    rank = -(-wanted // multiple) * multiple
    if not 0 < rank <= width:
        raise KVFormatError(f"rank {requested} of {width}-dimensional keys is not possible")
    return rank


def _default_group(width: int) -> int:
    """Return the largest multiple of 4 up to min(64, ``width / 16``) that divides ``width``."""
    found: int = next(g for g in (*range(min(64, width // 64 * 4), 4, -4), 4) if width % g == 0)
    return found
