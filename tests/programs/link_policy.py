"""Check that the link policy is within 10 % of the better fixed codec on every link.

``OMP_NUM_THREADS=1 python -m tests.programs.link_policy [--device cuda] [--json FILE] [--links
NAME,…] [--rounds N] [--prompts N] [--tokens N]``

One real decode worker fetches KV from three real prefill workers in rotation, with ``codec`` raw,
splitzip and auto. A transfer has all parts of a real one: gRPC sessions, credits, codec, NIXL
READs, verification, acknowledgements. The KV is computed beforehand (`tests.programs.kept_prompt`),
so that only the transfer takes time. The measured time is that of `Receiver.fetch`, from the
request to the last verified page. The three workers take turns, and the table shows medians.

On the CPU the KV is that of one prompt, 4,096 tokens of SmolLM2-135M (94 MB in bf16). On GPUs it
has the shape of Llama-3-8B's (128 KiB a token), for 8 concurrent requests of 8,192 tokens, and the
rate is compared with that of plain NIXL READs between the same GPUs.

**Throttling.** For the 100 Mbit/s and 1 Gbit/s links, all four processes run in a network namespace
of their own. It has only a loopback interface, whose egress a token bucket of the kernel limits
(``tc qdisc … tbf``). UCX over TCP and gRPC share that rate in both directions, with headers,
acknowledgements and queueing (at most 20 ms) as on a real link. This needs iproute2 and either root
or user namespaces. The unthrottled links are loopback TCP and shared memory.
"""

import argparse
import asyncio
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import uvloop
from rich.console import Console
from rich.table import Table

import codec
from headrace.v1 import decode_pb2, request_pb2, sampling_pb2
from runtime.checkpoint.canonical import write_checkpoint
from runtime.engine import Reserved
from runtime.models.build import build_model
from runtime.offline.bench.shapes import SHAPES, random_checkpoint
from runtime.pages.plan import PAGE_SIZE
from runtime.pages.sent import SentTokens
from runtime.pages.sizes import sequence_bytes
from services.common.logging import configure_logging
from services.common.token_ids import pack_tokens
from services.decode.service import DecodeWorker
from services.decode.settings import DecodeSettings
from services.offline.calibrate import calibrate
from services.offline.real_kv import prefill_sample
from services.transfer.agent import TransferAgent
from services.transfer.fetch import Fetch
from services.worker.codec_warm_up import warm_up_transfers
from services.worker.loading import load_worker
from services.worker.threads import set_switch_interval
from tests.programs.kept_prompt import SMOLLM2, Workload

CODECS = ("raw", "splitzip", "auto")
GOAL = 1.10  # time with auto / time with the better fixed codec
_MIB = 1 << 20


@dataclass(frozen=True)
class Link:
    """Connection between the workers.

    Attributes:
        name: name in the table.
        rate: rate in tc's notation, or None if the link is not throttled.
        transports: value of ``UCX_TLS``, or None for UCX's default.
        rounds: number of fetches from each worker.
        gpus: numbers of the GPUs of the prefill workers and of the decode worker; None on the CPU.
    """

    name: str
    rate: str | None
    transports: str | None
    rounds: int
    gpus: tuple[int, int] | None = None

    def wrap(self, command: list[str]) -> list[str]:
        """Return a command that runs ``command`` over this link."""
        if self.rate is None:
            return command
        shape = f"tc qdisc add dev lo root tbf rate {self.rate} burst 256kb latency 20ms"
        script = f"ip link set lo up && {shape} && exec {shlex.join(command)}"
        return ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", script]

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the decode worker's process."""
        chosen = {"UCX_TLS": self.transports} if self.transports else {}
        if self.gpus is not None:
            chosen |= {"CUDA_VISIBLE_DEVICES": str(self.gpus[1])}
            chosen |= {"PREFILL_GPU": str(self.gpus[0])}
        return {**os.environ, "OMP_NUM_THREADS": "1", **chosen}


LINKS = (
    Link("100 Mbit/s", "100mbit", "tcp,self", 3),
    Link("1 Gbit/s", "1gbit", "tcp,self", 9),
    Link("loopback TCP", None, "tcp,self", 41),
    Link("shared memory", None, None, 41),
    Link("NVLink", None, None, 9, (0, 1)),
    Link("one GPU", None, None, 9, (0, 0)),
    Link("GPUs over TCP", None, "tcp,cuda_copy,self", 3, (0, 1)),
)


