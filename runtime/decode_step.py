"""A decode step as one launch: weights laid out for `kernels/step.py`, and the launch itself."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from runtime.checkpoint.weights import Checkpoint, Dense, Linear
from runtime.config import ModelConfig
from runtime.kernels import step as kernels

_BLOCK = 64
_ALIGNED = 64
"""Elements, of which matrices start at multiples."""
_WORTH = 0.08
"""A taller tile is worth so large a share of the programs without work."""
_GROUPS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))


@dataclass(frozen=True)
class Packed:
    """Weights in the order in which a step reads them.

    Attributes:
        weights: bf16, every matrix with rows padded to multiples of eight.
        vectors: fp32, norms and biases.
        table: int64 `[layers, fields]`, where they are.
        inner_most: the longest vector between two factors.
    """

    weights: Tensor
    vectors: Tensor
    table: Tensor
    inner_most: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, device: torch.device) -> "Packed":
        """Raises ValueError for a model with norms of heads: its step is not this one."""
        packer = _Packer(device)
        table = []
        for layer in checkpoint.layers:
            if layer.q_norm is not None:
                raise ValueError("norms of heads are not part of this step")
            row = [packer.vector(layer.input_norm), packer.vector(layer.post_norm)]
            for group in _GROUPS:
                row += packer.group([getattr(layer, name) for name in group])
            table.append(row)
        return cls(
            torch.cat(packer.matrices),
            torch.cat(packer.vectors),
            torch.tensor(table, dtype=torch.int64, device=device),
            packer.inner_most,
        )


class _Packer:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.matrices: list[Tensor] = []
        self.vectors: list[Tensor] = []
        self.inner_most = 8
        self._elements = self._numbers = 0

    def vector(self, values: Tensor | None) -> int:
        if values is None:
            return -1
        at = self._numbers
        self.vectors.append(values.to(self._device, torch.float32).flatten())
        self._numbers += values.numel()
        return at

    def matrix(self, weight: Tensor) -> int:
        rows, columns = weight.shape
        padded = torch.zeros(
            rows * _up(columns, 8) + -rows * _up(columns, 8) % _ALIGNED,
            dtype=torch.bfloat16,
            device=self._device,
        )
        padded[: rows * _up(columns, 8)].view(rows, -1)[:, :columns] = weight.to(self._device)
        at = self._elements
        self.matrices.append(padded)
        self._elements += len(padded)
        return at

    def group(self, linears: Sequence[Linear]) -> list[int]:
        """Fields of a group: V of its factor pairs, then a segment for each projection."""
        pairs = [linear for linear in linears if not isinstance(linear, Dense)]
        heights = [_up(pair.rank, 8) for pair in pairs]
        self.inner_most = max(self.inner_most, sum(heights))
        row = [-1, 0, 0]
        if pairs:
            inner = pairs[0].v.shape[1]
            stacked = torch.zeros(sum(heights), inner, device=self._device)
            for pair, first in zip(pairs, _starts(heights), strict=True):
                stacked[first : first + pair.rank] = pair.v.to(self._device)
            row = [self.matrix(stacked), len(stacked), inner]
        starts = iter(_starts(heights))
        for linear in linears:
            if isinstance(linear, Dense):
                row += [self.matrix(linear.weight), linear.weight.shape[1], 0, 0]
            else:
                row += [self.matrix(linear.u), linear.rank, 1, next(starts)]
            row.append(self.vector(linear.bias))
        return row


class DecodeStep:
    """The step of a batch of a fixed size: tensors that stay, and numbers that change in them.

    Args:
        planes: K and V of all layers, bf16 `[page, kv_head, slot, dim]`, of equal strides.
        rope: cosines and sines, fp32 `[context, dim / 2]`.
        most_pages: of one sequence.
        programs: that run at the same time on the device.
        tile_bytes, columns: of weights that a program reads at a time, at most.
        warps: of a program.

    Attributes:
        tokens, positions: int64 `[batch]`; ``lengths`` int32 `[batch]`, positions + 1.
        page_table: int32 `[batch, most_pages]`.
        logits: fp32 `[batch, vocab]`, of the last launch.
    """

    def __init__(
        self,
        config: ModelConfig,
        packed: Packed,
        embedding: Tensor,
        head: Tensor,
        final_norm: Tensor,
        planes: Sequence[Tensor],
        rope: tuple[Tensor, Tensor],
        *,
        batch: int,
        most_pages: int,
        programs: int,
        tile_bytes: int = 1 << 15,
        columns: int = 2048,
        warps: int = 8,
    ) -> None:
        if config.hidden_size % 8:
            raise ValueError(f"a hidden size of {config.hidden_size}, no multiple of 8")
        device, dim = planes[0].device, config.head_dim
        self._programs, self._layers = programs, config.num_layers

        def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.tokens, self.positions = numbers(2, batch, dtype=torch.int64)
        self.lengths = numbers(batch, dtype=torch.int32)
        self.page_table = numbers(batch, most_pages, dtype=torch.int32)
        self.logits = numbers(batch, config.vocab_size)
        parts = batch * config.num_kv_heads
        splits = max(1, 1 << max(0, (programs // parts).bit_length() - 1))
        heads = batch * config.num_heads * splits
        self._counter = numbers(1, dtype=torch.int64)
        self._held = list(planes)
        addresses = torch.tensor([plane.data_ptr() for plane in planes], device=device)
        group = config.num_heads // config.num_kv_heads
        self._arguments = (
            packed.table, packed.weights, packed.vectors, embedding, head, final_norm.float(),
            config.rms_norm_eps, self.tokens, self.positions, self.lengths, self.page_table,
            most_pages, addresses, *planes[0].stride()[:2], *rope,
            numbers(batch, config.hidden_size), numbers(batch, packed.inner_most),
            numbers(batch, config.num_heads, dim, dtype=torch.bfloat16),
            numbers(batch, config.num_heads * dim), numbers(batch, config.intermediate_size),
            self.logits, numbers(heads * dim), numbers(heads), numbers(heads),
            numbers(parts, dtype=torch.int32), math.log2(math.e) / math.sqrt(dim),
        )  # fmt: skip
        self._options = {
            "B": batch, "HIDDEN_SIZE": config.hidden_size, "GATED": config.intermediate_size,
            "INNER_MOST": packed.inner_most, "VOCAB": config.vocab_size,
            "HEADS": config.num_heads, "KV_HEADS": config.num_kv_heads, "DIM": dim,
            "PAGE": planes[0].shape[2], "BLOCK": _BLOCK,
            "TILES": _tiles(config, packed, programs, tile_bytes, columns),
            "SPLITS": splits, "ROWS": max(16, triton.next_power_of_2(group)),
            "WIDTH": max(16, triton.next_power_of_2(dim)), "num_warps": warps,
        }  # fmt: skip

    def launch(self) -> None:
        """Computes ``logits`` and writes the tokens' K and V, for what the tensors hold."""
        kernels.step_kernel[(self._programs,)](
            self._counter, self._layers, *self._arguments, **self._options,
            launch_cooperative_grid=True,
        )  # fmt: skip

    def launch_stages(self) -> None:
        """The same by a launch for each stage."""
        self._stage(int(kernels.EMBED), 0)
        table = self._arguments[0].tolist()
        for layer, row in enumerate(table):
            inner = {0: kernels.QKV, 3: kernels.OUT, 5: kernels.GATE_UP, 7: kernels.DOWN}
            for stage in range(9):
                if stage not in inner or row[int(inner[stage]) + 1] > 0:
                    self._stage(stage, layer)
        self._stage(int(kernels.LOGITS), 0)

    def _stage(self, stage: int, layer: int) -> None:
        kernels.stage_kernel[(self._programs,)](
            layer, *self._arguments, STAGE=stage, **self._options
        )


