"""Which products Triton computes, how it divides them, and which factor pairs are multiplied out.

Two workers compute the same bits only if they choose alike. Without a file the choice is a rule; a
file has what was measured for one model on one device (`runtime.bench.plan`), and its hash is part
of the handshake.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from runtime.checkpoint.weights import Checkpoint, Dense, FactorPair, LayerWeights
from runtime.errors import PlanError
from runtime.step.weights import GROUPS

Shapes = Sequence[tuple[int, int]]
"""Rows and columns of matrices that are multiplied at a time."""
BUCKETS = (16, 32, 64, 128)
"""Tokens, up to each of which a choice is the same. With more torch's products are faster."""


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


LARGE = Tile(256, 128, 64, 1, 8, 3)
"""For many tokens: at its best three quarters as fast as cuBLAS, on an H200."""


def rule(kind: str, bucket: int, shapes: Shapes) -> Tile | None:
    """Triton where one launch takes the place of several, of which none fills the device; torch
    elsewhere. As measured on an H200."""
    if kind != "PLAIN" or len(shapes) < 2:
        return None
    if bucket <= 32:
        return Tile(bucket, 32, 128, 1, 4, 5)
    return Tile(64, 64, 64, 1, 4, 6)


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

    choices: Mapping[str, Tile | None] = field(default_factory=dict)
    dense: frozenset[str] = frozenset()
    device: str = ""
    forced: bool = False

    def tile(self, kind: str, tokens: int, shapes: Shapes) -> Tile | None:
        """How Triton is to compute products; None: torch does."""
        for bucket in BUCKETS:
            if tokens <= bucket:
                name = key(kind, bucket, shapes)
                if self.forced:
                    return Tile(min(bucket, 64), 64, 64, 1, 4, 6)
                return self.choices[name] if name in self.choices else rule(kind, bucket, shapes)
        return LARGE if self.forced else None

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
            choices = {name: tile and Tile(**tile) for name, tile in read["choices"].items()}
            if not all(tile is None or tile.possible for tile in choices.values()):
                raise ValueError("a tile of a size that kernels do not have")
            return cls(choices, frozenset(read["dense"]), read["device"], read["forced"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"{path} is no kernel plan: {error!r}") from error


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
