"""Check that the link policy is within 10 % of the better fixed codec on every link.

``OMP_NUM_THREADS=1 python -m tests.e2e.link_policy [--json FILE] [--links NAME,…] [--rounds N]``

One real decode worker fetches the KV of one prompt, 4,096 tokens of SmolLM2-135M (94 MB in bf16),
from three real prefill workers in rotation, with ``codec`` raw, splitzip and auto. A transfer has
all parts of a real one: gRPC sessions, credits, codec, NIXL READs, verification, acknowledgements.
The prompt is computed beforehand (`tests.e2e.kept_prompt`), so that only the transfer takes time.
The measured time is that of `Receiver.fetch`, from the request to the last verified page. The three
workers take turns, and the table shows medians.

**Throttling.** For the 100 Mbit/s and 1 Gbit/s links, all four processes run in a network namespace
of their own. It has only a loopback interface, whose egress a token bucket of the kernel limits
(``tc qdisc … tbf``). UCX over TCP and gRPC share that rate in both directions, with headers,
acknowledgements and queueing (at most 20 ms) as on a real link. This needs iproute2 and either root
or user namespaces. The unthrottled links are loopback TCP and shared memory.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from headrace.v1 import decode_pb2, request_pb2, sampling_pb2
from services.common.logging import configure_logging
from services.decode.service import DecodeWorker
from services.decode.settings import DecodeSettings
from services.offline.calibrate import calibrate
from services.transfer.agent import TransferAgent
from services.transfer.fetch import Fetch
from services.worker.loading import PAGE_SIZE, digest_pages, load_worker
from tests.e2e.kept_prompt import TOKENS, prompt

CODECS = ("raw", "splitzip", "auto")
GOAL = 1.10  # time with auto / time with the better fixed codec


@dataclass(frozen=True)
class Link:
    """Connection between the workers.

    Attributes:
        name: name in the table.
        rate: rate in tc's notation, or None if the link is not throttled.
        transports: value of ``UCX_TLS``, or None for UCX's default.
        rounds: number of fetches from each worker.
    """

    name: str
    rate: str | None
    transports: str | None
    rounds: int

    def wrap(self, command: list[str]) -> list[str]:
        """Return a command that runs ``command`` over this link."""
        if self.rate is None:
            return command
        shape = f"tc qdisc add dev lo root tbf rate {self.rate} burst 256kb latency 20ms"
        script = f"ip link set lo up && {shape} && exec {shlex.join(command)}"
        return ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", script]

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the processes that use this link."""
        chosen = {"UCX_TLS": self.transports} if self.transports else {}
        return {**os.environ, "OMP_NUM_THREADS": "1", **chosen}


LINKS = (
    Link("100 Mbit/s", "100mbit", "tcp,self", 3),
    Link("1 Gbit/s", "1gbit", "tcp,self", 9),
    Link("loopback TCP", None, "tcp,self", 41),
    Link("shared memory", None, None, 41),
)


class Prefill:
    """A running `tests.e2e.kept_prompt`."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        ready = self._read()
        self.digest = str(ready.pop("digest"))
        self.address = decode_pb2.WorkerAddress(**ready)

    def report(self) -> dict[str, Any]:
        """Return the metrics of the worker's link policy."""
        if self._process.stdin is None:
            raise RuntimeError("the prefill worker has no stdin")
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def prefill_worker(codec: str, codebooks: str) -> Iterator[Prefill]:
    """Start a prefill worker, and end it when the block ends."""
    command = [sys.executable, "-m", "tests.e2e.kept_prompt", "--codec", codec]
    command += ["--codebooks", codebooks]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        yield Prefill(process)
        process.communicate()


