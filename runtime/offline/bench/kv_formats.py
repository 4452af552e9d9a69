"""Calibrated KV formats with random orthonormal bases, for benchmarks and tests of kernels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runtime.config import ModelConfig
from runtime.kv.calibration import Artifact
from runtime.kv.fdc import FdcFormat
from runtime.kv.format import Plane
from runtime.kv.palu import PaluFormat
from runtime.kv.quantized import QuantizedFormat
from runtime.kv.registry import COMPRESSED
from runtime.kv.shard import ShardFormat
from runtime.kv.shard.calibrate import K_BITS
from runtime.kv.shard.codes import STEPS
from runtime.offline.bench.shapes import PAGE, SHAPES

if TYPE_CHECKING:  # optional: Triton
    from runtime.kv.gpu import CompressedPageKernels


def orthonormal(*shape: int, seed: int) -> Tensor:
    """Return random matrices with orthonormal columns, fp32."""
    generator = torch.Generator().manual_seed(seed)
    basis: Tensor = torch.linalg.qr(torch.randn(*shape, generator=generator))[0]
    return basis


def fdc_artifact(
    config: ModelConfig, ranks: Sequence[int], *, compressed_prefill: bool = False
) -> Artifact:
    """Return a calibration of `fdc` with random bases.

    Args:
        ranks: ranks of K and then of V of each KV head; they are repeated as often as necessary.
        compressed_prefill: see `FdcOptions`.
    """
    heads, dim = config.num_kv_heads, config.head_dim
    own = torch.tensor(list(islice(cycle(ranks), 2 * heads))).view(2, heads)
    tensors = {f"{x}_ranks": own[i].repeat(config.num_layers, 1) for i, x in enumerate("kv")}
    for layer in range(config.num_layers):
        for i, x in enumerate("kv"):
            width = int(own[i].max())
            basis = orthonormal(heads, dim, width, seed=2 * layer + i)
            basis *= torch.arange(width) < own[i][:, None, None]
            tensors[f"{x}_basis.{layer}"] = basis
    options = {"compressed_prefill": compressed_prefill}
    return Artifact(FdcFormat.name, FdcFormat.version, "", options, tensors)


def shard_artifact(
    config: ModelConfig, ranks: Sequence[int] = (), model_hash: str = ""
) -> Artifact:
    """Return a calibration of `shard` with random bases, and scales for keys of N(0, 1).

    Args:
        ranks: number of coefficients of a token, a multiple of ``2 kv_heads``; by default, 3/16 of
            the elements of K.
    """
    heads, width = config.num_kv_heads, config.num_kv_heads * config.head_dim
    rank = ranks[0] if ranks else -(-width * 3 // (32 * heads)) * 2 * heads
    tensors: dict[str, Tensor] = {}
    for layer in range(config.num_layers):
        tensors[f"k_basis.{layer}"] = orthonormal(width, rank, seed=layer)
        tensors[f"k_mean.{layer}"] = orthonormal(width, 1, seed=-layer - 1)[:, 0] * width**0.5
        tensors[f"k_scale.{layer}"] = STEPS[K_BITS] * torch.linspace(1.5, 0.5, rank)
        tensors[f"k_bits.{layer}"] = torch.full((rank,), K_BITS)
    return Artifact(ShardFormat.name, ShardFormat.version, model_hash, {}, tensors)


def random_shard(
    config: ModelConfig, ranks: Sequence[int] = (), device: torch.device | str = "cpu"
) -> ShardFormat:
    """Return `shard` with random bases; see `shard_artifact`."""
    return ShardFormat(config, shard_artifact(config, ranks), device=device)


def random_fdc(
    config: ModelConfig,
    ranks: Sequence[int],
    device: torch.device | str = "cpu",
    *,
    compressed_prefill: bool = False,
) -> FdcFormat:
    """Return `fdc` with random bases; see `fdc_artifact`."""
    artifact = fdc_artifact(config, ranks, compressed_prefill=compressed_prefill)
    return FdcFormat(config, artifact, device=device)


def palu_artifact(config: ModelConfig, ranks: Sequence[int], group_heads: int = 4) -> Artifact:
    """Return a calibration of `palu` with random bases.

    Args:
        ranks: rank of K and rank of V per KV head.
        group_heads: KV heads of a group, a divisor of their number.
    """
    heads, dim = config.num_kv_heads, config.head_dim
    k_rank, v_rank = ranks
    groups = heads // group_heads, group_heads * dim, group_heads * k_rank
    tensors = {}
    for layer in range(config.num_layers):
        tensors[f"k_basis.{layer}"] = orthonormal(*groups, seed=2 * layer)
        tensors[f"v_basis.{layer}"] = orthonormal(heads, dim, v_rank, seed=2 * layer + 1)
    return Artifact(PaluFormat.name, PaluFormat.version, "", {}, tensors)


def random_palu(
    config: ModelConfig,
    ranks: Sequence[int],
    device: torch.device | str = "cpu",
    group_heads: int = 4,
) -> PaluFormat:
    """Return `palu` with random bases; see `palu_artifact`."""
    return PaluFormat(config, palu_artifact(config, ranks, group_heads), device=device)


RANDOM: dict[str, Callable[..., FdcFormat | PaluFormat | ShardFormat]] = {
    "fdc": random_fdc,
    "palu": random_palu,
    "palu-heads": partial(random_palu, group_heads=1),
    "shard": random_shard,
}
"""Functions that return formats, by name."""
RANKS: dict[str, tuple[int, ...]] = {
    "fdc": tuple(64 if index in (2, 7, 12) else 48 for index in range(16)),
    "palu": (48, 56),
    "shard": (),
}
"""Ranks by format. With 8 KV heads, those of `fdc` are 51 on average; `palu` has 52."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fdc-tiles": ("fdc", {"by_cost": False}),
    "fdc-no-balance": ("fdc", {"splits": 0}),
}
"""Ablations: the format, and fields of `KernelSource` to replace."""
FORMATS = (
    *(name for name in COMPRESSED if COMPRESSED[name](SHAPES["llama-3-8b"]).fused),
    *RANDOM,
    *VARIANTS,
)
"""Formats with fused kernels, and ablations of them."""


