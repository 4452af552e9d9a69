"""Which products our kernels compute, and how, and which factor pairs are multiplied out.

Two workers compute the same bits only if they choose alike. Without a file the choice is a rule; a
file has what was measured for one model on one device (`runtime.bench.plan`), and its hash is part
of the handshake.
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
from runtime.gemm.weights import EIGHT, GROUPS

Shapes = tuple[tuple[int, int], ...]
"""Rows and columns of matrices that are multiplied at a time."""
BUCKETS = (16, 32, 64, 128, 512, 2048, 8192)
"""Tokens, up to each of which a choice is the same; that of the last is for more, too."""


@dataclass(frozen=True)
class Tile:
    """What a program of `kernels.linear.linear_kernel` has: tokens, rows and columns at a time, one
    of ``splits`` parts of all columns."""

    tokens: int
    rows: int
    columns: int
    splits: int
    warps: int
    stages: int

    @property
    def possible(self) -> bool:
        """Whether kernels have tiles of this size."""
        sizes = (self.tokens, self.rows, self.columns)
        return (
            all(16 <= size <= 512 and not size & (size - 1) for size in sizes)
            and 1 <= self.splits <= 64
            and self.warps in (1, 2, 4, 8)
            and 1 <= self.stages <= 8
        )


@dataclass(frozen=True)
class LargeTile:
    """What a program of `kernels.large_linear` has: 64 tokens for each of its groups of warps,
    rows, one of ``splits`` parts of all columns."""

    groups: int
    rows: int
    splits: int = 1

    @property
    def possible(self) -> bool:
        """Whether the kernel has tiles of this size."""
        return (self.groups, self.rows) in _STEP_US and 1 <= self.splits <= 64


_STEP_US = {(2, 256): 0.62, (2, 128): 0.335, (1, 128): 0.21, (2, 64): 0.26}
"""What a program takes for 64 columns of a `LargeTile`, by its groups and rows, on an H200."""
_TILE_US, _SPLIT_US, _PART_US = 1.5, 6.0, 0.5 / 128
"""For what is around the columns of a tile, and where they are split, for that and for every 64
numbers of a part."""
_PROGRAMS = 132
_SPLITS = (1, 2, 3, 4, 6, 8)


@cache
def large_tile(kind: str, tokens: int, shapes: Shapes) -> LargeTile | None:
    """The fastest of all, by a model of an H200. None for what the kernel does not have: rows are
    counted in eights."""
    if any(rows % EIGHT for rows, _ in shapes):
        return None
    columns = max(columns for _, columns in shapes)
    possible = []
    for groups, rows in _STEP_US:
        each, counted = (rows // 2, shapes[:1]) if kind == "GATED" else (rows, shapes)
        blocks = -(-tokens // (64 * groups)) * sum(-(-n // each) for n, _ in counted)
        for splits in _SPLITS if kind == "PLAIN" else (1,):
            turns = -(-blocks * splits // _PROGRAMS)
            steps = -(-columns // (64 * splits))
            us = steps * _STEP_US[groups, rows] + _TILE_US
            if splits > 1:
                us += _SPLIT_US + splits * groups * rows * _PART_US
            possible.append((turns * us, groups, rows, splits))
    return LargeTile(*min(possible)[1:])


def rule(kind: str, bucket: int, shapes: Shapes) -> Tile | LargeTile | None:
    """Our kernels where one launch takes the place of several; torch elsewhere. As measured on an
    H200."""
    if kind == "RESIDUAL" or len(shapes) < 2 or (kind == "APART" and bucket > 512):
        return None
    if bucket >= 128:
        return large_tile(kind, bucket, shapes)
    if kind != "PLAIN":
        return None
    return Tile(bucket, 32, 128, 1, 4, 5) if bucket <= 32 else Tile(64, 64, 64, 1, 4, 6)


@dataclass(frozen=True)
class KernelPlan:
    """How products are computed, and which factor pairs are not.

    Attributes:
        choices: by `key`; None is torch. What is not there goes by `rule`.
        dense: groups of factor pairs, by `group_key`, that are multiplied out: dense they are
            faster.
        device: on which it was measured; empty: none.
        forced: everything by our kernels, prefill with queries made of their factors in attention:
            to be compared.
    """

    choices: Mapping[str, Tile | LargeTile | None] = field(default_factory=dict)
    dense: frozenset[str] = frozenset()
    device: str = ""
    forced: bool = False

    def tile(self, kind: str, tokens: int, shapes: Shapes) -> Tile | LargeTile | None:
        """How our kernels are to compute products; None: torch does."""
        bucket = next((bucket for bucket in BUCKETS if tokens <= bucket), BUCKETS[-1])
        if self.forced:
            large = large_tile(kind, tokens, shapes) if tokens > 64 else None
            return large or Tile(min(bucket, 64), 64, 64, 1, 4, 6)
        name = key(kind, bucket, shapes)
        return self.choices[name] if name in self.choices else rule(kind, bucket, shapes)

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint with groups multiplied out, in fp32, that are in ``dense``."""
        if not self.dense:
            return checkpoint
        return replace(checkpoint, layers=tuple(map(self._applied, checkpoint.layers)))

    def _applied(self, layer: LayerWeights) -> LayerWeights:
        for names in GROUPS:
            if group_key(layer, names) in self.dense:
                layer = multiplied_out(layer, names)
        return layer

    @property
    def hash(self) -> str:
        """16 hex digits over all choices."""
        return hashlib.sha256(self._text.encode()).hexdigest()[:16]

    @property
    def _text(self) -> str:
        choices = {name: tile and asdict(tile) for name, tile in self.choices.items()}
        made = {
            "forced": self.forced,
            "device": self.device,
            "dense": sorted(self.dense),
            "choices": choices,
        }
        return json.dumps(made, sort_keys=True, indent=1)

    def save(self, path: Path) -> None:
        """As JSON."""
        path.write_text(self._text + "\n")

    @classmethod
    def load(cls, path: Path) -> "KernelPlan":
        """Raises PlanError for a file that is none."""
        try:
            read = json.loads(path.read_text())
            choices = {name: tile and _tile(tile) for name, tile in read["choices"].items()}
            if not all(tile is None or tile.possible for tile in choices.values()):
                raise ValueError("a tile of a size that kernels do not have")
            return cls(choices, frozenset(read["dense"]), read["device"], read["forced"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"{path} is no kernel plan: {error!r}") from error


def _tile(fields: dict[str, int]) -> Tile | LargeTile:
    return LargeTile(**fields) if "groups" in fields else Tile(**fields)


def key(kind: str, bucket: int, shapes: Shapes) -> str:
    """The name of a choice, such as ``GATED 16: 11008x1024 11008x1024``."""
    return f"{kind} {bucket}: " + " ".join(f"{rows}x{columns}" for rows, columns in shapes)


def group_key(layer: LayerWeights, names: Sequence[str]) -> str | None:
    """The name of a layer's factor pairs that share an input, such as ``o 4096x1024x4096``: rows,
    rank and columns. None where one is dense."""
    pairs = {name: getattr(layer, name) for name in names}
    if not all(isinstance(pair, FactorPair) for pair in pairs.values()):
        return None
    return " ".join(f"{n} {len(p.u)}x{p.rank}x{p.v.shape[1]}" for n, p in pairs.items())


def multiplied_out(layer: LayerWeights, names: Sequence[str]) -> LayerWeights:
    """The layer with W = U V of some of its factor pairs."""
    made: dict[str, Any] = {}
    for name in names:
        pair = getattr(layer, name)
        whole = (pair.u.float() @ pair.v.float()).to(pair.u.dtype)
        made[name] = Dense(whole, pair.bias)
    return replace(layer, **made)