class Prefill:
    """A running `tests.programs.kept_prompt`."""

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
def prefill_worker(codec: str, workload: Path) -> Iterator[Prefill]:
    """Start a prefill worker, and end it when the block ends."""
    command = [sys.executable, "-m", "tests.programs.kept_prompt", "--codec", codec]
    command += ["--workload", str(workload)]
    environment = dict(os.environ)
    if "PREFILL_GPU" in environment:
        environment["CUDA_VISIBLE_DEVICES"] = environment["PREFILL_GPU"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        yield Prefill(process)
        process.communicate()


async def measure(workload: Workload, file: Path, rounds: int) -> dict[str, Any]:
    """Return the seconds of every round and the final report of the worker, by codec."""
    settings = DecodeSettings.model_validate(workload.settings(workload.prompts))
    loaded = load_worker(settings, decodes=True)
    agent = TransferAgent(
        f"decode-{loaded.identity.epoch}", loaded.rank.device, network=settings.transfer_network
    )
    endpoint = loaded.rank.new_endpoint(agent)
    worker = DecodeWorker(settings, loaded, (endpoint,))
    warm_up_transfers(loaded.rank, endpoint)
    set_switch_interval()
    worker.engine.start()
    sent = SentTokens.whole(endpoint.layout.plan, workload.tokens)
    seconds: dict[str, list[float]] = {codec: [] for codec in CODECS}
    with ExitStack() as stack:
        workers = {c: stack.enter_context(prefill_worker(c, file)) for c in CODECS}
        for number in range(rounds):
            for codec in CODECS[number % 3 :] + CODECS[: number % 3]:
                fetches = [
                    fetch_of(workload, workers[codec], f"{codec}-{number}-{index}", index, sent)
                    for index in range(workload.prompts)
                ]
                for plane in loaded.rank.executor.cache.planes:
                    plane.zero_()
                begun = time.perf_counter()
                await asyncio.gather(*map(worker.receiver.fetch, fetches))
                seconds[codec].append(time.perf_counter() - begun)
                for fetch in fetches:
                    found = repr(endpoint.digest(fetch.reserved.result().page_tables, sent))
                    if found != workers[codec].digest:
                        raise RuntimeError(f"{codec}: the received KV differs from the sent KV")
        reports = {codec: workers[codec].report() for codec in CODECS}
        await worker.close()
        endpoint.close()
    page_bytes = endpoint.layout.page_bytes
    kv_bytes = workload.prompts * sequence_bytes(page_bytes, workload.tokens)
    return {"seconds": seconds, "reports": reports, "kv_bytes": kv_bytes}


def fetch_of(
    workload: Workload, prefill: Prefill, name: str, index: int, sent: SentTokens
) -> Fetch:
    """Return a fetch of the whole prompt into its own pages of the cache."""
    request = request_pb2.Request(
        request_id=name,
        placement_id=name,
        tokens=pack_tokens(workload.prompt()),
        prompt_tokens=workload.tokens,
        sampling=sampling_pb2.Sampling(top_p=1.0, repetition_penalty=1.0),
        max_tokens=8,
        choices=1,
    )
    count = workload.tokens // PAGE_SIZE
    pages = tuple(range(index * count, (index + 1) * count))
    reserved: asyncio.Future[Reserved] = asyncio.get_running_loop().create_future()
    reserved.set_result(Reserved(name, (pages,)))
    return Fetch(
        key=name,
        prefill=prefill.address,
        request=request,
        reserved=reserved,
        sent=sent,
        on_first=lambda first: False,
        on_verified=lambda times: None,
        deadline_s=120.0,
    )


def read_rate(link: Link) -> float:
    """Return the highest rate of plain NIXL READs between the link's GPUs, in bytes per second."""
    command = [sys.executable, "-m", "services.transfer.bench", "--best"]
    run = subprocess.run(command, env=link.environment, check=True, capture_output=True, text=True)
    return float(run.stdout.split()[-1])


def measure_link(link: Link, workload: Workload, rounds: int) -> dict[str, Any]:
    """Measure one link in separate processes and return its row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        out, file = Path(folder) / "out.json", Path(folder) / "workload.json"
        file.write_text(json.dumps(asdict(workload)))
        inside = [sys.executable, "-m", "tests.programs.link_policy", "--inside", str(out)]
        inside += ["--workload", str(file), "--rounds", str(rounds)]
        subprocess.run(link.wrap(inside), env=link.environment, check=True)
        result: dict[str, Any] = json.loads(out.read_text())
    medians = {codec: statistics.median(times) for codec, times in result["seconds"].items()}
    best = min(medians["raw"], medians["splitzip"])
    row = {
        "link": link.name,
        "rounds": rounds,
        **{f"{codec}_s": median for codec, median in medians.items()},
        "first_auto_s": result["seconds"]["auto"][0],
        "auto_to_best": medians["auto"] / best,
        "kv_bytes_per_second": result["kv_bytes"] / best,
        **result,
    }
    if link.gpus is not None:
        row["read_bytes_per_second"] = read_rate(link)
    return row


def smollm2_workload(folder: Path) -> Workload:
    """Return the workload of the CPU, with codebooks calibrated for it."""
    codebooks = folder / "codebooks.json"
    calibrate(SMOLLM2, SMOLLM2, codebooks)
    return Workload(SMOLLM2, "cpu", 4096, 512, 1, str(codebooks))


def gpu_workload(folder: Path, tokens: int, prompts: int) -> Workload:
    """Return a workload with the KV shape of Llama-3-8B, of a model with few parameters."""
    config = replace(
        SHAPES["llama-3-8b"], vocab_size=512, hidden_size=128, intermediate_size=128, num_heads=8
    )
    checkpoint = random_checkpoint(config, 1.0)
    write_checkpoint(checkpoint, folder / "model")
    model = build_model(checkpoint, device="cuda", dtype=torch.bfloat16, page_size=PAGE_SIZE)
    text = [100 + 37 * number % 397 for number in range(4096)]
    samples = prefill_sample(model, text, Console(stderr=True))
    books = {key: codec.calibrate(sample, sample.dtype) for key, sample in samples.items()}
    codec.Codebooks.of(books).save(folder / "codebooks.json")
    chunk = min(2048, tokens)
    return Workload(
        str(folder / "model"), "cuda", tokens, chunk, prompts, str(folder / "codebooks.json")
    )


def table_of(rows: list[dict[str, Any]]) -> Table:
    """Return a table of the medians of all links."""
    table = Table("link", "raw", "splitzip", "auto", "auto, first", "auto / best", "best", "READ")
    for row in rows:
        times = (row[key] for key in ("raw_s", "splitzip_s", "auto_s", "first_auto_s"))
        rates = (row["kv_bytes_per_second"], row.get("read_bytes_per_second"))
        table.add_row(
            row["link"],
            *(f"{t:.3f} s" for t in times),
            f"{row['auto_to_best']:.3f}",
            *(f"{rate / 1e9:.2f} GB/s" if rate else "" for rate in rates),
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--links", help="names, separated by commas; default: all of the device")
    parser.add_argument("--rounds", type=int, help="number of fetches from each worker")
    parser.add_argument("--prompts", type=int, default=8, help="concurrent requests, on GPUs")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a prompt, on GPUs")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--workload", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        configure_logging("decode", level="warning")
        workload = Workload(**json.loads(arguments.workload.read_text()))
        result = uvloop.run(measure(workload, arguments.workload, arguments.rounds))
        arguments.inside.write_text(json.dumps(result))
        return 0
    on_gpus = arguments.device == "cuda"
    links = [link for link in LINKS if (link.gpus is not None) == on_gpus]
    if on_gpus and torch.cuda.device_count() == 1:  # TCP takes the same path within one GPU
        links = [replace(link, gpus=(0, 0)) for link in links if link.name != "NVLink"]
    if arguments.links:
        links = [link for link in links if link.name in arguments.links.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        if on_gpus:
            workload = gpu_workload(Path(folder), arguments.tokens, arguments.prompts)
        else:
            workload = smollm2_workload(Path(folder))
        rows = [measure_link(link, workload, arguments.rounds or link.rounds) for link in links]
    Console(width=120).print(table_of(rows))
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    record = {"machine": machine, "workload": asdict(workload), "rows": rows}
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1))
    return 0 if all(row["auto_to_best"] <= GOAL for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
