"""Interface of compressed KV formats, and which tokens of a sequence they do not compress.

A model computes over full-precision pages: K (after RoPE) and V in bf16, as in format `dense`. A
compressed format adds compressed pages. A page of a sequence is encoded when it leaves the window
of recent tokens, and its full-precision page becomes free. Prefill attends to full-precision pages
only; the pages of a complete prompt are then encoded as if its tokens had been decoded one by one.

The first page of a sequence stays in full precision, too: attention concentrates on the first
tokens (sinks), and errors in their K and V cost far more than errors elsewhere.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.attention.base import Batch
from runtime.kv.format import Plane
from runtime.pages.groups import PageGroup, Part
from runtime.pages.window import SINK_PAGES, WINDOW

if TYPE_CHECKING:  # optional: Triton
    from runtime.kv.gpu import CompressedPageKernels

FULL_PRECISION = PageGroup("full_precision", Part.ENDS, SINK_PAGES, WINDOW)
"""Page group of full-precision K and V."""
COMPRESSED = PageGroup("compressed", Part.MIDDLE, SINK_PAGES, WINDOW)
"""Page group of the planes of compressed formats."""


def compressed_table(batch: Batch) -> Tensor | None:
    """Return the page table of the compressed pages of a decode batch; None for prompts."""
    return batch.page_tables[1] if batch.page_tables else None


class CompressedLayer(ABC):
    """Encoding of one layer's K and V in some compressed format."""

    @abstractmethod
    def encode(
        self,
        keys: Tensor,
        values: Tensor,
        first_positions: Tensor,
        planes: tuple[Tensor, ...],
        targets: Tensor,
    ) -> None:
        """Encode whole pages.

        Args:
            keys, values: bf16 `[p, kv_heads, page_size, dim]`, K after RoPE.
            first_positions: int64 `[p]`, position of the first token of each page.
            planes: the layer's planes, in the order of `CompressedFormat.planes`. Each page is
                contiguous, a plane need not be.
            targets: int64 `[p]`, compressed pages to write, without repetition.
        """

    @abstractmethod
    def decode(
        self, planes: tuple[Tensor, ...], pages: Tensor, first_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return K (after RoPE) and V as attention reads them.

        Args:
            pages: int64 `[p]`, compressed pages.
            first_positions: int64 `[p]`, position of the first token of each page.

        Returns:
            Two fp32 tensors `[p, kv_heads, page_size, dim]`.
        """

    def attend_prompt(
        self,
        q: Tensor,  # noqa: ARG002 - the default attends exactly
        planes: tuple[Tensor, ...],  # noqa: ARG002
        batch: Batch,  # noqa: ARG002
    ) -> Tensor | None:
        """Return the attention of prompts, `[n, heads * dim]`; None for exact attention.

        Args:
            q: `[n, heads, dim]`, after RoPE.
            planes: full-precision K and V of the layer.
        """
        return None

    def kernels(self, device: torch.device) -> "CompressedPageKernels | None":  # noqa: ARG002
        """Return the layer's fused kernels, or None if there are none for the device."""
        return None


class CompressedFormat(ABC):
    """A lossy representation of K and V in pages.

    Attributes:
        name: stable name of the format.
        version: number to increase whenever the same K and V are stored as different bits.
        artifact_hash: hash of calibration results; empty if the format has none.
        fused: whether the layers have fused kernels for the model on a GPU.
        keeps_rope: whether K is encoded after RoPE, so that ``first_positions`` make no difference.
            The tokens of a page may then have any positions, as after an eviction
            (`runtime.kv.eviction`).
    """

    name: str
    version: int
    artifact_hash: str = ""
    fused: bool = False
    keeps_rope: bool = False

    @abstractmethod
    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:
        """Return the compressed planes of one layer; their ``group`` is ignored."""

    @abstractmethod
    def layer(self, index: int) -> CompressedLayer:
        """Return the encoding of one layer."""

    def describe(self, layer: int) -> str:  # noqa: ARG002 - the default is for uncalibrated formats
        """Return the ranks or bits of one layer as text; empty if all layers are alike."""
        return ""
