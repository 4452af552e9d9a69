"""Kernel plans: the kernel of each GEMM, the factor pairs to multiply out, and the scheme of ranks.

A plan file holds the choices that `runtime.offline.bench.plan` measured for one model on one
device. Without a file, `default_tile` chooses, and the scheme is `Scheme.LOW_RANK`. The results of
two workers are bitwise identical only with the same plan, so its hash is part of the handshake. A
plan does not depend on the number of ranks: tiles are chosen by the shapes of a rank's part.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from runtime.checkpoint.products import product
from runtime.checkpoint.weights import (
    Checkpoint,
    Dense,
    FactorPair,
    LayersOnDemand,
    LayerWeights,
    layer_shapes,
    shapes_of,
)
from runtime.errors import PlanError
from runtime.gemm.weights import PROJECTION_GROUPS
from runtime.kernels.alignment import VECTOR_ELEMENTS
from runtime.parallel.partition import Scheme

Shapes = tuple[tuple[int, int], ...]
"""(rows, columns) of each weight matrix of one grouped GEMM."""
BUCKETS = (16, 32, 64, 128, 512, 2048, 8192)
"""Buckets of token counts, by their upper bounds. A choice for a bucket applies to counts above the
previous bound, up to its own. The last bucket also covers all larger counts."""


@dataclass(frozen=True)
class Tile:
    """Tile of `kernels.small_m.small_gemm_kernel`.

    Attributes:
        tokens, rows, columns: block sizes BM, BN and BK.
        splits: split-K factor: number of programs that share the K dimension of one block.
        warps, stages: Triton's launch options ``num_warps`` and ``num_stages``.
    """

    tokens: int
    rows: int
    columns: int
    splits: int
    warps: int
    stages: int

    @property
    def valid(self) -> bool:
        """Whether the kernel supports this tile."""
        sizes = (self.tokens, self.rows, self.columns)
        return (
            all(16 <= size <= 512 and not size & (size - 1) for size in sizes)
            and 1 <= self.splits <= 64
            and self.warps in (1, 2, 4, 8)
            and 1 <= self.stages <= 8
        )


@dataclass(frozen=True)
class LargeTile:
    """Tile of `kernels.large_m.large_gemm_kernel`.

    Attributes:
        groups: consumer warp groups per program, each for 64 tokens.
        rows: weight rows per block.
        splits: split-K factor: number of programs that share the K dimension of one block.
    """

    groups: int
    rows: int
    splits: int = 1

    @property
    def valid(self) -> bool:
        """Whether the kernel supports this tile."""
        return (self.groups, self.rows) in _SIZES and 1 <= self.splits <= 64


_SIZES = {(2, 256), (2, 128), (2, 64), (1, 128), (1, 64), (1, 32)}
"""Supported (``groups``, ``rows``) of a `LargeTile`."""
_STEP_US = {(2, 256): 0.62, (2, 128): 0.335, (1, 128): 0.21, (2, 64): 0.26}
"""Time on an H200, in microseconds, to process 64 input columns of a `LargeTile`, by its
(``groups``, ``rows``)."""
_TILE_US, _SPLIT_US, _PART_US = 1.5, 6.0, 0.5 / 128
"""Overheads in microseconds: per tile; additionally per tile with splits; and per 64 partial
sums."""
PROGRAMS = 132
"""Number of programs that run at the same time on an H200."""
_SPLITS = (1, 2, 3, 4, 6, 8)


@cache
def large_tile(name: str, tokens: int, shapes: Shapes) -> LargeTile | None:
    """Return the tile that a cost model of an H200 predicts to be the fastest.

    Return None if a row count is not a multiple of 8, which the kernel requires.

    Args:
        name: `GroupedGemm.name`.
        tokens: rows of the input.
    """
    if any(rows % VECTOR_ELEMENTS for rows, _ in shapes):
        return None
    columns = max(columns for _, columns in shapes)
    candidates = []
    for groups, rows in _STEP_US:
        each, counted = (rows // 2, shapes[:1]) if name == "GATED" else (rows, shapes)
        blocks = -(-tokens // (64 * groups)) * sum(-(-n // each) for n, _ in counted)
        for splits in _SPLITS if name == "PLAIN" else (1,):
            waves = -(-blocks * splits // PROGRAMS)
            steps = -(-columns // (64 * splits))
            us = steps * _STEP_US[groups, rows] + _TILE_US
            if splits > 1:
                us += _SPLIT_US + splits * groups * rows * _PART_US
            candidates.append((waves * us, groups, rows, splits))
    return LargeTile(*min(candidates)[1:])


def default_tile(name: str, bucket: int, shapes: Shapes) -> Tile | LargeTile | None:
    """Return the tile to use if no plan was measured, or None to use torch.

    The selection follows measurements on an H200: our kernels are used only where one launch
    replaces several.
    """
    if name == "RESIDUAL" or len(shapes) < 2 or (name == "APART" and bucket > 512):
        return None
    if bucket >= 128:
        return large_tile(name, bucket, shapes)
    if name == "GATED" and bucket == 64 and all(rows % VECTOR_ELEMENTS == 0 for rows, _ in shapes):
        return LargeTile(1, 128)
    if name != "PLAIN":
        return None
    few_blocks = sum(-(-rows // 64) for rows, _ in shapes) < PROGRAMS
    wide = bucket > 32 and not few_blocks
    return Tile(64, 64, 64, 1, 4, 6) if wide else Tile(bucket, 32, 128, 1, 4, 5)


@dataclass(frozen=True)
class KernelPlan:
    """Kernel of every GEMM of a model, and how ranks divide it.

    Attributes:
        choices: tile by `choice_key`, or None to use torch. `default_tile` applies to missing keys.
        dense: keys (`group_key`) of the groups of factor pairs that are replaced by their product
            because it is faster.
        device: name of the device on which the plan was measured; empty if it was not measured.
        scheme: division of linears among the ranks of a worker; unused by a worker of one rank.
        forced: whether to use our kernels for every GEMM, and to compute queries from their factors
            inside prefill attention. Set only for comparisons.
    """

    choices: Mapping[str, Tile | LargeTile | None] = field(default_factory=dict)
    dense: frozenset[str] = frozenset()
    device: str = ""
    scheme: Scheme = Scheme.LOW_RANK
    forced: bool = False

    def tile(self, name: str, tokens: int, shapes: Shapes) -> Tile | LargeTile | None:
        """Return the tile for a GEMM over ``tokens`` input rows, or None to use torch.

        Args:
            name: `GroupedGemm.name`.
        """
        bucket = next((bucket for bucket in BUCKETS if tokens <= bucket), BUCKETS[-1])
        if self.forced:
            large = large_tile(name, tokens, shapes) if tokens > 64 else None
            return large or Tile(min(bucket, 64), 64, 64, 1, 4, 6)
        choice = choice_key(name, bucket, shapes)
        return (
            self.choices[choice] if choice in self.choices else default_tile(name, bucket, shapes)
        )

    def multiply_out(
        self, checkpoint: Checkpoint, kept: Sequence[Sequence[str]] = ()
    ) -> Checkpoint:
        """Return the checkpoint with the groups in ``dense`` replaced by their products.

        The products are computed each time a layer is accessed.

        Args:
            kept: groups of `PROJECTION_GROUPS` that are not replaced.
        """
        if not self.dense:
            return checkpoint
        layers = checkpoint.layers
        multiply_out = partial(self._multiply_out, kept=kept)
        shapes = tuple(map(multiply_out, shapes_of(layer_shapes(checkpoint))))
        on_demand = LayersOnDemand(lambda index: multiply_out(layers[index]), shapes)
        return replace(checkpoint, layers=on_demand)

    def _multiply_out(self, layer: LayerWeights, kept: Sequence[Sequence[str]]) -> LayerWeights:
        for names in PROJECTION_GROUPS:
            if names not in kept and group_key(layer, names) in self.dense:
                layer = multiplied_out(layer, names)
        return layer

    @property
    def hash(self) -> str:
        """First 16 hex digits of the sha256 over all fields."""
        return hashlib.sha256(self._text.encode()).hexdigest()[:16]

    @property
    def _text(self) -> str:
        choices = {name: tile and asdict(tile) for name, tile in self.choices.items()}
        fields: dict[str, Any] = {
            "forced": self.forced,
            "device": self.device,
            "dense": sorted(self.dense),
            "choices": choices,
        }
        if self.scheme is not Scheme.LOW_RANK:  # earlier plans have no scheme, and keep their hash
            fields["scheme"] = self.scheme
        return json.dumps(fields, sort_keys=True, indent=1)

    def save(self, path: Path) -> None:
        """Write the plan as JSON."""
        path.write_text(self._text + "\n")

    @classmethod
    def load(cls, path: Path) -> "KernelPlan":
        """Read a plan.

        Raises:
            PlanError: the file cannot be read or is not a valid kernel plan.
        """
        try:
            read = json.loads(path.read_text())
            choices = {name: tile and _tile(tile) for name, tile in read["choices"].items()}
            if not all(tile is None or tile.valid for tile in choices.values()):
                raise ValueError("a tile has a size that the kernels do not support")
            scheme = Scheme(read.get("scheme", Scheme.LOW_RANK))
            return cls(choices, frozenset(read["dense"]), read["device"], scheme, read["forced"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"{path} is not a kernel plan: {error!r}") from error


def _tile(fields: dict[str, int]) -> Tile | LargeTile:
    return LargeTile(**fields) if "groups" in fields else Tile(**fields)


def choice_key(name: str, bucket: int, shapes: Shapes) -> str:
    """Return the key of a choice, such as ``GATED 16: 11008x1024 11008x1024``."""
    return f"{name} {bucket}: " + " ".join(f"{rows}x{columns}" for rows, columns in shapes)


def group_key(layer: LayerWeights, names: Sequence[str]) -> str | None:
    """Return the key of a group of factor pairs, such as ``o 4096x1024x4096``.

    The numbers are rows, rank and columns. Return None if one of the projections is dense.
    """
    pairs = {name: getattr(layer, name) for name in names}
    if not all(isinstance(pair, FactorPair) for pair in pairs.values()):
        return None
    return " ".join(f"{n} {len(p.u)}x{p.rank}x{p.v.shape[1]}" for n, p in pairs.items())


def multiplied_out(layer: LayerWeights, names: Sequence[str]) -> LayerWeights:
    """Return the layer with the named factor pairs replaced by W = U V.

    The factors are rounded to bf16, as the kernels read them, and multiplied in fp32.
    """
    dense: dict[str, Any] = {}
    for name in names:
        pair = getattr(layer, name)
        rounded = replace(pair, u=pair.u.bfloat16(), v=pair.v.bfloat16())
        dense[name] = Dense(product(rounded).bfloat16(), pair.bias)
    return replace(layer, **dense)
