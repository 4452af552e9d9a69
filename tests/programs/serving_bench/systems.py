"""Systems under test: deployments of `headrace up`, and peers with OpenAI's API."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
import psutil

from loadgen.errors import UsageError
from loadgen.target.api import find_api
from tests.harness.deployment import deployed
from tests.harness.random_model import RandomModel

_JSON_LOGS = {f"HEADRACE_{role}_LOG_FORMAT": "json" for role in ("PREFILL", "DECODE")}
_STOP_S = 30.0
_POLL_S = 0.5


@dataclass(frozen=True)
class Server:
    """A system that is ready.

    Attributes:
        target: URL of the API with ``/v1``; several, separated by commas, for replicas.
        model: name of the served model.
        tokenizer: folder or file of the tokenizer; None to use the server's ``/tokenize``.
        metrics: URLs of Prometheus metrics, by process name.
    """

    target: str
    model: str
    tokenizer: Path | None = None
    metrics: dict[str, str] = field(default_factory=dict)


class System(Protocol):
    """A system under test."""

    @property
    def name(self) -> str:
        """Name in the results."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return what the results say about the system: flags, settings or commands."""
        ...

    def running(self, logs: Path) -> AbstractContextManager[Server]:
        """Return a context manager that runs the system and yields its `Server`.

        Args:
            logs: existing folder for the logs of what it starts.
        """
        ...


