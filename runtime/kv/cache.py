"""The memory of the pages: every plane of every layer, allocated once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.config import ModelConfig
from runtime.kv.format import KVFormat


class PagedCache:
    """KV of all sequences of one worker.

    Attributes:
        planes: the tensors ``[page, …]``, layer after layer, each layer's in its format's order
            (for ``dense``: layer0.k, layer0.v, layer1.k, …, bf16 ``[page, kv_head, slot, dim]``).
    """

    def __init__(
        self,
        kv_format: KVFormat,
        config: ModelConfig,
        *,
        num_pages: int,
        page_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.format = kv_format
        self.page_size = page_size
        self._layout = kv_format.planes(config, page_size)
        self.planes: list[Tensor] = [
            torch.zeros(num_pages, *plane.shape, dtype=plane.dtype, device=device)
            for _ in range(config.num_layers)
            for plane in self._layout
        ]

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """The planes of one layer."""
        each = len(self._layout)
        return tuple(self.planes[index * each : (index + 1) * each])

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages, in every plane."""
        for plane in self.planes:
            plane[list(targets)] = plane[list(sources)]
