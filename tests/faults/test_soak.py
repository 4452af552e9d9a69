"""The soak: its schedule and evaluation, and a short form of it."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadgen.faults import Fault
from loadgen.record import Failure, Record
from tests.harness import links
from tests.harness.deployment import Running, unhandled_errors
from tests.programs.soak.leaks import Resources
from tests.programs.soak.prompts import Turn, interleave
from tests.programs.soak.schedule import LAST, QUIET_S, as_option, draw
from tests.programs.soak.verdict import HUNG_S, Verdict, crashes, first_answers
from tests.programs.soak.watch import Outage, Watch, Workers


def test_faults_are_drawn_from_the_seed() -> None:
    faults = draw(3, 6000, "cut-link")
    assert faults == draw(3, 6000, "cut-link")
    assert faults != draw(4, 6000, "cut-link")
    assert [Fault.parse(as_option(fault)) for fault in faults] == faults
    assert {fault.action for fault in faults} == {"kill", "terminate", "stop", "run"}
    assert {fault.process.split()[-1] for fault in faults} >= {"gateway", "router", "decode-1"}
    assert all(QUIET_S <= fault.at < LAST * 6000 for fault in faults)
    assert "run" not in {fault.action for fault in draw(3, 6000, None)}


def test_ranks_are_killed_and_stopped_but_not_terminated() -> None:
    faults = draw(3, 6000, "cut-link", ranks=3)
    assert [Fault.parse(as_option(fault)) for fault in faults] == faults
    hit = {(fault.action, fault.process) for fault in faults}
    assert hit >= {("kill", "decode-1"), ("kill", "decode-1.2"), ("stop", "prefill-0.1")}
    assert {action for action, process in hit if process[-2] == "."} == {"kill", "stop"}
    assert not [fault for fault in draw(3, 6000, "cut-link") if fault.process[-2] == "."]


def test_turns_of_a_chat_are_sent_in_order() -> None:
    chats = [[Turn((chat, number), 1) for number in range(3)] for chat in range(4)]
    sent = list(interleave(chats, 60, random.Random(3)))
    assert len(sent) == 60
    for chat in range(4):
        numbers = [turn.prompt[1] for turn in sent if turn.prompt[0] == chat]
        assert numbers == [at % 3 for at in range(len(numbers))]
        assert len(numbers) > 3


def record(ended: float | None, failure: Failure | None = None, **changes: Any) -> Record:
    return Record(0, 1.0, 5, 9, sent=1.0, ended=ended, failure=failure, **changes)


CHECK = {"equal": 2, "different": 0, "missing": 0}
GATEWAY_FAULT = {"at": 10.0, "what": "kill gateway"}


def verdict(*records: Record, check: dict[str, int] | None = CHECK) -> Verdict:
    faults = [GATEWAY_FAULT, {"at": 500.0, "what": "kill gateway", "failed": "no such process"}]
    return Verdict.of(records, {"faults": faults, "check": check})


def test_every_request_has_one_outcome() -> None:
    found = verdict(
        record(2.0),
        record(2.0, cancelled=True),
        record(2.0, cancelled=True, times=[1.5]),
        record(3.0, Failure.REJECTED, detail="status 503: no workers"),
        record(11.0, Failure.RESET),
    )
    assert (found.total, found.answered, found.lost) == (5, 1, 1)
    assert (found.cancelled, found.early) == (2, 1)
    assert found.typed == {"rejected: status 503: no workers": 1}
    assert found.passed


@pytest.mark.parametrize(
    "bad",
    [
        record(None),
        record(2.0 + HUNG_S),
        record(9.0, Failure.RESET),  # before the fault of the gateway
        record(501.0, Failure.REFUSED),  # after one that was not injected
        record(11.0, Failure.MALFORMED),
    ],
)
def test_hung_and_broken_requests_fail_the_soak(bad: Record) -> None:
    found = verdict(record(2.0), bad)
    assert found.hung + found.broken.total() == 1
    assert not found.passed


@pytest.mark.parametrize("check", [None, CHECK | {"equal": 0}, CHECK | {"different": 1}])
def test_wrong_or_unchecked_answers_fail_the_soak(check: dict[str, int] | None) -> None:
    assert not verdict(record(2.0), check=check).passed


def test_first_answer_counts_from_the_fault_to_a_request_sent_after_it() -> None:
    faults = [
        {"at": 5.0, "what": "kill decode-1"},
        {"at": 6.0, "what": "run /tmp/cut-link prefill-0 for 3 s"},
        {"at": 6.5, "what": "kill decode-0", "failed": "the run ended first"},
    ]
    records = [
        Record(n, 0.0, 5, 9, sent=sent, ended=ended)
        for n, (sent, ended) in enumerate([(4.9, 5.5), (5.2, 8.0), (7.0, 7.5)])
    ]
    assert first_answers(records, faults) == {"cut prefill": [1.5], "kill decode": [2.5]}


def test_exits_without_a_fault_are_crashes(tmp_path: Path) -> None:
    codes = {"decode-0": -9, "decode-1": 0, "router": 1, "prefill-0": -11}
    exits = [{"event": "process exited", "process": p, "code": c} for p, c in codes.items()]
    log = tmp_path / "up.log"
    log.write_text("\n".join(["ready", *map(json.dumps, exits)]))
    assert crashes(log, [], with_faults=True) == ["router (1)", "prefill-0 (-11)"]
    assert len(crashes(log, [], with_faults=False)) == 4


def test_workers_exit_once_for_each_fault_of_a_rank(tmp_path: Path) -> None:
    names = ("decode-0", "decode-0", "decode-1", "prefill-0", "router")
    log = tmp_path / "up.log"
    exits = [{"event": "process exited", "process": name, "code": 1} for name in names]
    log.write_text("\n".join(map(json.dumps, exits)))
    faults = [
        {"at": 1.0, "what": "kill decode-0.1"},
        {"at": 2.0, "what": "stop decode-1 for 3 s"},
        {"at": 3.0, "what": "kill prefill-0.1", "failed": "no such process"},
        {"at": 4.0, "what": "kill router"},
    ]
    crashed = crashes(log, faults, with_faults=True, ranks=2)
    assert crashed == ["decode-0 (1)", "prefill-0 (1)", "router (1)"]
    assert len(crashes(log, faults, with_faults=True)) == len(names)


def test_errors_that_no_code_handles_are_found_in_logs(tmp_path: Path) -> None:
    (tmp_path / "gateway.log").write_text(
        '{"event": "ready"}\n{"event": "Task was destroyed but it is pending!\\ntask: <Task>"}\n'
    )
    (tmp_path / "decode-0.log").write_text("Future exception was never retrieved\nready\n")
    found = unhandled_errors(tmp_path)
    assert [line.partition(":")[0] for line in found] == ["decode-0.log", "gateway.log"]


def test_outages_and_memory_slopes() -> None:
    watch = Watch(Running("", "", 0, ""))
    ready: Workers = {"decode-0": {"state": "ready", "epoch": "a"}}
    watch.look_at_workers(0.0, ready)
    watch.look_at_workers(5.0, ready)  # the router was not asked for a while
    watch.look_at_workers(6.0, {"decode-0": {"state": "suspect", "epoch": "a"}})
    watch.look_at_workers(8.0, ready)
    watch.look_at_workers(9.0, {"decode-0": {"state": "ready", "epoch": "b"}})
    assert watch.outages == [Outage("decode-0", 3.0, False), Outage("decode-0", 1.0, True)]
    for second in range(0, 181, 2):
        mib = max(second, 60) / 60
        watch.look_at_memory(float(second), 100.0 + mib, process="router", pid=7)
        if second < 100:
            watch.look_at_memory(float(second), 50.0, process="gateway", pid=8)
    (slope,) = watch.slopes()
    assert slope.process == "router"
    assert slope.mib_per_minute == pytest.approx(1.0)


def test_resources_in_use_and_pages_not_returned_are_leaks() -> None:
    before = Resources({"decode-0 pages": 1024.0}, {"prefill-0 leases": 0.0})
    assert not Resources({"decode-0 pages": 1024.0}, {"prefill-0 leases": 0.0}).missing(before)
    after = Resources({"decode-0 pages": 1020.0}, {"prefill-0 leases": 2.0})
    assert after.missing(before) == {"decode-0 pages": 4.0, "prefill-0 leases": 2.0}


PROBE = """
import socket
from tests.harness import links
assert links.enter_namespace() is None
server = socket.create_server(("127.0.0.1", 0))
port = server.getsockname()[1]
client = socket.create_connection(("127.0.0.1", port))
other, _ = server.accept()
other.settimeout(1)
with links.cut_ports({port}):
    client.send(b"x")
    try:
        other.recv(1)
        raise SystemExit("the link is not cut")
    except TimeoutError:
        pass
other.settimeout(20)
assert other.recv(1) == b"x"
"""


@pytest.mark.slow
def test_cut_link_drops_packets_until_it_is_restored() -> None:
    if reason := links.unsupported():
        pytest.skip(f"no network namespace: {reason}")
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "load",
    [pytest.param(("--seconds", "30"), marks=pytest.mark.campaign), ("--cancels", "100")],
)
def test_short_soak_passes(load: tuple[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.programs.soak", *load, "--seed", "25"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kill" in (tmp_path / "report.html").read_text() or load[0] == "--cancels"
