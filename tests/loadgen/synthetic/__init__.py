"""Synthetic server with exactly known latencies, as ground truth for the load generator.

It implements OpenAI's API over HTTP/1.1 and ``headrace.v1.Inference`` over gRPC in a separate
process (`serving`), which tests share, one after the other. Event i of an answer is written at
``started + ttft_s + i * itl_s``: deadlines are absolute, so that lateness does not accumulate. Its
log contains the actual times. All times are seconds of ``time.monotonic()``, which all processes of
a Linux machine share.

Only generation requests are numbered, use slots, and are subject to outcomes and stalls. Requests
for metadata are not.
"""

import atexit
import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

MODEL = "synthetic"
DEFAULT_MAX_TOKENS = 16

_ROOT = Path(__file__).parents[3]


class Outcome(StrEnum):
    """Outcome of a request.

    "Midway" means: in place of event n // 2 of n, at the time when that event is due.
    """

    OK = "ok"
    RESET_BEFORE = "reset_before"
    """RST before any byte. gRPC: UNAVAILABLE."""
    CLOSE_BEFORE = "close_before"
    """FIN before any byte. gRPC: UNAVAILABLE."""
    RESET_MIDWAY = "reset_midway"
    """RST midway. gRPC: UNAVAILABLE midway."""
    HALF_CLOSE = "half_close"
    """FIN midway, inside the chunked body. gRPC: status OK midway, without a finish_reason."""
    NO_DONE = "no_done"
    """A complete answer without ``data: [DONE]``. gRPC: without finish_reason and usage."""
    MALFORMED_JSON = "malformed_json"
    """One event midway is not JSON; later ones are valid. gRPC: UNIMPLEMENTED."""
    MALFORMED_HTTP = "malformed_http"
    """Garbage instead of a status line, then FIN. gRPC: UNIMPLEMENTED."""
    STATUS_400 = "status_400"
    """HTTP status 400. gRPC: INVALID_ARGUMENT."""
    STATUS_429 = "status_429"
    """HTTP status 429. gRPC: RESOURCE_EXHAUSTED."""
    STATUS_500 = "status_500"
    """HTTP status 500. gRPC: INTERNAL."""
    ERROR_EVENT = "error_event"
    """An event with an error midway, which ends the stream. gRPC: INTERNAL midway."""
    EMPTY = "empty"
    """A complete answer without tokens, which ends when its first event is due."""
    SLOW = "slow"
    """Only headers (gRPC: initial metadata), then nothing until the client disconnects."""
    SLOW_HEADERS = "slow_headers"
    """Nothing until the client disconnects."""


@dataclass(frozen=True)
class Behaviour:
    """Behaviour of the server.

    Attributes:
        ttft_s: seconds from the start of a request to its first event.
        itl_s: seconds between events.
        tokens_per_event: tokens per event; the last event may have fewer.
        stall_s: begin and end of a stall, in seconds after the first request was read. Nothing is
            read or written during the stall. Events due during it are written at its end; later
            events keep their times.
        concurrency: number of slots, or None for no limit. A request holds a slot until its last
            event; requests without a slot wait in order of arrival. The slot's next request starts
            at the time when the last event was *due*, so that lateness does not accumulate.
            Requests whose outcome has no events use no slot, except those with `EMPTY`.
        outcomes: outcomes of requests in order of arrival, repeated cyclically.
        prefix_cache: tokens per block of a prefix cache without evictions, whose hits are reported;
            None for a server without one, which reports no hits over HTTP, and 0 over gRPC.
        prefill_s: seconds for each prompt token that is not cached, in addition to ``ttft_s``.
        token_ids: whether completions support ``return_token_ids``; otherwise it is ignored.

    Raises:
        ValueError: if a value is out of range.
    """

    ttft_s: float = 0.0
    itl_s: float = 0.0
    tokens_per_event: int = 1
    stall_s: tuple[float, float] | None = None
    concurrency: int | None = None
    outcomes: tuple[Outcome, ...] = (Outcome.OK,)
    prefix_cache: int | None = None
    prefill_s: float = 0.0
    token_ids: bool = True

    def __post_init__(self) -> None:
        stall = self.stall_s or (0.0, 0.0)
        if min(self.ttft_s, self.itl_s, stall[0], stall[1] - stall[0]) < 0:
            raise ValueError("times must not be negative, and a stall must end after its start")
        if self.tokens_per_event < 1 or self.concurrency == 0 or not self.outcomes:
            raise ValueError("at least one token per event, one slot and one outcome are needed")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Behaviour":
        fields = json.loads(text)
        fields["stall_s"] = fields["stall_s"] and tuple(fields["stall_s"])
        fields["outcomes"] = tuple(map(Outcome, fields["outcomes"]))
        return cls(**fields)


