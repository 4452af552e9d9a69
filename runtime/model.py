"""The decoder: tokens and paged KV in, logits out."""

import hashlib
import json
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from runtime.attention import dense_attention
from runtime.attention.base import Batch
from runtime.checkpoint.weights import Checkpoint
from runtime.kv.cache import PagedCache
from runtime.kv.dense import DenseFormat
from runtime.kv.format import KVFormat
from runtime.layers.decoder import DecoderLayer
from runtime.layers.linear import Packed, packs, product
from runtime.layers.pointwise import RmsNorm
from runtime.rope import cos_sin_table


class Model:
    """A checkpoint made ready to run on one device.

    Attributes:
        config: the model's shape.
        kv_format: how its KV is stored and attended.
        page_size: token slots of a page.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        page_size: int = 16,
    ) -> None:
        self.config = checkpoint.config
        self.page_size = page_size
        self.device, self.dtype = torch.device(device), dtype
        checkpoint = _place(checkpoint, self.device, dtype, {})
        packed: Packed = {}
        self.kv_format: KVFormat = DenseFormat(dense_attention(self.config, self.device, dtype))
        self._embedding = checkpoint.embedding
        self._layers = [DecoderLayer(self.config, layer, packed) for layer in checkpoint.layers]
        self._final_norm = RmsNorm(checkpoint.final_norm, self.config.rms_norm_eps)
        self._lm_head = product(checkpoint.lm_head)
        cos, sin = cos_sin_table(self.config, self.config.context_length)
        self._rope = cos.to(self.device), sin.to(self.device)

    @property
    def context_length(self) -> int:
        """Tokens of the longest sequence, prompt and output together."""
        return self.config.context_length

    @property
    def kernel_plan(self) -> str:
        """16 hex digits over what decides the bits of a result, beside weights and KV format."""
        plan = {
            "torch": torch.__version__.split("+")[0],
            "device": self.device.type,
            "instructions": torch.backends.cpu.get_cpu_capability()
            if self.device.type == "cpu"
            else torch.cuda.get_device_name(self.device),
            "dtype": str(self.dtype),
            "products": "packed" if packs(self.device, self.dtype) else "plain",
            "kv": self.kv_format.kernels,
            "factorized": any(layer.factorized for layer in self._layers),
        }
        return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]

    def new_cache(self, num_pages: int) -> PagedCache:
        """Memory for ``num_pages`` pages of this model's KV."""
        return PagedCache(
            self.kv_format,
            self.config,
            num_pages=num_pages,
            page_size=self.page_size,
            device=self.device,
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: PagedCache) -> Tensor:
        """Computes the tokens of a batch: their KV into the pages, and logits where wanted.

        Returns:
            fp32 `[m, vocab]`, one row for each of the batch's ``logit_rows``.
        """
        hidden = functional.embedding(batch.tokens, self._embedding)
        for index, layer in enumerate(self._layers):
            last = index == len(self._layers) - 1
            planes = cache.layer(index)
            hidden = layer(hidden, self._rope, self.kv_format, planes, batch, last=last)
        if not len(hidden):
            return hidden.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        return self._lm_head(self._final_norm(hidden)).float()


def _place(value: Any, device: torch.device, dtype: torch.dtype, placed: dict[int, Tensor]) -> Any:
    """The same weights, on ``device`` as ``dtype``; nothing is copied that is so already, and what
    was one tensor is one again."""
    if isinstance(value, Tensor):
        return placed.setdefault(id(value), value.to(device, dtype))
    if isinstance(value, tuple):
        return tuple(_place(item, device, dtype, placed) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        moved = {
            f.name: _place(getattr(value, f.name), device, dtype, placed) for f in fields(value)
        }
        return replace(value, **moved)
    return value
