"""Live progress in the terminal."""

import asyncio
from collections import Counter

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loadgen.clock import Clock
from loadgen.closed_loop import ClosedLoop
from loadgen.number import ms
from loadgen.runner import Runner
from loadgen.statistics import Distribution

_PERIOD_S = 0.5
_RECENT_S = 10.0


async def follow(runner: Runner, clock: Clock, console: Console) -> None:
    """Show progress until cancelled. Does nothing if the output is not a terminal."""
    if not console.is_terminal:
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            await asyncio.sleep(_PERIOD_S)
            live.update(progress(runner, clock()), refresh=True)


def progress(runner: Runner, now: float) -> Table:
    """Return a table with the progress of the run, and rates and latencies of the last seconds."""
    records = runner.records
    closed = isinstance(runner, ClosedLoop)
    sent = [record for record in records if record.sent is not None]
    ended = [record for record in sent if record.ended is not None]
    recent = [record for record in sent if record.ended is None or record.ended > now - _RECENT_S]
    tokens = sum(at > now - _RECENT_S for record in recent for at in record.times)
    firsts = [r.first - r.due for r in recent if r.first is not None and r.failure is None]
    ttft = Distribution.of(firsts)
    failed = Counter(record.failure for record in ended if record.failure is not None)
    table = Table.grid(padding=(0, 2))
    table.add_row("time", f"{now:.0f} s" + ("" if closed else f" of {runner.load_end:.0f} s"))
    table.add_row("sent", f"{len(sent):,}" + ("" if closed else f" of {len(records):,}"))
    table.add_row("in flight", f"{len(sent) - len(ended):,}")
    table.add_row("tokens", f"{tokens / min(_RECENT_S, max(now, _PERIOD_S)):,.0f} per second")
    if ttft is not None:
        shown = f"p50 {ms(ttft.percentile(50.0))} ms, p99 {ms(ttft.percentile(99.0))} ms"
        table.add_row("first token", shown)
    if failed:
        words = ", ".join(f"{n:,} {kind.words}" for kind, n in failed.most_common())
        table.add_row("failed", Text(words, "red"))
    return table
