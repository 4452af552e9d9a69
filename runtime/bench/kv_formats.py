"""Calibrated KV formats with random orthonormal bases, for benchmarks and tests of kernels."""

from collections.abc import Sequence
from itertools import cycle, islice

import torch
from torch import Tensor

from runtime.config import ModelConfig
from runtime.kv.calibration import Artifact
from runtime.kv.fdc import FdcFormat
from runtime.kv.palu import PaluFormat
from runtime.kv.shard import ShardFormat
from runtime.kv.shard.calibrate import K_BITS
from runtime.kv.shard.codes import STEPS


def orthonormal(*shape: int, seed: int) -> Tensor:
    """Return random matrices with orthonormal columns, fp32."""
    generator = torch.Generator().manual_seed(seed)
    basis: Tensor = torch.linalg.qr(torch.randn(*shape, generator=generator))[0]
    return basis


def random_fdc(
    config: ModelConfig, ranks: Sequence[int], device: torch.device | str = "cpu"
) -> FdcFormat:
    """Return `fdc` with random bases.

    Args:
        ranks: ranks of K and then of V of each KV head; they are repeated as often as necessary.
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
    artifact = Artifact(FdcFormat.name, FdcFormat.version, "", {}, tensors)
    return FdcFormat(config, artifact, device=device)


def random_shard(
    config: ModelConfig, rank: int | None = None, device: torch.device | str = "cpu"
) -> ShardFormat:
    """Return `shard` with random bases, and scales for keys of N(0, 1).

    Args:
        rank: coefficients of a token, a multiple of ``2 kv_heads``; None for 3/16 of K.
    """
    heads, width = config.num_kv_heads, config.num_kv_heads * config.head_dim
    rank = rank or -(-width * 3 // (32 * heads)) * 2 * heads
    tensors: dict[str, Tensor] = {}
    for layer in range(config.num_layers):
        tensors[f"k_basis.{layer}"] = orthonormal(width, rank, seed=layer)
        tensors[f"k_mean.{layer}"] = orthonormal(width, 1, seed=-layer - 1)[:, 0] * width**0.5
        tensors[f"k_scale.{layer}"] = STEPS[K_BITS] * torch.linspace(1.5, 0.5, rank)
        tensors[f"k_bits.{layer}"] = torch.full((rank,), K_BITS)
    artifact = Artifact(ShardFormat.name, ShardFormat.version, "", {}, tensors)
    return ShardFormat(config, artifact, device=device)


def random_palu(
    config: ModelConfig,
    ranks: Sequence[int],
    device: torch.device | str = "cpu",
    group_heads: int = 4,
) -> PaluFormat:
    """Return `palu` with random bases.

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
    artifact = Artifact(PaluFormat.name, PaluFormat.version, "", {}, tensors)
    return PaluFormat(config, artifact, device=device)


def _published_shard(
    config: ModelConfig, ranks: Sequence[int], device: torch.device | str = "cpu"
) -> ShardFormat:
    """Return `shard` with its default rank; ``ranks`` are those of other formats."""
    del ranks
    return random_shard(config, device=device)


RANDOM = {"fdc": random_fdc, "palu": random_palu, "shard": _published_shard}
"""Functions that return formats, by name."""
