"""Compressed formats in a few lines, for tests of stored pages and of the quality measurement."""

from typing import Self

import torch
from torch import Tensor

from runtime.config import ModelConfig
from runtime.kv.compressed import CompressedFormat, CompressedLayer
from runtime.kv.format import Plane


class Identity(CompressedFormat, CompressedLayer):
    """K and V in bf16, without any loss."""

    name = "test-identity"
    version = 1
    artifact_hash = ""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    @classmethod
    def create(cls, config: ModelConfig) -> Self:
        return cls(config)

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:
        shape = (self.config.num_kv_heads, page_size, self.config.head_dim)
        return Plane("k", torch.bfloat16, shape), Plane("v", torch.bfloat16, shape)

    def layer(self, index: int) -> Self:
        return self

    def encode(
        self,
        keys: Tensor,
        values: Tensor,
        first_positions: Tensor,
        planes: tuple[Tensor, ...],
        targets: Tensor,
    ) -> None:
        planes[0][targets], planes[1][targets] = keys, values

    def decode(
        self, planes: tuple[Tensor, ...], pages: Tensor, first_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        return planes[0][pages].float(), planes[1][pages].float()


class Scaled(Identity):
    """K times 0.7, and V times 0.5 plus a term that depends on the position.

    The decoded values are far from the exact ones, but continuous in them. Computations with
    another order of summation can therefore be compared with a small tolerance.
    """

    name = "test-scaled"

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:
        shape = (self.config.num_kv_heads, page_size, self.config.head_dim)
        return Plane("k", torch.float32, shape), Plane("v", torch.float32, shape)

    def encode(
        self,
        keys: Tensor,
        values: Tensor,
        first_positions: Tensor,
        planes: tuple[Tensor, ...],
        targets: Tensor,
    ) -> None:
        planes[0][targets] = 0.7 * keys.float()
        planes[1][targets] = 0.5 * values.float() + first_positions[:, None, None, None] / 100

    def decode(
        self, planes: tuple[Tensor, ...], pages: Tensor, first_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        shift = first_positions[:, None, None, None] / 50
        return planes[0][pages], planes[1][pages] - shift


class Int8(Identity):
    """Uniform symmetric quantization with one fp32 scale for each token and KV head."""

    name = "test-int8"
    largest = 127

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:
        heads, dim = self.config.num_kv_heads, self.config.head_dim
        return tuple(
            plane
            for name in ("k", "v")
            for plane in (
                Plane(name, torch.int8, (heads, page_size, dim), encodable=False),
                Plane(f"{name}_scale", torch.float32, (heads, page_size, 1), encodable=False),
            )
        )

    def encode(
        self,
        keys: Tensor,
        values: Tensor,
        first_positions: Tensor,
        planes: tuple[Tensor, ...],
        targets: Tensor,
    ) -> None:
        for exact, codes, scales in ((keys, *planes[:2]), (values, *planes[2:])):
            scale = exact.float().abs().amax(-1, keepdim=True).clamp_min(1e-6) / self.largest
            codes[targets] = (exact.float() / scale).round().to(torch.int8)
            scales[targets] = scale

    def decode(
        self, planes: tuple[Tensor, ...], pages: Tensor, first_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        k, k_scale, v, v_scale = (plane[pages].float() for plane in planes)
        return k * k_scale, v * v_scale


class TwoBit(Int8):
    """Levels of two bits, -1 to 1, each in a byte."""

    name = "test-2-bit"
    largest = 1


def int8_of(config: ModelConfig) -> Int8:
    """Create a format by a function."""
    return Int8(config)


def unsupported(config: ModelConfig) -> Int8:
    """Reject every model."""
    raise ValueError(f"head_dim {config.head_dim} is not supported")


class NotAFormat:
    """A class that has no create()."""