@dataclass(slots=True)
class Truth:
    """One request as seen by the server; times are ``time.monotonic()``.

    Attributes:
        number: index in order of arrival.
        id: the client's ``x-request-id`` (gRPC: ``request_id``); generated from ``number`` if the
            client sent none.
        read: time when the request was completely read.
        started: time when the request got its slot; None before. Event times are relative to it.
        written: for each event with tokens, the time just before it was written.
        ended: time when the answer ended, or was broken off by the server.
        left: time when the client disconnected before the end.
        cached_tokens: number of prompt tokens in the prefix cache; None without one.
    """

    number: int
    id: str
    outcome: Outcome
    read: float
    prompt_tokens: int
    max_tokens: int
    started: float | None = None
    written: list[float] = field(default_factory=list)
    ended: float | None = None
    left: float | None = None
    cached_tokens: int | None = None


class SyntheticServer:
    """Handle of the server's process."""

    def __init__(self, process: "subprocess.Popen[str]", http_port: int, grpc_port: int) -> None:
        self._process = process
        self.pid = process.pid
        self.url = f"http://127.0.0.1:{http_port}"
        self.grpc_target = f"127.0.0.1:{grpc_port}"

    def log(self) -> list[Truth]:
        """Return all requests so far, in order of arrival. The call delays events by milliseconds.

        Raises:
            RuntimeError: if the process has ended.
        """
        entries = [Truth(**entry) for entry in self._ask("")]
        for entry in entries:
            entry.outcome = Outcome(entry.outcome)
        return entries

    def reset(self, behaviour: Behaviour) -> None:
        """Drop all connections, and behave as a new server.

        Raises:
            RuntimeError: if the process has ended.
        """
        self._ask(behaviour.to_json())

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        with self._process:  # closes the pipes and waits
            pass

    def _ask(self, line: str) -> Any:
        assert self._process.stdin
        with suppress(BrokenPipeError):  # reading the answer reports the error
            os.write(self._process.stdin.fileno(), f"{line}\n".encode())
        return _read_line(self._process)


_idle: list[SyntheticServer] = []
"""Servers of blocks that have ended. The next block takes one, which spares starting a process."""


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[SyntheticServer]:
    """Run a server in a separate process, on loopback ports, until the block ends.

    Raises:
        RuntimeError: if it does not start; its output is on stderr.
    """
    server = _idle.pop() if _idle else _start()
    try:
        server.reset(behaviour)
        yield server
        if server.is_running:
            server.reset(Behaviour())
            _idle.append(server)
    finally:
        if server not in _idle:
            server.end()


def _start() -> SyntheticServer:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.loadgen.synthetic", Behaviour().to_json()],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a test's Ctrl-C must reach the load generator only
    )
    return SyntheticServer(process, **_read_line(process))


@atexit.register
def _end_idle() -> None:
    for server in _idle:
        server.end()


def _read_line(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the synthetic server ended with code {process.wait()}")
    return json.loads(line)


@contextmanager
def closed_port() -> Iterator[str]:
    """Return a URL that refuses connections; its port is bound, so that no process reuses it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
