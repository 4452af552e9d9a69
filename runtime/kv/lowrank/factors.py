"""The factors of K and V of a layer that attention applies, and checks that a model has them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from runtime.checkpoint.hashing import hash_tensors
from runtime.checkpoint.weights import FactorPair, Latents
from runtime.config import ModelConfig
from runtime.errors import KVFormatError
from runtime.kernels.alignment import round_up
from runtime.kv.names import LOWRANK

_FIELDS = ("k", "v")


@dataclass(frozen=True)
class Factor:
    """U and bias of K or V.

    Attributes:
        u: `[kv_heads * dim, width]`, in the dtype of the model. Columns from ``rank`` on are 0.
        bias: `[kv_heads * dim]` in the dtype of the model, or None.
        rank: number of latents of a token.
    """

    u: Tensor
    bias: Tensor | None
    rank: int

    @classmethod
    def of(cls, pair: FactorPair, device: torch.device, dtype: torch.dtype) -> Self:
        """Return U and the bias of a pair on a device. The width is a multiple of 16 bytes."""
        u = pair.u.to(device).to(dtype)
        bias = None if pair.bias is None else pair.bias.to(device).to(dtype)
        padding = round_up(pair.rank) - pair.rank
        return cls(functional.pad(u, (0, padding)).contiguous(), bias, pair.rank)

    @property
    def tensors(self) -> list[Tensor]:
        """U and, if there is one, the bias."""
        return [self.u] if self.bias is None else [self.u, self.bias]


@dataclass(frozen=True)
class LayerFactors:
    """The factors of a layer that attention applies."""

    k: Factor
    v: Factor

    @classmethod
    def of(cls, weights: Any, device: torch.device, dtype: torch.dtype) -> Self:
        """Return the factors of a layer that `latent_ranks` has accepted."""
        return cls(*(Factor.of(getattr(weights, name), device, dtype) for name in _FIELDS))

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors: those of K, then those of V."""
        return [*self.k.tensors, *self.v.tensors]

    @property
    def digest(self) -> str:
        """Hash of all elements."""
        return hash_tensors("", ((str(n), each) for n, each in enumerate(self.tensors)))


def latent_ranks(config: ModelConfig, layers: Sequence[Any]) -> list[tuple[int, int]]:
    """Return the ranks of K and V of each layer.

    Args:
        layers: layers of the model; only shapes are read.

    Raises:
        KVFormatError: K or V of a layer is not a factor pair, heads are normalized between U and
            RoPE, or the model is the part of a rank of a worker.
    """
    if config.whole is not None:
        raise KVFormatError(
            f"KV format {LOWRANK} does not support workers of several ranks: all KV heads are "
            "computed from the same latents, so each rank would store all of them, which can be "
            "more than its part of the heads. Use another KV format, or one rank"
        )
    if len(layers) != config.num_layers:
        raise KVFormatError(f"KV format {LOWRANK} needs the weights of the model")
    return [_ranks_of(index, layer) for index, layer in enumerate(layers)]


def _ranks_of(index: int, layer: Any) -> tuple[int, int]:
    ranks = []
    for name in _FIELDS:
        linear = getattr(layer, name, None)
        if not isinstance(linear, FactorPair) or not linear.rank:
            raise KVFormatError(
                f"KV format {LOWRANK} stores the latents of factor pairs, but {name} of layer "
                f"{index} is not a factor pair: use a model with all k and v factorized "
                "(`headrace compress`), or another KV format"
            )
        ranks.append(linear.rank)
    if getattr(layer, "k_norm", None) is not None:
        raise KVFormatError(
            f"KV format {LOWRANK} does not support models that normalize key heads (layer {index})"
        )
    return ranks[0], ranks[1]


def without_factors(weights: Any) -> Any:
    """Return a layer whose projections of K and V compute latents."""
    pairs = {name: getattr(weights, name) for name in _FIELDS}
    return replace(weights, **{n: Latents(p.u, p.v, p.bias) for n, p in pairs.items()})


def chained_hash(before: str, digest: str) -> str:
    """Return the hash of the factors of some layers, given that of all but the last one."""
    return hashlib.sha256(f"{before}{digest}".encode()).hexdigest()
