"""The cluster token of a running deployment is replaced, while clients send requests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.processes import Load, Processes
from tests.harness.random_model import RandomModel

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1800)]

OLD, NEW = "the-old-token", "the-new-token"
STEPS = ((OLD, NEW), (NEW, OLD), (NEW, ""))
"""Token and second token of each step, as in deploy/README.md."""


def variables(token: str, second: str) -> dict[str, str]:
    return {
        "HEADRACE_CLUSTER_TOKEN": token,
        "HEADRACE_SECOND_CLUSTER_TOKEN": second,
        "HEADRACE_PREFILL_KV_TOKENS": "4096",
        "HEADRACE_DECODE_KV_TOKENS": "4096",
    }


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    found = Processes(tmp_path, RandomModel("tiny").ensure())
    try:
        for name in found.names:
            found.start(name, variables(OLD, ""))
        found.wait_until_ready()
        yield found
    finally:
        found.kill()


def test_token_is_replaced_by_restarting_one_process_after_the_other(
    processes: Processes,
) -> None:
    """No request fails, in whichever order the processes of a step restart."""
    load = Load(processes.urls)
    with load.running(clients=3):
        processes.hang_up()
        load.wait_for(10)
        processes.check_running()
        for number, (token, second) in enumerate(STEPS):
            names = processes.names[::-1] if number % 2 else processes.names
            for name in names:
                with load.without(name):
                    processes.stop(name)
                    processes.start(name, variables(token, second))
                    processes.wait_until_ready()
            load.wait_for(10)
    assert set(load.statuses) == {200}
    for router in ("router", "router-1"):
        assert processes.router_status(router, NEW) == 200
        assert processes.router_status(router, OLD) == 401
