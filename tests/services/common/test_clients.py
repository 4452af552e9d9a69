"""Addresses of clients: IPv6 networks, trusted proxies and forged headers."""

import pytest

from services.common.clients import Client, ClientAddresses, split_grpc_peer

PROXIES = ClientAddresses(["10.0.0.0/8", "fd00::/8", "192.0.2.7"])


@pytest.mark.parametrize(
    ("peer", "name"),
    [
        ("198.51.100.1", "198.51.100.1"),
        ("::ffff:198.51.100.1", "198.51.100.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        (None, "unknown"),
        ("", "unknown"),
        ("/run/socket", "unknown"),
    ],
)
def test_peer_is_the_client_without_a_proxy(peer: str | None, name: str) -> None:
    assert ClientAddresses().identify(peer, ["203.0.113.5"]) == Client(name)


@pytest.mark.parametrize(
    ("forwarded", "name"),
    [
        (["203.0.113.5"], "203.0.113.5"),
        (["1.1.1.1, 203.0.113.5"], "203.0.113.5"),
        (["1.1.1.1", " 203.0.113.5 ,10.2.2.2"], "203.0.113.5"),
        (["203.0.113.5:4711"], "203.0.113.5"),
        (["[2001:db8::5]:4711"], "2001:db8::/64"),
        (["2001:db8::5, fd00::9"], "2001:db8::/64"),
        (["::ffff:203.0.113.5"], "203.0.113.5"),
        (["10.3.3.3, 10.2.2.2"], "10.3.3.3"),
        (["1.1.1.1, unknown, 10.2.2.2"], "10.2.2.2"),
    ],
)
def test_trusted_proxy_names_the_client(forwarded: list[str], name: str) -> None:
    assert PROXIES.identify("10.0.0.1", forwarded) == Client(name, forwarded=True)
    assert PROXIES.identify("::ffff:10.0.0.1", forwarded) == Client(name, forwarded=True)


@pytest.mark.parametrize("forwarded", [[], [""], ["_hidden"], ["1.1.1.1, nonsense"], [","]])
def test_proxy_that_names_no_client_is_the_client(forwarded: list[str]) -> None:
    assert PROXIES.identify("10.0.0.1", forwarded) == Client("10.0.0.1")


def test_header_of_an_untrusted_peer_is_ignored() -> None:
    forged = ["10.0.0.9", "203.0.113.5"]
    assert PROXIES.identify("198.51.100.1", forged) == Client("198.51.100.1")
    assert not PROXIES.is_proxy("198.51.100.1")
    assert PROXIES.is_proxy("192.0.2.7")
    assert not PROXIES.is_proxy(None)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:4711", "127.0.0.1"),
        ("ipv6:%5B::1%5D:4711", "::1"),
        ("ipv6:[2001:db8::1]:4711", "2001:db8::1"),
        ("unix:/run/socket", None),
        ("", None),
    ],
)
def test_peer_of_a_grpc_call(peer: str, address: str | None) -> None:
    assert split_grpc_peer(peer) == address


def test_invalid_proxy_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        ClientAddresses(["nonsense"])
