"""Cut TCP links of one worker: ``python -m tests.harness.links PORT WORKER``, until SIGTERM.

Routing rules drop the worker's packets, in a network namespace that `enter_namespace` creates. No
connection is closed, as when a switch fails. A prefill worker loses its decode workers, a decode
worker also its gateway; both keep their router. KV moves over TCP only with ``UCX_TLS=tcp,self``.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from services.local.state import Deployment

_SETUP = ("link set lo up", "rule add pref 1000 lookup local", "rule del pref 0")
"""The table of local addresses is moved behind the rules of this module."""
_PREFERENCE = 10
_UNSHARE = ("unshare", "--user", "--map-root-user", "--net")
_INSIDE = "HEADRACE_TEST_NAMESPACE"


def enter_namespace() -> str | None:
    """Restart this program in a network namespace of its own, unless it is in one already.

    Returns:
        None in the namespace, or the reason why there is none.
    """
    if os.environ.pop(_INSIDE, None):
        _ip(_SETUP)
        return None
    reason = unsupported()
    if reason is None:
        os.environ[_INSIDE] = "1"
        os.execvp(_UNSHARE[0], [*_UNSHARE, sys.executable, *sys.orig_argv[1:]])
    return reason


def unsupported() -> str | None:
    """Return why this machine allows no network namespace with routing rules, or None."""
    check = "ip link set lo up && ip rule add pref 9 ipproto tcp dport 9 unreachable"
    try:
        tried = subprocess.run([*_UNSHARE, "sh", "-c", check], capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return None if tried.returncode == 0 else tried.stderr.strip() or "it is not permitted"


@contextmanager
def cut_ports(ports: set[int]) -> Iterator[None]:
    """Drop the packets from and to these TCP ports in the block.

    Raises:
        subprocess.CalledProcessError: the rules cannot be set, as outside the namespace.
    """
    rules = [
        f"pref {_PREFERENCE} ipproto tcp {end} {number} unreachable"
        for number in sorted(ports)
        for end in ("sport", "dport")
    ]
    _ip([f"rule add {rule}" for rule in rules])
    try:
        yield
    finally:
        _ip([f"rule del {rule}" for rule in rules])


def ports_of(port: int, worker: str) -> set[int]:
    """Return the TCP ports of a worker, without those of connections to the router.

    Args:
        port: HTTP port of the deployment's gateway.

    Raises:
        LookupError: the deployment has no such process, or it has ended.
    """
    state = Deployment.find(port)
    if state is None or worker not in state.pids:
        raise LookupError(f"no {worker} runs behind port {port}")
    try:
        open_now = psutil.Process(state.pids[worker]).net_connections(kind="tcp")
    except psutil.NoSuchProcess:
        raise LookupError(f"{worker} has ended") from None
    to_router = {
        one.laddr.port for one in open_now if one.raddr and one.raddr.port == state.router_port
    }
    return {one.laddr.port for one in open_now} - to_router


def _ip(commands: tuple[str, ...] | list[str]) -> None:
    subprocess.run(["ip", "-batch", "-"], input="\n".join(commands), text=True, check=True)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with cut_ports(ports_of(int(sys.argv[1]), sys.argv[2])):
        while True:
            signal.pause()


if __name__ == "__main__":
    main()
