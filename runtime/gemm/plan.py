"""Kernel plans: which kernel computes each GEMM, and which factor pairs are multiplied out.

Two workers compute the same bits only with the same plan. `default_tile` is the rule without a
file. A file holds what `runtime.bench.plan` measured for one model on one device. The plan's hash
is part of the handshake.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from runtime.checkpoint.weights import Checkpoint, Dense, FactorPair, LayerWeights
from runtime.errors import PlanError
from runtime.gemm.weights import PROJECTION_GROUPS
from runtime.kernels.alignment import VECTOR_ELEMENTS

Shapes = tuple[tuple[int, int], ...]
"""Rows and columns of the weight matrices of one grouped GEMM."""
BUCKETS = (16, 32, 64, 128, 512, 2048, 8192)
"""Token counts. A choice for a bucket holds from the bucket below up to it; the last has no
upper bound."""


@dataclass(frozen=True)
class Tile:
    """Tile of `kernels.small_m.small_gemm_kernel`.

    Attributes:
        tokens, rows, columns: block sizes BM, BN and BK.
        splits: programs among which the columns are split.
        warps, stages: Triton's launch options.
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
        groups: warp groups of a program, of 64 tokens each.
        rows: rows of weights of a block.
        splits: programs among which the columns are split.
    """

    groups: int
    rows: int
    splits: int = 1

    @property
    def valid(self) -> bool:
        """Whether the kernel supports this tile."""
        return (self.groups, self.rows) in _STEP_US and 1 <= self.splits <= 64


_STEP_US = {(2, 256): 0.62, (2, 128): 0.335, (1, 128): 0.21, (2, 64): 0.26}
"""Microseconds that a program takes for 64 columns, by `LargeTile` groups and rows, on an H200."""
_TILE_US, _SPLIT_US, _PART_US = 1.5, 6.0, 0.5 / 128
"""Microseconds of overhead: of a tile, of a split tile, and of a split tile for each 64 elements of
a part."""
_PROGRAMS = 132
"""Programs that run at a time on an H200."""
_SPLITS = (1, 2, 3, 4, 6, 8)


@cache
def large_tile(name: str, tokens: int, shapes: Shapes) -> LargeTile | None:
    """Return the tile that a cost model of an H200 predicts to be the fastest.

    None if the kernel does not support the shapes: row counts must be multiples of eight.

    Args:
        name: `GroupedGemm.name`.
    """
    if any(rows % VECTOR_ELEMENTS for rows, _ in shapes):
        return None
    columns = max(columns for _, columns in shapes)
    candidates = []
    for groups, rows in _STEP_US:
        each, counted = (rows // 2, shapes[:1]) if name == "GATED" else (rows, shapes)
        blocks = -(-tokens // (64 * groups)) * sum(-(-n // each) for n, _ in counted)
        for splits in _SPLITS if name == "PLAIN" else (1,):
            waves = -(-blocks * splits // _PROGRAMS)
            steps = -(-columns // (64 * splits))
            us = steps * _STEP_US[groups, rows] + _TILE_US
            if splits > 1:
                us += _SPLIT_US + splits * groups * rows * _PART_US
            candidates.append((waves * us, groups, rows, splits))
    return LargeTile(*min(candidates)[1:])


def default_tile(name: str, bucket: int, shapes: Shapes) -> Tile | LargeTile | None:
    """Return the tile without a measured plan; None: torch computes it.

    Our kernels are chosen where one launch replaces several, as measured on an H200.
    """
    if name == "RESIDUAL" or len(shapes) < 2 or (name == "APART" and bucket > 512):
        return None
    if bucket >= 128:
        return large_tile(name, bucket, shapes)
    if name != "PLAIN":
        return None
    return Tile(bucket, 32, 128, 1, 4, 5) if bucket <= 32 else Tile(64, 64, 64, 1, 4, 6)


@dataclass(frozen=True)
class KernelPlan:
    """Choice of kernel for every GEMM of a model, and factor pairs that are multiplied out.

    Attributes:
        choices: tiles by `choice_key`; None: torch computes it. `default_tile` applies to keys
            that are missing.
        dense: names of groups of factor pairs, as by `group_key`, that are replaced by their
            product because it is faster.
        device: name of the device on which the plan was measured; empty: not measured.
        forced: use our kernels for everything, and compute queries from their factors inside
            prefill attention. For comparisons.
    """

    choices: Mapping[str, Tile | LargeTile | None] = field(default_factory=dict)
    dense: frozenset[str] = frozenset()
    device: str = ""
    forced: bool = False

    def tile(self, name: str, tokens: int, shapes: Shapes) -> Tile | LargeTile | None:
        """Return the tile for a GEMM of ``tokens`` rows of input; None: torch computes it.

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

    def multiply_out(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with the groups in ``dense`` replaced by their products."""
        if not self.dense:
            return checkpoint
        return replace(checkpoint, layers=tuple(map(self._multiply_out, checkpoint.layers)))

    def _multiply_out(self, layer: LayerWeights) -> LayerWeights:
        for names in PROJECTION_GROUPS:
            if group_key(layer, names) in self.dense:
                layer = multiplied_out(layer, names)
        return layer

    @property
    def hash(self) -> str:
        """16 hex digits over all fields."""
        return hashlib.sha256(self._text.encode()).hexdigest()[:16]

    @property
    def _text(self) -> str:
        choices = {name: tile and asdict(tile) for name, tile in self.choices.items()}
        fields = {
            "forced": self.forced,
            "device": self.device,
            "dense": sorted(self.dense),
            "choices": choices,
        }
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
                raise ValueError("a tile of a size that the kernels do not support")
            return cls(choices, frozenset(read["dense"]), read["device"], read["forced"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"{path} is not a kernel plan: {error!r}") from error


def _tile(fields: dict[str, int]) -> Tile | LargeTile:
    return LargeTile(**fields) if "groups" in fields else Tile(**fields)


def choice_key(name: str, bucket: int, shapes: Shapes) -> str:
    """Key of a choice, such as ``GATED 16: 11008x1024 11008x1024``."""
    return f"{name} {bucket}: " + " ".join(f"{rows}x{columns}" for rows, columns in shapes)


def group_key(layer: LayerWeights, names: Sequence[str]) -> str | None:
    """Key of a group of factor pairs, such as ``o 4096x1024x4096``: rows, rank and columns.

    None if one of the projections is dense.
    """
    pairs = {name: getattr(layer, name) for name in names}
    if not all(isinstance(pair, FactorPair) for pair in pairs.values()):
        return None
    return " ".join(f"{n} {len(p.u)}x{p.rank}x{p.v.shape[1]}" for n, p in pairs.items())


def multiplied_out(layer: LayerWeights, names: Sequence[str]) -> LayerWeights:
    """Return the layer with W = U V, computed in fp32, in place of the named factor pairs."""
    dense: dict[str, Any] = {}
    for name in names:
        pair = getattr(layer, name)
        whole = (pair.u.float() @ pair.v.float()).to(pair.u.dtype)
        dense[name] = Dense(whole, pair.bias)
    return replace(layer, **dense)
