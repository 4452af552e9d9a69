"""Base class of the KV formats that quantize each vector on its own, without calibration."""

import os
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from runtime.config import ModelConfig
from runtime.kv.compressed import CompressedFormat, CompressedLayer
from runtime.kv.format import Plane

if TYPE_CHECKING:  # optional: Triton
    from runtime.kv.gpu import CompressedPageKernels, LayerInputs
    from runtime.kv.kernel_source import KernelSource

_MAX_FUSED_DIM = 256
"""Maximum head dimension of the Triton kernels."""


@dataclass(frozen=True)
class VectorQuantizer:
    """Quantization of vectors, each independent of the others.

    Attributes:
        quantize: returns codes `[..., c]` and scales `[..., s]` of bf16 or fp32 vectors `[..., d]`.
        dequantize: returns the vectors, fp32 `[..., d]`, from codes and scales.
    """

    quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
    dequantize: Callable[[Tensor, Tensor], Tensor]


class QuantizedFormat(CompressedFormat, CompressedLayer):
    """K (after RoPE) and V as codes and scales of each token and head.

    All layers are alike. Subclasses define ``name``, ``version``, `planes` and `kernel_source`.

    Attributes:
        fused: whether the Triton kernels support the model. They run on GPUs, and on CPUs in
            Triton's interpreter; the torch reference runs otherwise.
    """

    keeps_rope = True

    def __init__(
        self,
        config: ModelConfig,
        keys: VectorQuantizer,
        values: VectorQuantizer,
        min_fused_dim: int = 1,
    ) -> None:
        """Create the format.

        Args:
            min_fused_dim: minimum head dimension of the Triton kernels.
        """
        self._config = config
        self._keys = keys
        self._values = values
        self._kernels: dict[torch.device, CompressedPageKernels] = {}
        dim = config.head_dim
        self.fused = min_fused_dim <= dim <= _MAX_FUSED_DIM and dim % 2 == 0

    @abstractmethod
    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:
        """Return four planes: codes of K, codes of V, scales of K, scales of V."""

    def layer(self, index: int) -> Self:  # noqa: ARG002 - all layers are alike
        """Return the encoding of one layer."""
        return self

    @abstractmethod
    def kernel_source(self) -> "KernelSource":
        """Return the format's Triton functions; called only where Triton is installed."""

    def kernel_inputs(self, device: torch.device) -> "LayerInputs":  # noqa: ARG002 - no tensors
        """Return what the kernels read besides the compressed planes."""
        from runtime.kv.gpu import LayerInputs

        return LayerInputs()

    def kernels(self, device: torch.device) -> "CompressedPageKernels | None":
        """Return the fused kernels, or None if they do not run on a device or for this model."""
        on_device = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
        if not (self.fused and on_device):
            return None
        if device not in self._kernels:
            from runtime.kv.gpu import CompressedPageKernels

            shared = CompressedPageKernels(self._config, self.kernel_source())
            self._kernels[device] = shared.of_layer(self.kernel_inputs(device))
        return self._kernels[device]

    def encode(
        self,
        keys: Tensor,
        values: Tensor,
        first_positions: Tensor,
        planes: tuple[Tensor, ...],
        targets: Tensor,
    ) -> None:
        """Encode whole pages; see `runtime.kv.compressed.CompressedLayer`."""
        if kernels := self.kernels(keys.device):
            kernels.encode(keys, values, planes, targets)
        else:
            self.encode_reference(keys, values, first_positions, planes, targets)

    def encode_reference(
        self,
        keys: Tensor,
        values: Tensor,
        first_positions: Tensor,  # noqa: ARG002 - K stays after RoPE
        planes: tuple[Tensor, ...],
        targets: Tensor,
    ) -> None:
        """Encode whole pages in plain torch; this specifies the stored bits."""
        k, v, k_scale, v_scale = planes
        k[targets], k_scale[targets] = self._keys.quantize(keys)
        v[targets], v_scale[targets] = self._values.quantize(values)

    def decode(
        self,
        planes: tuple[Tensor, ...],
        pages: Tensor,
        first_positions: Tensor,  # noqa: ARG002 - K stays after RoPE
    ) -> tuple[Tensor, Tensor]:
        """Return K (after RoPE) and V; see `runtime.kv.compressed.CompressedLayer`."""
        k, v, k_scale, v_scale = (plane[pages] for plane in planes)
        return self._keys.dequantize(k, k_scale), self._values.dequantize(v, v_scale)
