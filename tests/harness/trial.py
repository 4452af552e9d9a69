"""A deployment under faults, its clients, and the checks that follow every fault.

Every fault test asserts the same six things. Nothing hangs: each wait has a limit. Output equals
that of one process: `Reply.check`. Leases and pages return, ended processes leave nothing behind,
and the other processes live: `Trial.check_recovered`.

Names of processes are those of `headrace up`. Rank 1 of a worker is ``decode-0.1``.
"""

import asyncio
import os
import signal
import subprocess
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from grpc import aio

from headrace.v1 import inference_pb2 as pb
from headrace.v1.inference_pb2_grpc import InferenceStub
from tests.harness.belongings import Belongings
from tests.harness.deployment import Running, deployed, unhandled_errors
from tests.harness.points import LIMIT_S, Points
from tests.harness.reference import GPU_SHARE, Case, cases, model_folder

if TYPE_CHECKING:  # defined in the type stubs only
    from headrace.v1.inference_pb2_grpc import InferenceAsyncStub

LEASE_S = 8.0
_SETTINGS = {
    "HEADRACE_GATEWAY_DEADLINE_S": str(LIMIT_S),
    "HEADRACE_ROUTER_PLACEMENT_TTL_S": "5",
    "HEADRACE_PREFILL_LEASE_S": str(LEASE_S),
    "HEADRACE_DECODE_READ_TIMEOUT_S": "8",
    # A busy machine delays threads for seconds; a stopped worker is noticed within the lease.
    "HEADRACE_GATEWAY_PING_TIMEOUT_S": "6",
    "HEADRACE_DECODE_PING_TIMEOUT_S": "6",
    "HEADRACE_PREFILL_RANK_TIMEOUT_S": "6",
    "HEADRACE_DECODE_RANK_TIMEOUT_S": "6",
    "HEADRACE_GATEWAY_MAX_LOST_WORKERS": "8",
    # Prompts are sent several times, and every time from a prefill worker.
    "HEADRACE_DECODE_COMPUTE_TOKENS": "0",
}
_WORKERS = {
    "cpu": {"SLOTS": "8", "SLOT_BYTES": str(32 << 10)},  # 600 tokens have several segments
    "cuda": {"GPU_MEMORY_UTILIZATION": str(GPU_SHARE)},
}
"""Settings of prefill and decode workers on each device."""


