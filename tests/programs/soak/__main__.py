"""Load, cancellations and faults drawn from a seed: ``python -m tests.programs.soak``.

The requests are turns of chats, whose histories are in the prefix caches of workers. The load
generator compares every greedy answer with that of a colocated deployment without a prefix cache,
and writes its report with the faults on the timeline. The exit code is 1 if an answer was wrong, a
request hung, or something crashed, leaked or left an error unhandled. ``--cancels N`` cancels N
requests at random points instead, without faults.
"""

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from loadgen.files import read_run
from tests.harness import links
from tests.harness.deployment import Running, deployed, unhandled_errors
from tests.harness.random_model import RandomModel
from tests.programs.soak.leaks import Resources
from tests.programs.soak.prompts import write_prompts
from tests.programs.soak.schedule import RANK_TIMEOUT_S, as_option, draw
from tests.programs.soak.verdict import DEADLINE_S, HUNG_S, Verdict, crashes, first_answers
from tests.programs.soak.watch import Watch, watched

SLOT_BYTES = str(1 << 14)
ENVIRONMENT = {
    "HEADRACE_GATEWAY_DEADLINE_S": str(DEADLINE_S),
    "HEADRACE_PREFILL_SLOT_BYTES": SLOT_BYTES,  # prompts have many segments, some exceed the slab
    "HEADRACE_DECODE_SLOT_BYTES": SLOT_BYTES,
    "HEADRACE_PREFILL_RANK_TIMEOUT_S": str(RANK_TIMEOUT_S),
    "HEADRACE_DECODE_RANK_TIMEOUT_S": str(RANK_TIMEOUT_S),
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",  # 1,024 kernels of 0.6 MiB would look like a leak
    "UCX_TLS": "tcp,self",
}
COLD = {"HEADRACE_DECODE_PREFIX_CACHE": "false"}
CONCURRENCY = 6
RATE = 40
"""Requests per second that are prepared; more cannot be answered on two cores."""
CANCELLED, CANCEL_WITHIN_S = 0.2, 4.0
"""Fraction of the requests that are cancelled during a soak, and the latest time of it."""
BURST_CONCURRENCY, BURST_CANCELLED, BURST_WITHIN_S = 24, 0.95, 1.5
"""The same with ``--cancels``."""
BURST_REQUESTS = 1.15
"""Requests for each one to cancel; some end before."""
CUT = "cut-link"
IDLE_S = 120.0
USAGE_ERROR = 2
say = partial(Console().print, highlight=False, markup=False, soft_wrap=True)


def main() -> int:
    own = _arguments()
    own.out.mkdir(parents=True, exist_ok=True)
    no_cuts = links.enter_namespace()
    say(f"soak: seed {own.seed}")
    if no_cuts is not None:
        say(f"links are not cut: {no_cuts}")
    model = ("--model", str(RandomModel("tiny").ensure()))
    workers = ("--prefill", "2", "--decode", "2", "--tp", str(own.tp))
    with (
        deployed("--colocated", *model, environment=COLD) as reference,
        deployed(*workers, *model, environment=ENVIRONMENT, logs=own.out, patient=False) as running,
        watched(running) as watch,
    ):
        running.wait_for_all_workers()
        before = Resources.of(running)
        _load(own, running, reference, cuts=no_cuts is None)
        running.wait_for_all_workers()
        running.wait_until_idle(IDLE_S)
        leaked = Resources.leaked(running, before, IDLE_S)
    return _report(own, watch, leaked)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.programs.soak")
    parser.add_argument("--seconds", type=float, default=600, help="duration of the load")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--cancels", type=int, default=0, help="requests to cancel, without faults")
    parser.add_argument("--turns", type=int, default=4, help="turns of a chat; 1: no history")
    parser.add_argument("--tp", type=int, default=1, help="ranks of each worker; faults hit all")
    parser.add_argument("--out", type=Path, default=Path("runs/soak"))
    return parser.parse_args()


