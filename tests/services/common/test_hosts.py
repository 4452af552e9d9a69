"""Names of a server: local ones and addresses are accepted, those of web pages are not."""

from typing import Any

import pytest

from services.common.hosts import HostCheck
from services.common.settings import ServiceSettings

LOCAL = ["localhost:8000", "LOCALHOST", "a.localhost.", "host.docker.internal:8000"]
ADDRESSES = ["127.0.0.1", "10.1.2.3:80", "[::1]:8000", "[::1]", "0.0.0.0:8000"]
FOREIGN = [
    "evil.example",
    "localhost.evil.example:8000",
    "127.0.0.1.nip.io",
    "evillocalhost",
    "a b",
]


@pytest.mark.parametrize("host", [*LOCAL, *ADDRESSES, ""])
def test_local_names_and_addresses_are_accepted(host: str) -> None:
    assert HostCheck().refusal([host]) is None


@pytest.mark.parametrize("host", [*FOREIGN, "[evil]", "evil.example.", "é"])
def test_other_names_are_refused(host: str) -> None:
    assert "--allowed-hosts" in (HostCheck().refusal([host]) or "")


def test_each_of_several_values_must_be_accepted() -> None:
    assert HostCheck().refusal([]) is None
    assert HostCheck().refusal(["localhost", "evil.example"])


def test_further_names_and_domains_can_be_allowed() -> None:
    check = HostCheck(["AI.example.com", "*.lan.example"])
    for host in ("ai.example.com:443", "gpu.lan.example", "a.b.lan.example"):
        assert check.refusal([host]) is None
    for host in ("x.ai.example.com", "lan.example", "evillan.example"):
        assert check.refusal([host])


@pytest.mark.parametrize(
    ("changes", "authenticated", "refuses"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"allowed_hosts": ["*"]}, False, False),
        ({"allowed_hosts": ["ai.example"]}, False, True),
        ({"host": "0.0.0.0", "insecure": True}, False, False),
        ({"host": "0.0.0.0", "insecure": True, "allowed_hosts": ["ai.example"]}, False, True),
        ({"host": "::1"}, False, True),
    ],
)
def test_host_is_checked_on_loopback_without_authentication(
    changes: dict[str, Any], authenticated: bool, refuses: bool
) -> None:
    check = ServiceSettings.model_validate(changes).host_check(authenticated=authenticated)
    assert bool(check and check.refusal(["evil.example"])) is refuses


def test_configured_host_name_is_accepted() -> None:
    settings = ServiceSettings.model_validate({"host": "localhost", "allowed_hosts": ["b.example"]})
    check = settings.host_check(authenticated=False)
    assert check is not None
    assert check.refusal(["localhost"]) is None
    assert check.refusal(["b.example"]) is None
