"""Addresses under which processes are reached."""

import socket

import pytest

from services.common import addresses
from services.common.addresses import address_towards, bracketed, is_unspecified, parse_ip
from services.prefill.settings import PrefillSettings
from services.worker import process_settings as worker_settings

UNKNOWN = "http://unknown.invalid:8002"


@pytest.mark.parametrize(
    ("host", "written"), [("::1", "[::1]"), ("[::1]", "[::1]"), ("10.0.0.1", "10.0.0.1")]
)
def test_ipv6_addresses_have_brackets(host: str, written: str) -> None:
    assert bracketed(host) == written


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "[::]"])
def test_unspecified_hosts_are_all_interfaces(host: str) -> None:
    assert is_unspecified(host)
    assert not any(map(is_unspecified, ("127.0.0.1", "::1", "worker-0", "10.0.0.0")))


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("fe80::1%eth0", "fe80::1"),
        ("127.0.0.1%eth0", None),
        ("localhost", None),
    ],
)
def test_zones_are_ignored_only_after_ipv6_addresses(text: str, address: str | None) -> None:
    parsed = parse_ip(text)
    assert (None if parsed is None else str(parsed)) == address


def test_text_that_is_too_long_for_an_address_is_not_kept() -> None:
    before = addresses._parse_ip.cache_info()
    assert parse_ip("1" * 10_000) is None
    assert addresses._parse_ip.cache_info() == before


@pytest.mark.parametrize("url", [UNKNOWN, "http://[", "http://127.0.0.1:99999", "router"])
def test_no_address_towards_unknown_hosts(url: str) -> None:
    assert address_towards(url) is None


@pytest.mark.parametrize(
    ("settings", "advertised"),
    [
        ({}, "127.0.0.1"),
        ({"advertise": "worker-0"}, "worker-0"),
        ({"host": "0.0.0.0", "advertise": "worker-0"}, "worker-0"),
        ({"host": "10.1.2.3", "routers": ["http://127.0.0.1:1"]}, "10.1.2.3"),
        ({"host": "0.0.0.0", "routers": ["http://127.0.0.1:1"]}, "127.0.0.1"),
        ({"host": "::", "routers": ["http://127.0.0.2:1"]}, "127.0.0.1"),
        ({"host": "0.0.0.0", "routers": [UNKNOWN, "http://127.0.0.1:1"]}, "127.0.0.1"),
        ({"host": "0.0.0.0", "routers": [UNKNOWN]}, socket.gethostname()),
        ({"host": "0.0.0.0"}, socket.gethostname()),
    ],
)
def test_worker_on_all_interfaces_advertises_its_address_towards_a_router(
    settings: dict[str, object], advertised: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def known_towards(url: str) -> str | None:
        return None if url == UNKNOWN else address_towards(url)

    monkeypatch.setattr(worker_settings, "address_towards", known_towards)
    loaded = PrefillSettings.model_validate({"insecure": True, **settings})
    assert loaded.advertised_host == advertised