async def measure(codebooks: str, rounds: int) -> dict[str, Any]:
    """Return the seconds of every fetch and the final report of the worker, by codec."""
    settings = DecodeSettings.model_validate(
        {"codebooks": codebooks, "device": "cpu", "kv_tokens": TOKENS + PAGE_SIZE}
    )
    loaded = load_worker(settings, decodes=True)
    landing = loaded.new_slab()
    agent = TransferAgent(f"decode-{loaded.identity.epoch}", network=settings.transfer_network)
    agent.register(landing)
    worker = DecodeWorker(settings, loaded, agent, landing)
    worker.engine.start()
    seconds: dict[str, list[float]] = {codec: [] for codec in CODECS}
    with ExitStack() as stack:
        workers = {c: stack.enter_context(prefill_worker(c, codebooks)) for c in CODECS}
        for number in range(rounds):
            for codec in CODECS[number % 3 :] + CODECS[: number % 3]:
                fetch = fetch_of(workers[codec], f"{codec}-{number}")
                for plane in loaded.engine.cache.planes:
                    plane.zero_()
                begun = time.perf_counter()
                await worker.receiver.fetch(fetch)
                seconds[codec].append(time.perf_counter() - begun)
                found = digest_pages(loaded.engine, fetch.pages, TOKENS)
                if found != workers[codec].digest:
                    raise RuntimeError(f"{codec}: the received KV differs from the sent KV")
        reports = {codec: workers[codec].report() for codec in CODECS}
        await worker.close()
        agent.close()
    return {"seconds": seconds, "reports": reports}


def fetch_of(prefill: Prefill, name: str) -> Fetch:
    """Return a fetch of the whole prompt into the first pages of the cache."""
    request = request_pb2.Request(
        request_id=name,
        placement_id=name,
        tokens=prompt(),
        prompt_tokens=TOKENS,
        sampling=sampling_pb2.Sampling(top_p=1.0, repetition_penalty=1.0),
        max_tokens=8,
        choices=1,
    )
    pages = tuple(range(TOKENS // PAGE_SIZE))
    return Fetch(name, prefill.address, request, pages, lambda first: False, deadline_s=120.0)


def measure_link(link: Link, codebooks: Path, rounds: int) -> dict[str, Any]:
    """Measure one link in separate processes and return its row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        inside = [sys.executable, "-m", "tests.e2e.link_policy", "--inside", str(out)]
        inside += ["--codebooks", str(codebooks), "--rounds", str(rounds)]
        subprocess.run(link.wrap(inside), env=link.environment, check=True)
        result: dict[str, Any] = json.loads(out.read_text())
    medians = {codec: statistics.median(times) for codec, times in result["seconds"].items()}
    best = min(medians["raw"], medians["splitzip"])
    return {
        "link": link.name,
        "rounds": rounds,
        **{f"{codec}_s": median for codec, median in medians.items()},
        "first_auto_s": result["seconds"]["auto"][0],
        "auto_to_best": medians["auto"] / best,
        **result,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--links", help="names, separated by commas; default: all")
    parser.add_argument("--rounds", type=int, help="number of fetches from each worker")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--codebooks", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        configure_logging("decode", level="warning")
        result = uvloop.run(measure(arguments.codebooks, arguments.rounds))
        arguments.inside.write_text(json.dumps(result))
        return 0
    wanted = arguments.links.split(",") if arguments.links else [link.name for link in LINKS]
    table = Table("link", "raw", "splitzip", "auto", "auto, first", "auto / best")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        codebooks = Path(folder) / "codebooks.json"
        calibrate("smollm2-135m", "smollm2-135m", codebooks)
        for link in LINKS:
            if link.name in wanted:
                row = measure_link(link, codebooks, arguments.rounds or link.rounds)
                rows.append(row)
                times = (row[key] for key in ("raw_s", "splitzip_s", "auto_s", "first_auto_s"))
                table.add_row(
                    link.name, *(f"{t:.3f} s" for t in times), f"{row['auto_to_best']:.3f}"
                )
    Console(width=100).print(table)
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    record = json.dumps({"machine": machine, "tokens": TOKENS, "rows": rows}, indent=1)
    if arguments.json:
        arguments.json.write_text(record)
    return 0 if all(row["auto_to_best"] <= GOAL for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
