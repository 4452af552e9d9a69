"""The benchmark: start each system, measure each case, and write the results as they come."""

import asyncio
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape

from loadgen.errors import LoadgenError
from loadgen.report import write_page
from services.common.errors import SettingsError
from tests.programs.serving_bench.cases import Case, Context
from tests.programs.serving_bench.client import connected, event_loop, prompts
from tests.programs.serving_bench.report import page
from tests.programs.serving_bench.results import Results
from tests.programs.serving_bench.systems import Server, System

REPORT = "report.html"
_WARM_UP_SEED = 2_000_003
"""Seed of prompts that are not measured, which differ from those of cases."""
_MAX_SHOWN = 2000
"""Characters of an error that are printed."""
_FAILURES = (
    RuntimeError,
    OSError,
    ValueError,
    LookupError,
    TimeoutError,
    ExceptionGroup,
    httpx.HTTPError,
    LoadgenError,
    SettingsError,
)
"""Failures of one system or case, after which the benchmark continues with the next."""


@dataclass(frozen=True)
class Limits:
    """Time limits in seconds.

    Attributes:
        run_s: limit of one run of a case.
        total_s: time after which no other row is started; None for no limit.
        max_lag_s: p99 dispatch lag above which a run of the load generator is invalid.
    """

    run_s: float = 120.0
    total_s: float | None = None
    max_lag_s: float = 0.01


class Bench:
    """Measures systems one after the other.

    Args:
        warm_up: requests sent at once before the first case of a system, of each of two lengths.
        keep_records: whether to write the records of all requests of the load case.
    """

    def __init__(
        self,
        results: Results,
        cases: Sequence[Case],
        console: Console,
        *,
        limits: Limits,
        warm_up: int = 8,
        keep_records: bool = False,
    ) -> None:
        self._results = results
        self._cases = cases
        self._console = console
        self._limits = limits
        self._warm_up = warm_up
        self._keep_records = keep_records
        self._out = results.file.parent
        self._started = time.monotonic()

    @property
    def _time_is_up(self) -> bool:
        total_s = self._limits.total_s
        return total_s is not None and time.monotonic() - self._started > total_s

    def run(self, systems: Sequence[System]) -> None:
        """Measure every system. Ctrl-C ends the benchmark; the rows so far are kept."""
        try:
            for system in systems:
                if self._time_is_up:
                    self._console.print(f"{system.name}: left out, the time is up")
                    continue
                self._measure(system)
        except KeyboardInterrupt:
            self._results.document["stopped"] = True
            self._console.print("interrupted")
        self._save()

    def _measure(self, system: System) -> None:
        self._console.print(f"[bold]{system.name}[/]: starting")
        entry = self._results.add_system(system.name, system.describe())
        folder = self._out / re.sub(r"[^\w.+-]+", "-", system.name)
        folder.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        try:
            with system.running(folder) as server:
                entry["ready_s"] = time.monotonic() - started
                self._console.print(f"  ready after {entry['ready_s']:.1f} s: {server.model}")
                self._warm(server)
                records = folder / "records" if self._keep_records else None
                context = Context(
                    server, self._console, records, self._limits.run_s, self._limits.max_lag_s
                )
                for case in self._cases:
                    self._run_case(case, context, entry)
        except _FAILURES as error:
            entry["error"] = f"{type(error).__name__}: {error}"
            self._print_failure("failed", entry["error"])
        self._save()

    def _run_case(self, case: Case, context: Context, entry: dict[str, Any]) -> None:
        """Append the rows of a case, until it ends, fails, or the time is up."""
        rows = entry["cases"].setdefault(case.name, [])
        measured = case.rows(context)
        try:
            while not self._time_is_up and (row := next(measured, None)) is not None:
                rows.append(row)
                self._results.save()
        except _FAILURES as error:
            rows.append({"error": f"{type(error).__name__}: {error}"})
            self._print_failure(f"{case.name} failed", rows[-1]["error"])

    def _warm(self, server: Server) -> None:
        """Send some requests at once, so that no case measures first-time work."""
        requests = [
            request
            for tokens in (64, 512)
            for request in prompts(server, tokens, 16, _WARM_UP_SEED + tokens, self._warm_up)
        ]

        async def send() -> None:
            async with (
                asyncio.timeout(self._limits.run_s),
                connected(server, self._limits.run_s) as client,
            ):
                await asyncio.gather(*(client.send(request) for request in requests))

        with event_loop() as loop, suppress(TimeoutError):
            loop.run(send())

    def _print_failure(self, what: str, error: str) -> None:
        shown = escape(error[-_MAX_SHOWN:])
        self._console.print(f"  [red]{what}[/]: {shown}", highlight=False)

    def _save(self) -> None:
        self._results.save()
        write_page(self._out / REPORT, page(self._results.document))
