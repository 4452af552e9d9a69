"""Measure how fast a request continues on another worker after a fault of its worker.

``OMP_NUM_THREADS=1 python -m tests.programs.recovery [--model NAME] [--rounds N]``

Two prefill and two decode workers serve a model on loopback, by default SmolLM2-135M. A request
with a prompt of 64 tokens is held at a point by `tests.harness.points`: in prefill, or while it is
decoded. Its worker then gets SIGKILL or SIGSTOP. The table shows the seconds from the signal to the
detection, which is the gateway's log line of the failure, and to the first new token at the client,
as median and maximum of the rounds.
"""

import argparse
import asyncio
import signal
import statistics
import tempfile
import time
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from services.common.model_source import DEFAULT_MODEL
from tests.harness.deployment import deployed
from tests.harness.points import LIMIT_S, Points
from tests.harness.reference import Case
from tests.harness.trial import Client, Trial

PROMPT = tuple(range(1000, 1064))
"""Token ids of a prompt; the content does not matter here."""
CASE = Case(PROMPT, (0,) * 24)


async def measure(trial: Trial, role: str, number: signal.Signals) -> tuple[float, float]:
    """Return the seconds until the detection and until the first new token."""
    trial.points.release()
    async with trial.client() as client:
        await _warm_up(client)
        await asyncio.to_thread(trial.running.wait_until_idle, LIMIT_S)
        trial.points.hold("computing", trial.workers(role), after=4 * (role == "decode"))
        reply = client.ask(CASE)
        victim = await trial.points.reached("computing")
        logged = len(_failures(trial))
        epoch = trial.running.workers()[victim]["epoch"]
        trial.signal(victim, number)
        began, began_at = time.monotonic(), time.time()
        trial.points.release()
        await reply.read(1 + 5 * (role == "decode"))  # the first one that is not the victim's
        recovered_s = time.monotonic() - began
        detected_s = _failures(trial)[logged] - began_at
        await reply.read(len(CASE.answer))
    if number is signal.SIGSTOP:
        trial.signal(victim, signal.SIGCONT)
        await asyncio.sleep(2)
    else:
        await asyncio.to_thread(trial.running.wait_for_new_epoch, victim, epoch)
    await asyncio.to_thread(trial.running.wait_for_all_workers, LIMIT_S)
    await asyncio.to_thread(trial.running.wait_until_idle, LIMIT_S)
    return detected_s, recovered_s


async def _warm_up(client: Client) -> None:
    """Let every worker serve, so that all sessions are open."""
    replies = [client.ask(CASE) for _ in range(8)]
    for reply in replies:
        await reply.read(len(CASE.answer))


def _failures(trial: Trial) -> list[float]:
    """Return the times at which the gateway saw that a worker failed a request, since 1970."""
    records = trial.running.records("gateway", "worker failed a request")
    return [datetime.fromisoformat(str(record["timestamp"])).timestamp() for record in records]


async def measure_all(trial: Trial, rounds: int) -> Table:
    """Return the table of all faults."""
    columns = ("fault", "detection p50", "max", "first new token p50", "max")
    table = Table(*columns, title="seconds after the signal")
    for number in (signal.SIGKILL, signal.SIGSTOP):
        for role, point in (("prefill", "in prefill"), ("decode", "while decoding")):
            times: list[tuple[float, float]] = []
            for _ in range(rounds):
                times.append(await measure(trial, role, number))
                Console(stderr=True).print(number.name, role, *(f"{s:.2f} s" for s in times[-1]))
            cells: list[str] = []
            for column in zip(*times, strict=True):
                cells += [f"{statistics.median(column):.2f}", f"{max(column):.2f}"]
            table.add_row(f"{number.name} {role}, {point}", *cells)
    return table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name or path of a checkpoint")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of each fault")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        points = Points(Path(folder))
        environment = {"UCX_TLS": "tcp,self", **points.environment}
        flags = ("--model", options.model, "--prefill", "2", "--decode", "2")
        with deployed(*flags, environment=environment, patient=False) as running:
            running.wait_for_all_workers()
            table = asyncio.run(measure_all(Trial(running, points), options.rounds))
    Console().print(table)


if __name__ == "__main__":
    main()
