"""Base class of the KV formats that quantize each vector on its own, without calibration."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from runtime.config import ModelConfig
from runtime.kv.format import Plane


@dataclass(frozen=True)
class VectorQuantizer:
    """Quantization of vectors, each independent of the others.

    Attributes:
        quantize: returns codes `[..., c]` and scales `[..., s]` of bf16 or fp32 vectors `[..., d]`.
        dequantize: returns the vectors, fp32 `[..., d]`, from codes and scales.
    """

    quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
    dequantize: Callable[[Tensor, Tensor], Tensor]


class QuantizedFormat(ABC):
    """K after RoPE and V as codes and scales of each token and head.

    Implements `runtime.kv.compressed.CompressedFormat`; all layers are alike. Subclasses define
    ``name``, ``version`` and `planes`.
    """

    name: str
    version: int
    artifact_hash = ""

    def __init__(self, config: ModelConfig, keys: VectorQuantizer, values: VectorQuantizer) -> None:
        self._config, self._keys, self._values = config, keys, values

    @abstractmethod
    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:
        """Return four planes: codes of K, codes of V, scales of K, scales of V."""

    def layer(self, index: int) -> Self:  # noqa: ARG002 - all layers are alike
        """Return the encoding of one layer."""
        return self

    def encode(
        self,
        keys: Tensor,
        values: Tensor,
        first_positions: Tensor,  # noqa: ARG002 - K stays after RoPE
        planes: tuple[Tensor, ...],
        targets: Tensor,
    ) -> None:
        """Encode whole pages; see `runtime.kv.compressed.CompressedLayer`."""
        k, v, k_scale, v_scale = planes
        k[targets], k_scale[targets] = self._keys.quantize(keys)
        v[targets], v_scale[targets] = self._values.quantize(values)

    def decode(
        self,
        planes: tuple[Tensor, ...],
        pages: Tensor,
        first_positions: Tensor,  # noqa: ARG002 - K stays after RoPE
    ) -> tuple[Tensor, Tensor]:
        """Return K after RoPE and V; see `runtime.kv.compressed.CompressedLayer`."""
        k, v, k_scale, v_scale = (plane[pages] for plane in planes)
        return self._keys.dequantize(k, k_scale), self._values.dequantize(v, v_scale)