@dataclass
class Reply:
    """Output of one request so far. ``call`` is its gRPC call."""

    case: Case
    call: "aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]"
    tokens: list[int] = field(default_factory=list)

    async def read(self, count: int) -> None:
        """Wait until ``count`` tokens have arrived."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.tokens) < count and await self._next():
                pass
        assert len(self.tokens) >= count, "the stream ended early"

    async def check(self) -> None:
        """Read the rest, and check that the output equals that of one process."""
        async with asyncio.timeout(LIMIT_S):
            while await self._next():
                pass
        assert tuple(self.tokens) == self.case.answer

    async def _next(self) -> bool:
        response = await self.call.read()
        if not isinstance(response, pb.GenerateResponse):
            return False
        self.tokens += [token.token for token in response.tokens]
        return True


class Trial:
    """A running deployment with its fault points.

    Args:
        temporary: folder of its temporary files.
    """

    def __init__(
        self,
        running: Running,
        points: Points,
        device: str = "cpu",
        temporary: Path | None = None,
    ) -> None:
        self.running = running
        self.points = points
        self._device = device
        self._temporary = temporary
        self._look()

    @property
    def short(self) -> Case:
        """A request of a few tokens."""
        return cases("short", 1, 20, 8, self._device)[0]

    @property
    def long(self) -> Case:
        """A request whose KV has several segments."""
        return cases("long", 1, 600 if self._device == "cpu" else 6000, 12, self._device)[0]

    @property
    def stream(self) -> Case:
        """A request with many output tokens."""
        # Long answers with a clear gap at every token are rare in bf16.
        return cases("stream", 1, 40, 60 if self._device == "cpu" else 12, self._device)[0]

    def workers(self, role: str) -> list[str]:
        """Return the names of the workers of a role."""
        return sorted(name for name in self.running.state.pids if name.startswith(role))

    def signal(self, process: str, number: signal.Signals) -> None:
        """Send a signal to a process; after SIGSTOP, wait until all its threads have stopped."""
        worker, _, rank = process.partition(".")
        running = self.running
        pid = running.rank_pids(worker)[int(rank)] if rank else running.state.pids[process]
        os.kill(pid, number)
        if number is signal.SIGSTOP:
            stopped = psutil.Process(pid)
            while stopped.status() != psutil.STATUS_STOPPED:
                pass

    @asynccontextmanager
    async def client(self, *, reuses: bool = False) -> AsyncIterator["Client"]:
        """Open a connection to the gateway.

        Args:
            reuses: see `Client`.
        """
        async with aio.insecure_channel(self.running.grpc_target) as channel:
            yield Client(InferenceStub(channel), reuses=reuses)

    async def check_recovered(self, *restarted: str, resumed: tuple[str, ...] = ()) -> None:
        """Check that leases, slots and pages return, that the other processes live, and answers.

        Args:
            restarted: processes that must restart; of a worker, all ranks do.
            resumed: processes that may have restarted.
        """
        self.points.release()
        for process in restarted:
            if process in self._epochs:
                old = self._epochs[process]
                await asyncio.to_thread(self.running.wait_for_new_epoch, process, old)
        await asyncio.to_thread(self.running.wait_for_all_workers)
        await asyncio.to_thread(self.running.wait_until_idle, LIMIT_S)
        for worker in self.running.workers().values():
            assert worker["pages_free"] == worker["pages_total"], worker
        async with asyncio.timeout(LIMIT_S):
            while await asyncio.to_thread(self._held):  # noqa: ASYNC110 - polls metrics
                await asyncio.sleep(0.2)
        async with self.client() as client, self.client(reuses=True) as reusing:
            senders, sent = (client, reusing), (self.short, self.long)
            replies = [sender.ask(case) for sender in senders for case in sent]
            for reply in replies:
                await reply.check()
        await asyncio.to_thread(self.running.wait_until_idle, LIMIT_S)
        pids = self.running.state.pids
        epochs = self._current_epochs()
        for process in self._pids.keys() - {*restarted, *resumed}:
            assert pids[process] == self._pids[process], f"{process} has restarted"
            assert epochs.get(process) == self._epochs.get(process), f"{process} has restarted"
        left = [
            one for name in {*restarted} & epochs.keys() for one in self._belongings[name].left()
        ]
        assert not left, f"left by earlier epochs: {left}"
        files = self._files
        self._look()
        assert self._files == files, "temporary files were left"

    def busy(self, role: str) -> str:
        """Return the only worker of a role with a lease, or with a running sequence."""
        name = "headrace_kv_lease_active" if role == "prefill" else "headrace_num_requests_running"
        (found,) = (worker for worker in self.workers(role) if self.running.metric(worker, name))
        return found

    @contextmanager
    def extra_worker(
        self,
        like: str,
        name: str,
        *flags: str,
        environment: dict[str, str] | None = None,
        wrapper: tuple[str, ...] = (),
    ) -> "Iterator[subprocess.Popen[bytes]]":
        """Run a further worker until the block ends; the supervisor does not restart it.

        Args:
            like: the worker whose command and environment it gets.
            flags: further flags, which override earlier ones.
            environment: further variables.
            wrapper: command that runs the worker's command.
        """
        process = psutil.Process(self.running.state.pids[like])
        command = [name if part == like else part for part in process.cmdline()]
        variables = {**process.environ(), **(environment or {})}
        with (self.running.logs / f"{name}.log").open("ab") as log:
            worker = subprocess.Popen(
                [*wrapper, *command, *flags], env=variables, stdout=log, stderr=log
            )
        try:
            yield worker
        finally:
            processes = [psutil.Process(worker.pid)] if worker.poll() is None else []
            processes += [child for each in processes for child in each.children()]
            for process in reversed(processes):  # a wrapper ends with the worker
                with suppress(psutil.NoSuchProcess):
                    process.terminate()
            for process in psutil.wait_procs(processes, LIMIT_S)[1]:
                process.kill()
            worker.wait(LIMIT_S)

    def sum_of(self, role: str, metric: str, **labels: str) -> float:
        """Return a metric, summed over the workers of a role."""
        return sum(self.running.metric(name, metric, **labels) for name in self.workers(role))

    def failovers(self) -> float:
        """Return the number of the gateway's failovers."""
        return self.running.gateway_metric("headrace_failovers_total")

    def _held(self) -> dict[tuple[str, str], float]:
        """Return the leases and slots that are held, by process and metric."""
        held = {
            (worker, metric): self.running.metric(worker, metric)
            for worker in (*self.workers("prefill"), *self.workers("decode"))
            for metric in ("headrace_kv_lease_active", "headrace_kv_landing_slots")
        }
        return {key: value for key, value in held.items() if value}

    def _look(self) -> None:
        """Keep what may change with a fault."""
        self._pids = self.running.state.pids
        self._epochs = self._current_epochs()
        self._belongings = {
            worker: Belongings.of(self.running.rank_pids(worker))
            for worker in self._pids.keys() & self._epochs.keys()
        }
        self._files = {*self._temporary.rglob("*")} if self._temporary else set()

    def _current_epochs(self) -> dict[str, object]:
        return {name: worker["epoch"] for name, worker in self.running.workers().items()}


