"""KV format `dense`: K (after RoPE) and V as bf16; not compressed."""

from collections.abc import Callable
from functools import partial
from typing import Self

import torch
from torch import Tensor

from runtime.attention import dense_attention
from runtime.attention.base import Batch, DenseAttention
from runtime.attention.reference import ReferenceAttention
from runtime.config import ModelConfig
from runtime.kv.format import KV, KVFormat, Plane, sliding_window


class DenseLayer:
    """One layer of format `dense`; a `LayerKV` whose planes are K and V."""

    def __init__(self, attention: DenseAttention) -> None:
        self._attention = attention

    def append(
        self, qkv: Tensor, rope: tuple[Tensor, Tensor], planes: tuple[Tensor, ...], batch: Batch
    ) -> Tensor:
        k_pages, v_pages = planes
        return self._attention.write(qkv, rope, k_pages, v_pages, batch)

    def attend(self, q: Tensor, planes: tuple[Tensor, ...], batch: Batch) -> Tensor:
        k_pages, v_pages = planes
        return self._attention.attend(q, k_pages, v_pages, batch)


class DenseFormat(KVFormat):
    """K (after RoPE) and V. Planes are bf16 for any dtype of the model.

    There is a page group for all layers with the same sliding window, and one for those without.

    Args:
        attention: function that returns the attention backend of the layers with a given sliding
            window in tokens, or for None that of the layers without one.
    """

    name = "dense"
    version = 1
    dense_bf16 = True
    keeps_rope = True

    def __init__(
        self, config: ModelConfig, attention: Callable[[int | None], DenseAttention]
    ) -> None:
        self._config = config
        windows = dict.fromkeys(config.windows or (None,))
        self._attentions = {window: attention(window) for window in windows}
        self._layers = {window: DenseLayer(each) for window, each in self._attentions.items()}
        # The reference reads sequence lengths on the host, which a CUDA graph cannot capture.
        self.graph_safe = not any(
            isinstance(each, ReferenceAttention) for each in self._attentions.values()
        )

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        *,
        by_halves: bool = False,
    ) -> Self:
        """See `runtime.kv.format.KVFormatFactory`."""
        if not by_halves:
            return cls(config, partial(dense_attention, config, device, dtype))
        if any(config.windows):
            raise ValueError("attention with a sliding window is not implemented on GPUs")
        from runtime.attention.gpu import TritonAttention  # optional: Triton

        heads = config.num_heads, config.num_kv_heads, config.head_dim
        return cls(config, lambda _: TritonAttention(*heads, by_halves=True))

    @property
    def kernels(self) -> str:
        return "+".join(f"{each.name}-{each.version}" for each in self._attentions.values())

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:
        shape = (self._config.num_kv_heads, page_size, self._config.head_dim)
        window = self._config.window(layer)
        group = KV if window is None else sliding_window(window)
        return tuple(Plane(name, torch.bfloat16, shape, group=group) for name in ("k", "v"))

    def layer(self, index: int) -> DenseLayer:
        return self._layers[self._config.window(index)]
