"""Only the link between a prefill and a decode worker is cut: `cut_link` in a network namespace."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import cut_link

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

NAMESPACE = ("unshare", "--user", "--map-root-user", "--net")
SET_UP = (
    "ip link set lo up",
    "ip rule add pref 10 lookup local",  # so that other rules can come before it
    "ip rule del pref 0 lookup local",
)
TESTS = Path(cut_link.__file__)


def has_network_namespaces() -> bool:
    try:
        done = subprocess.run([*NAMESPACE, "ip", "rule", "list"], capture_output=True)
    except FileNotFoundError:
        return False
    return done.returncode == 0


@pytest.mark.skipif(not has_network_namespaces(), reason="this system has no network namespaces")
def test_in_a_network_namespace() -> None:
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tests += ["--timeout", "700", str(TESTS)]
    done = subprocess.run(
        [*NAMESPACE, "sh", "-c", f'{" && ".join(SET_UP)} && exec "$@"', "sh", *tests],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