def _tiles(
    config: ModelConfig, packed: Packed, programs: int, tile_bytes: int, columns: int
) -> tuple[tuple[int, int], ...]:
    """Rows and columns of a tile of each stage, chosen by the first layer's shapes."""
    row = packed.table[0].tolist()
    half = config.head_dim // 2
    heads, hidden = config.num_heads * config.head_dim, config.hidden_size
    turned = (config.num_heads + 2 * config.num_kv_heads) * half

    def tile(rows: int, inner: int, matrices: int = 1, most: int = 64) -> tuple[int, int]:
        wide = max(16, min(columns, triton.next_power_of_2(inner)))
        tall = max(1, min(most, tile_bytes // (2 * matrices * wide)))
        options = [1 << n for n in range(tall.bit_length())]
        shares = [_working(rows, height, programs) for height in options]
        good = [h for h, share in zip(options, shares, strict=True) if share > max(shares) - _WORTH]
        return max(good), wide

    def segment(group: int) -> int:
        """K of a group's first segment."""
        return int(row[group + int(kernels.GROUP_FIELDS) + 1])

    qkv, out = int(kernels.QKV), int(kernels.OUT)
    gate_up, down = int(kernels.GATE_UP), int(kernels.DOWN)
    return (
        tile(row[qkv + 1], hidden),
        tile(turned, segment(qkv), 2, triton.next_power_of_2(half)),
        (1, 16),
        tile(row[out + 1], heads),
        tile(hidden, segment(out)),
        tile(row[gate_up + 1], hidden),
        tile(config.intermediate_size, segment(gate_up), 2),
        tile(row[down + 1], config.intermediate_size),
        tile(hidden, segment(down)),
        tile(config.vocab_size, hidden),
        (1, 1024),
    )


def _working(rows: int, height: int, programs: int) -> float:
    """The share of the programs that have a tile, on average."""
    groups = -(-rows // height)
    return groups / max(1, -(-groups // programs) * programs)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:index]) for index in range(len(sizes))]
