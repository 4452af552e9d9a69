"""Which products Triton computes, and how it divides them: a kernel plan.

Two workers compute the same bits only if they choose alike. Without a file the choice is a rule; a
file has what was measured for one model on one device (`measure`), and its hash is part of the
handshake.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from runtime.errors import PlanError

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
    """Choices by `key`; None is torch. What is not there goes by `rule`."""

    choices: Mapping[str, Tile | None] = field(default_factory=dict)
    device: str = ""
    """On which it was measured; empty: none."""

    def tile(self, kind: str, tokens: int, shapes: Shapes) -> Tile | None:
        """How Triton is to compute products; None: torch does."""
        for bucket in BUCKETS:
            if tokens <= bucket:
                name = key(kind, bucket, shapes)
                return self.choices[name] if name in self.choices else rule(kind, bucket, shapes)
        return None

    @property
    def hash(self) -> str:
        """16 hex digits over all choices."""
        return hashlib.sha256(self._text.encode()).hexdigest()[:16]

    @property
    def _text(self) -> str:
        choices = {name: tile and asdict(tile) for name, tile in self.choices.items()}
        return json.dumps({"device": self.device, "choices": choices}, sort_keys=True, indent=1)

    def save(self, path: Path) -> None:
        """As JSON."""
        path.write_text(self._text)

    @classmethod
    def load(cls, path: Path) -> "KernelPlan":
        """Raises PlanError for a file that is none."""
        try:
            read = json.loads(path.read_text())
            choices = {name: tile and Tile(**tile) for name, tile in read["choices"].items()}
            return cls(choices, read["device"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"{path} is no kernel plan: {error!r}") from error


def key(kind: str, bucket: int, shapes: Shapes) -> str:
    """The name of a choice, such as ``GATED 16: 11008x1024 11008x1024``."""
    return f"{kind} {bucket}: " + " ".join(f"{rows}x{columns}" for rows, columns in shapes)
