"""RoPE over pages: applied to keys, and undone."""

import torch
from torch import Tensor

from runtime.config import ModelConfig
from runtime.layers.rope import cos_sin_table


class PageRotation:
    """RoPE of one model for runs of consecutive positions, in fp32.

    Attributes:
        tables: cosines and sines, fp32 ``[context_length, dim / 2]`` each.
        factor: factor by which YaRN scales rotated vectors; 1 for models without YaRN.
        inverse: cosines and sines that undo RoPE if the sine is negated, as in ``tables``. They
            include the inverse of the factor.
    """

    def __init__(self, config: ModelConfig, device: torch.device | str = "cpu") -> None:
        cos, sin = cos_sin_table(config, config.context_length)
        self.tables = cos.to(device), sin.to(device)
        self.factor = config.rope.attention_factor
        # YaRN scales cosines and sines, so that the inverse has to divide by the scale.
        norm = self.factor**2
        self.inverse = self.tables if norm == 1 else (self.tables[0] / norm, self.tables[1] / norm)

    def apply(self, x: Tensor, first_positions: Tensor) -> Tensor:
        """Apply RoPE.

        Args:
            x: fp32 ``[p, heads, n, dim]``, before RoPE.
            first_positions: int64 ``[p]``, position of ``x[i, :, 0]``; the others follow.

        Returns:
            fp32, the shape of ``x``.
        """
        cos, sin = _rows(self.tables, x, first_positions)
        return _rotate(x, cos, sin)

    def undo(self, x: Tensor, first_positions: Tensor) -> Tensor:
        """Return ``x`` before RoPE: the inverse of `apply`, with the same arguments."""
        cos, sin = _rows(self.inverse, x, first_positions)
        return _rotate(x, cos, -sin)


def _rows(
    table: tuple[Tensor, Tensor], x: Tensor, first_positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines ``[p, 1, n, dim / 2]``."""
    positions = first_positions[:, None] + torch.arange(x.shape[2], device=first_positions.device)
    cos, sin = table
    return cos[positions][:, None], sin[positions][:, None]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
