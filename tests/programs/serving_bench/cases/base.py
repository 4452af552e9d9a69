"""Interface of cases."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from tests.programs.serving_bench.systems import Server

Row = dict[str, Any]


@dataclass(frozen=True)
class Context:
    """Environment in which a case runs.

    Attributes:
        server: system under test.
        console: console for progress.
        records: folder for the records of single requests; None to keep none.
        limit_s: time limit of one run, in seconds.
        max_lag_s: p99 dispatch lag above which a run of the load generator is invalid.
        variants: variants of the prompts of runs. Each run takes another one.
    """

    server: Server
    console: Console
    records: Path | None = None
    limit_s: float = 120.0
    max_lag_s: float = 0.01
    variants: Iterator[int] = field(default_factory=lambda: count(1))


class Case(Protocol):
    """A measurement of one system."""

    @property
    def name(self) -> str:
        """Key of the rows in the results."""
        ...

    def rows(self, context: Context) -> Iterator[Row]:
        """Measure, and yield each row as soon as it is known.

        Raises:
            KeyboardInterrupt: if the user interrupts a run.
        """
        ...