def _load(own: argparse.Namespace, running: Running, reference: Running, *, cuts: bool) -> None:
    """Run the load generator against the deployment; its results are in ``own.out``."""
    prompts = own.out / "prompts.jsonl"
    requests = int(BURST_REQUESTS * own.cancels if own.cancels else RATE * own.seconds)
    write_prompts(prompts, running, reference, seed=own.seed, count=requests, turns=own.turns)
    command = [
        *(sys.executable, "-m", "loadgen", "run", f"{running.url}/v1,grpc://{running.grpc_target}"),
        *("--gateway-port", str(running.port), "--model", running.model),
        *("--check-against", f"grpc://{reference.grpc_target}"),
        *("--file", str(prompts), "--timeout", str(2 * HUNG_S), "--most-lag", "60"),
        *("--seed", str(own.seed), "--out", str(own.out)),
    ]
    if own.cancels:
        command += ["--requests", str(requests), "--concurrency", str(BURST_CONCURRENCY)]
        command += ["--cancel", str(BURST_CANCELLED), "--cancel-within", str(BURST_WITHIN_S)]
    else:
        command += ["--duration", str(own.seconds), "--concurrency", str(CONCURRENCY)]
        command += ["--cancel", str(CANCELLED), "--cancel-within", str(CANCEL_WITHIN_S)]
        if cuts:
            _write_cut_command(own.out, running.port)
        for fault in draw(own.seed, own.seconds, CUT if cuts else None, own.tp):
            command += ["--fault", as_option(fault)]
    environment = os.environ | {
        "GRPC_VERBOSITY": "ERROR",  # else it logs each fork of the process
        "PATH": f"{own.out.absolute()}:{os.environ['PATH']}",
    }
    done = subprocess.run(command, env=environment)
    if done.returncode == USAGE_ERROR:  # with other codes there are results, which are evaluated
        sys.exit(USAGE_ERROR)


def _write_cut_command(folder: Path, port: int) -> None:
    """Write the command that cuts the links of a worker; its short name is in the report."""
    script = folder / CUT
    command = shlex.join([sys.executable, "-m", "tests.harness.links", str(port)])
    script.write_text(f'#!/bin/sh\nexec {command} "$1"\n')
    script.chmod(0o755)


def _report(own: argparse.Namespace, watch: Watch, leaked: dict[str, float]) -> int:
    records, document = read_run(own.out)
    verdict = Verdict.of(records, document)
    faults = document["faults"]
    answers = first_answers(records, faults)
    crashed = crashes(own.out / "up.log", faults, with_faults=not own.cancels, ranks=own.tp)
    unhandled = unhandled_errors(own.out)
    _say_outcomes(verdict, faults)
    say(f"crashed: {', '.join(crashed) or 'nothing'}")
    say(f"unhandled: {'; '.join(unhandled) or 'nothing'}")
    say("leaked: " + (", ".join(f"{k} {v:g}" for k, v in leaked.items()) or "nothing"))
    _say_recovery(watch, answers)
    passed = verdict.passed and not leaked and not crashed and not unhandled
    result = {
        "seed": own.seed, "passed": passed, "crashed": crashed, "leaked": leaked,
        "unhandled": unhandled, **vars(verdict),
        "first_answers": answers, "outages": [asdict(one) for one in watch.outages],
        "slopes": [asdict(one) for one in watch.slopes()],
    }  # fmt: skip
    (own.out / "soak.json").write_text(json.dumps(result, indent=1))
    say(f"{'passed' if passed else 'FAILED'}; report in {own.out / 'report.html'}")
    return 0 if passed else 1


def _say_outcomes(verdict: Verdict, faults: list[dict[str, Any]]) -> None:
    failed = sum("failed" in fault for fault in faults)
    say(f"faults: {len(faults) - failed} injected, {failed} not")
    say(
        f"requests: {verdict.total}; {verdict.answered} answered, {verdict.cancelled} cancelled "
        f"({verdict.early} before the first token), {verdict.typed.total()} with typed errors, "
        f"{verdict.lost} lost with the gateway"
    )
    for message, count in verdict.typed.most_common():
        say(f"  {count} {message}")
    say(f"answers equal to the reference: {verdict.equal}, of cancelled requests in part")
    say(f"wrong: {verdict.different}, hung: {verdict.hung}, broken: {verdict.broken.total()}")
    for message, count in verdict.broken.most_common():
        say(f"  {count} {message}")


def _say_recovery(watch: Watch, answers: dict[str, list[float]]) -> None:
    for label, seconds in answers.items():
        say(f"first answer after {label}: {_times(seconds)}")
    restarts = [one.seconds for one in watch.outages if one.restarted]
    pauses = [one.seconds for one in watch.outages if not one.restarted]
    for label, seconds in (("restarts", restarts), ("pauses", pauses)):
        if seconds:
            say(f"worker not ready, {label}: {_times(seconds)}")
    for slope in watch.slopes():
        say(
            f"RSS of {slope.process}: {slope.first_mib:.0f} to {slope.last_mib:.0f} MiB, "
            f"{slope.mib_per_minute:+.2f} MiB/min in the last {slope.span_s:.0f} s"
        )


def _times(seconds: list[float]) -> str:
    return f"{len(seconds)} times, median {median(seconds):.1f} s, maximum {max(seconds):.1f} s"


if __name__ == "__main__":
    sys.exit(main())
