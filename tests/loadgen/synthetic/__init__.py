"""A server whose latencies are known exactly: the truth that a load generator is tested against.

It speaks OpenAI's API over HTTP/1.1 and ``headrace.v1.Inference`` over gRPC, in a process of its
own (`serving`), and writes event i of an answer at ``started + ttft_s + i * itl_s``: absolute
deadlines, so that lateness never adds up. What it really did it tells in its log. All times are
seconds of ``time.monotonic()``, which all processes of a Linux machine share.

Only generations count as requests here: numbers, outcomes, slots and the start of a stall are
theirs.
"""

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
    """What becomes of a request. Midway is in place of event n // 2, when that would be due."""

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
    """Everything but ``data: [DONE]``. gRPC: everything but finish_reason and usage."""
    MALFORMED_JSON = "malformed_json"
    """One event midway is not JSON; those after it are whole. gRPC has none: UNIMPLEMENTED."""
    MALFORMED_HTTP = "malformed_http"
    """Garbage instead of a status line, then FIN. gRPC has none: UNIMPLEMENTED."""
    STATUS_400 = "status_400"
    """gRPC: INVALID_ARGUMENT."""
    STATUS_429 = "status_429"
    """gRPC: RESOURCE_EXHAUSTED."""
    STATUS_500 = "status_500"
    """gRPC: INTERNAL."""
    ERROR_EVENT = "error_event"
    """An event with an error midway, which ends the stream. gRPC: INTERNAL midway."""
    EMPTY = "empty"
    """A proper end, when the first event would be due, without a token."""
    SLOW = "slow"
    """Headers (gRPC: initial metadata) and nothing more until the client leaves."""
    SLOW_HEADERS = "slow_headers"
    """Nothing at all until the client leaves."""


@dataclass(frozen=True)
class Behaviour:
    """What the server does.

    Attributes:
        ttft_s: from the start of a request to its first event.
        itl_s: between two events.
        tokens_per_event: ``max_tokens`` asked for are sent in events of so many, the last of fewer.
        stall_s: (S, E): from S to E seconds after the first request was read, nothing is written
            and nothing read. Events that fall due meanwhile are all written at E; later ones keep
            their times.
        concurrency: slots; a request holds one until its last event, and others wait in order of
            arrival. The next one's start is when that event was *due*, so that lateness does not
            add up here either. Outcomes without any event, but for `EMPTY`, take no slot. None: no
            limit.
        outcomes: of requests in order of arrival, again and again.

    Raises:
        ValueError: there is no such server.
    """

    ttft_s: float = 0.0
    itl_s: float = 0.0
    tokens_per_event: int = 1
    stall_s: tuple[float, float] | None = None
    concurrency: int | None = None
    outcomes: tuple[Outcome, ...] = (Outcome.OK,)

    def __post_init__(self) -> None:
        stall = self.stall_s or (0.0, 0.0)
        if min(self.ttft_s, self.itl_s, stall[0], stall[1] - stall[0]) < 0:
            raise ValueError("times are not negative, and a stall ends after its start")
        if self.tokens_per_event < 1 or self.concurrency == 0 or not self.outcomes:
            raise ValueError("at least one token in an event, one slot and one outcome")

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
    """One request as the server saw it; times on ``time.monotonic()``.

    Attributes:
        number: in order of arrival, from 0.
        id: the client's ``x-request-id`` (gRPC: ``request_id``), or one made from the number.
        read: when all of it was read.
        started: when it had its slot: what its events' times count from. None: not yet, or never.
        written: just before each event with tokens was written, so no later than any client saw it.
        ended: the answer was over, or cut by the server.
        left: the client went away first.
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


class SyntheticServer:
    """The other side of the server's process."""

    def __init__(self, process: "subprocess.Popen[str]", http_port: int, grpc_port: int) -> None:
        self._process = process
        self.pid = process.pid
        self.url = f"http://127.0.0.1:{http_port}"
        self.grpc_target = f"127.0.0.1:{grpc_port}"

    def log(self) -> list[Truth]:
        """All requests so far, in order of arrival. Writing it delays events by milliseconds.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self._process.stdin
        with suppress(BrokenPipeError):  # then there is no answer either
            os.write(self._process.stdin.fileno(), b"\n")
        entries = [Truth(**entry) for entry in _read_line(self._process)]
        for entry in entries:
            entry.outcome = Outcome(entry.outcome)
        return entries


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[SyntheticServer]:
    """A server in a process of its own, on free ports of the loopback, until the block ends.

    Raises:
        RuntimeError: it did not start; its own words are on stderr.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.loadgen.synthetic", behaviour.to_json()],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a test's Ctrl-C is for the load generator alone
    )
    with process:  # its exit closes the pipes and waits
        try:
            yield SyntheticServer(process, **_read_line(process))
        finally:
            process.kill()


def _read_line(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the synthetic server ended with code {process.wait()}")
    return json.loads(line)


@contextmanager
def closed_port() -> Iterator[str]:
    """A URL where every connection is refused: bound, so that nobody else takes it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