@dataclass(frozen=True)
class MeasuredFormat:
    """A format of the benchmark.

    Attributes:
        planes: compressed planes of each layer.
        kernels: kernels of each layer.
        stored_bytes: mean over layers of the bytes that a stored token takes in a layer.
        read_bytes: the same without padding, which attention does not read.
    """

    planes: list[tuple[Plane, ...]]
    kernels: "list[CompressedPageKernels]"
    stored_bytes: float
    read_bytes: float


def measured_format(
    name: str,
    config: ModelConfig,
    ranks: Mapping[str, Sequence[int]],
    options: Mapping[str, Any],
    device: torch.device | str,
) -> MeasuredFormat:
    """Return a format with random bases.

    Args:
        name: one of `FORMATS`.
        config: a model with as many layers as are measured.
        ranks: ranks by format.
        options: fields of `KernelSource` to replace. Attention is then that of `KernelSource`, not
            of its ``fragments``.
    """
    from runtime.kv.gpu import CompressedPageKernels  # optional: Triton

    name, changes = VARIANTS.get(name, (name, {}))
    if options:
        options = {**options, "fragments": None}
    layers = range(config.num_layers)
    kernels: list[CompressedPageKernels]
    if name in RANDOM:
        calibrated = RANDOM[name](config, ranks.get(name.partition("-")[0], ()), device)
        source = replace(calibrated.kernel_source(), **{**options, **changes})
        shared = CompressedPageKernels(config, source)
        kernels = [shared.of_layer(calibrated.layer(n).kernel_inputs()) for n in layers]
        planes = [calibrated.planes(n, PAGE) for n in layers]
    else:
        quantized = COMPRESSED[name](config)
        assert isinstance(quantized, QuantizedFormat)
        source = replace(quantized.kernel_source(), **options)
        shared = CompressedPageKernels(config, source)
        kernels = [shared.of_layer(quantized.kernel_inputs(torch.device(device)))] * len(layers)
        planes = [quantized.planes(n, PAGE) for n in layers]
    of_layers = [sum(_token_bytes(plane) for plane in layer) for layer in planes]
    stored = read = sum(of_layers) / len(layers)
    if name == "fdc":
        assert isinstance(calibrated, FdcFormat)
        read = sum(calibrated.unpadded_bytes_per_token(n) for n in layers) / len(layers)
    return MeasuredFormat(planes, kernels, stored, read)


def _token_bytes(plane: Plane) -> int:
    heads, _, width = plane.shape
    return heads * width * plane.dtype.itemsize