@dataclass(frozen=True)
class Layout:
    """Workers of a deployment.

    Attributes:
        prefill: number of prefill workers; 0 for colocated workers.
        decode: number of decode workers, or of colocated ones.
        prefill_tp, decode_tp: number of ranks of each worker.
    """

    prefill: int
    decode: int
    prefill_tp: int = 1
    decode_tp: int = 1

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Parse ``colocated``, ``colocated:2`` or ``1+1`` (prefill + decode workers).

        ``x`` gives the ranks of each worker: ``colocated:1x2``, ``1x4+2x2``.

        Raises:
            ValueError: if it is none of them.
        """
        match = _COLOCATED.fullmatch(text) or _SEPARATE.fullmatch(text)
        if not match:
            raise ValueError(f"{text}: expected colocated, colocated:2, 1+1 or 1x4+2x2")
        numbers = {name: int(digits) for name, digits in match.groupdict().items() if digits}
        return cls(**{"prefill": 0, "decode": 1, **numbers})

    @property
    def flags(self) -> tuple[str, ...]:
        ranks = ("--decode-tp", str(self.decode_tp)) if self.decode_tp > 1 else ()
        decode = ("--decode", str(self.decode), *ranks)
        if not self.prefill:
            return ("--colocated", *decode)
        ranks = ("--prefill-tp", str(self.prefill_tp)) if self.prefill_tp > 1 else ()
        return ("--prefill", str(self.prefill), *ranks, *decode)

    def __str__(self) -> str:
        decode = _group(self.decode, self.decode_tp)
        if self.prefill:
            return f"{_group(self.prefill, self.prefill_tp)}+{decode}"
        return "colocated" if decode == "1" else f"colocated:{decode}"


_WORKERS = r"(?P<{0}>[1-9]\d*)(x(?P<{0}_tp>[1-9]\d*))?"
_COLOCATED = re.compile(f"colocated(:{_WORKERS.format('decode')})?")
_SEPARATE = re.compile(rf"{_WORKERS.format('prefill')}\+{_WORKERS.format('decode')}")


def _group(workers: int, ranks: int) -> str:
    return f"{workers}" if ranks == 1 else f"{workers}x{ranks}"


@dataclass(frozen=True)
class HeadraceSystem:
    """A deployment of `headrace up`.

    Attributes:
        name: name in the results.
        model: model of random weights, or name or path of a checkpoint.
        keep: ``--keep`` for a checkpoint; a model of random weights has its own.
        codec: ``--codec``; None for the default.
        kv_format: ``--kv-format``; None for the default.
        settings: environment variables of the deployment.
        start_s: time limit for the start, in seconds.
    """

    name: str
    layout: Layout
    model: RandomModel | str
    keep: float | None = None
    codec: str | None = None
    kv_format: str | None = None
    device: str = "auto"
    settings: Mapping[str, str] = field(default_factory=dict)
    start_s: float = 900.0

    def describe(self) -> dict[str, Any]:
        flags = self.layout.flags + self._further_flags()
        name = self.model if isinstance(self.model, str) else self.model.name
        return {"model": name, "flags": list(flags), "settings": dict(self.settings)}

    @contextmanager
    def running(self, logs: Path) -> Iterator[Server]:
        folder = None if isinstance(self.model, str) else self.model.ensure()
        flags = (*self.layout.flags, *self._further_flags(), "--model", str(folder or self.model))
        environment = {**_JSON_LOGS, **self.settings}
        with deployed(*flags, environment=environment, start_s=self.start_s, logs=logs) as running:
            running.wait_for_all_workers(self.start_s)
            yield Server(f"{running.url}/v1", running.model, folder, running.metrics_urls())

    def _further_flags(self) -> tuple[str, ...]:
        flags: tuple[str, ...] = ("--device", self.device)
        if self.codec is not None:
            flags += ("--codec", self.codec)
        if self.kv_format is not None:
            flags += ("--kv-format", self.kv_format)
        if self.keep is not None:
            flags += ("--keep", f"{self.keep:g}")
        return flags


@dataclass(frozen=True)
class Peer:
    """A server with OpenAI's API, or several replicas of it.

    Attributes:
        name: name in the results.
        urls: base URL of each replica, without ``/v1``.
        commands: shell commands that start the replicas; empty if they already run.
        tokenizer: folder or file of the tokenizer; None to use the server's ``/tokenize``.
        start_s: time limit for the start, in seconds.
    """

    name: str
    urls: tuple[str, ...]
    commands: tuple[str, ...] = ()
    tokenizer: Path | None = None
    start_s: float = 900.0

    def describe(self) -> dict[str, Any]:
        return {"urls": list(self.urls), "commands": list(self.commands)}

    @contextmanager
    def running(self, logs: Path) -> Iterator[Server]:
        with ExitStack() as stack:
            processes = [
                stack.enter_context(_started(command, logs / f"peer-{number}.log"))
                for number, command in enumerate(self.commands)
            ]
            targets = [f"{url.rstrip('/')}/v1" for url in self.urls]
            deadline = time.monotonic() + (self.start_s if processes else _POLL_S)
            models = [_wait_until_ready(target, processes, deadline) for target in targets]
            yield Server(",".join(targets), models[0], self.tokenizer)


@contextmanager
def _started(command: str, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a shell command until the block ends. Then all its descendants are ended."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", command], stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process group and the descendants of its leader, which may be in other groups."""
    left = []
    with suppress(psutil.NoSuchProcess):
        left = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    for each in left:
        with suppress(psutil.NoSuchProcess):
            each.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    _, alive = psutil.wait_procs(left, timeout=_STOP_S)
    for each in alive:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait_until_ready(
    target: str, processes: list["subprocess.Popen[bytes]"], deadline: float
) -> str:
    """Wait until a server answers a request, and return the name of its model.

    Raises:
        RuntimeError: if it does not in time, or if a command of its peer has failed.
    """
    while True:
        failed = [process for process in processes if process.poll()]
        if failed:
            raise RuntimeError(f"a command of the peer ended with code {failed[0].returncode}")
        try:
            model = find_api(target).model
            body = {"model": model, "prompt": "Hello", "max_tokens": 1}
            url = f"{target}/completions"
            httpx.post(url, json=body, timeout=60, trust_env=False).raise_for_status()
            return model
        except (UsageError, httpx.HTTPError) as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{target} is not ready: {error}") from error
        time.sleep(_POLL_S)
