"""K and V of pages without compression: the vectors that format `kvquant` quantizes."""

import torch
from torch import Tensor

from runtime.config import ModelConfig
from runtime.kv.compressed import CompressedFormat, CompressedLayer
from runtime.kv.format import Plane
from runtime.kv.kvquant.codes import NAME
from runtime.kv.rotation import PageRotation


class ExactPages(CompressedFormat):
    """K and V without compression.

    Args:
        before_rope: whether K is stored before RoPE, rounded to bf16.
    """

    name = NAME
    version = 1

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device | str = "cpu",
        *,
        before_rope: bool,
    ) -> None:
        self._config = config
        self.keeps_rope = not before_rope
        self._layer = ExactLayer(PageRotation(config, device) if before_rope else None)

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:  # noqa: ARG002 - all alike
        shape = self._config.num_kv_heads, page_size, self._config.head_dim
        return Plane("k", torch.bfloat16, shape), Plane("v", torch.bfloat16, shape)

    def layer(self, index: int) -> "ExactLayer":  # noqa: ARG002 - all layers are alike
        return self._layer


class ExactLayer(CompressedLayer):
    """One layer; ``rotation`` is None for K after RoPE."""

    def __init__(self, rotation: PageRotation | None) -> None:
        self._rotation = rotation

    def encode(
        self,
        keys: Tensor,
        values: Tensor,
        first_positions: Tensor,
        planes: tuple[Tensor, ...],
        targets: Tensor,
    ) -> None:
        k, v = planes
        if self._rotation is not None:
            keys = self._rotation.undo(keys.float(), first_positions)
        k[targets], v[targets] = keys.to(k.dtype), values.to(v.dtype)

    def decode(
        self, planes: tuple[Tensor, ...], pages: Tensor, first_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        keys, values = (plane[pages].float() for plane in planes)
        if self._rotation is not None:
            keys = self._rotation.apply(keys, first_positions)
        return keys, values