class Client:
    """A client of the gateway's gRPC server.

    Args:
        reuses: whether requests reuse the KV of earlier ones. Otherwise each has a salt of its own,
            so that the KV of its whole prompt is computed and sent.
    """

    def __init__(self, stub: "InferenceAsyncStub", *, reuses: bool) -> None:
        self._stub = stub
        self._reuses = reuses

    def ask(self, case: Case) -> Reply:
        """Start a request."""
        request = pb.GenerateRequest(
            tokens=pb.TokenIds(ids=case.prompt),
            max_tokens=len(case.answer),
            temperature=0,
            ignore_eos=True,
            cache_salt="" if self._reuses else uuid.uuid4().hex,
        )
        return Reply(case, self._stub.Generate(request))


@contextmanager
def trial(
    folder: Path,
    *flags: str,
    environment: dict[str, str] | None = None,
    logs: Path | None = None,
    device: str = "cpu",
) -> Iterator[Trial]:
    """Deploy the small model with fault points until the block ends; then check the logs.

    Args:
        folder: empty folder for the control files.
        flags: further flags of `headrace up`.
        environment: variables that override those of all fault tests.
        device: cpu, with KV over TCP, or cuda, with the fastest link of the GPUs.
    """
    points = Points(folder)
    transports = {"UCX_TLS": "tcp,self"} if device == "cpu" else {}
    workers = {
        f"HEADRACE_{role}_{name}": value
        for role in ("PREFILL", "DECODE")
        for name, value in _WORKERS[device].items()
    }
    variables = {
        **_SETTINGS, **transports, **workers, **points.environment, **(environment or {})
    }  # fmt: skip
    model = ("--model", str(model_folder(device)), "--device", device)
    with tempfile.TemporaryDirectory() as temporary:
        variables["TMPDIR"] = temporary
        with deployed(*model, *flags, environment=variables, logs=logs, patient=False) as running:
            running.wait_for_all_workers()
            yield Trial(running, points, device, Path(temporary))
    unhandled = unhandled_errors(running.logs)
    assert not unhandled, unhandled
