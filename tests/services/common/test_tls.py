"""Mutual TLS on the ports of services: who is refused, new certificates, and files with faults."""

import asyncio
import re
import shutil
import ssl
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from grpc import ChannelConnectivity
from structlog.testing import capture_logs

from services.common import tls
from services.common.errors import SettingsError
from services.common.grpc_server import open_channel
from services.common.tls import MutualTls, TlsFiles
from tests.services.certificates import Authority
from tests.services.tls_ports import (
    SERVERS,
    client_context,
    is_refused,
    metrics_port,
    request,
    worker_port,
)

IDLE, CONNECTING = ChannelConnectivity.IDLE, ChannelConnectivity.CONNECTING
READY, TRANSIENT_FAILURE = ChannelConnectivity.READY, ChannelConnectivity.TRANSIENT_FAILURE
PORTS = ("router", "worker", "metrics")
LIMIT_S = 10


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "foreign")


@pytest.mark.parametrize("name", PORTS)
async def test_port_accepts_only_certificates_of_its_authority(
    name: str, authority: Authority, stranger: Authority
) -> None:
    async with SERVERS[name](authority.tls(name)) as port:
        _, answer = await request(port, name, client_context(authority, authority))
        assert answer if name == "worker" else answer.endswith(b" 200")
        for context in (
            None,
            client_context(authority),
            client_context(authority, stranger),
            client_context(authority, authority, expired=True),
        ):
            assert await is_refused(port, name, context)


@pytest.mark.parametrize("name", PORTS)
async def test_new_connections_use_the_files_current_content(
    name: str, authority: Authority, stranger: Authority
) -> None:
    """The certificate is replaced, then also the CA, whose certificates are not accepted then."""
    old = client_context(authority, authority)
    async with SERVERS[name](authority.tls(name)) as port:
        first, _ = await request(port, name, old)
        authority.issue(name)
        second, _ = await request(port, name, old)
        assert second != first
        new = client_context(stranger, stranger)
        assert await is_refused(port, name, new)
        stranger.issue(name, into=authority)
        assert (await request(port, name, new))[1]
        old.load_verify_locations(stranger.issue("trusted").ca)
        assert await is_refused(port, name, old)


async def test_channels_and_contexts_of_clients_use_the_files_current_content(
    authority: Authority, stranger: Authority
) -> None:
    """A client that is created once works before and after all services have got new files."""
    server, client = authority.tls("worker"), authority.tls("client")
    context = client.client_context
    async with worker_port(server) as rpc, metrics_port(server) as http:
        for issuer in (authority, stranger):
            issuer.issue("worker", into=authority)
            issuer.issue("client", into=authority)
            assert (await request(http, "metrics", context))[1].endswith(b" 200")
            async with (
                open_channel(f"127.0.0.1:{rpc}", client) as channel,
                asyncio.timeout(LIMIT_S),
            ):
                await channel.channel_ready()


@pytest.mark.parametrize("server_name", [None, "headrace.internal", "other.internal"])
async def test_clients_verify_the_name_of_the_server(
    authority: Authority, server_name: str | None
) -> None:
    server = MutualTls(authority.issue("worker", host="headrace.internal"))
    client = MutualTls(authority.issue("client"), server_name)
    accepted = server_name == "headrace.internal"
    async with worker_port(server) as rpc, metrics_port(server) as http:
        assert await is_refused(http, "metrics", client.client_context) is not accepted
        async with open_channel(f"127.0.0.1:{rpc}", client) as channel:
            state = channel.get_state(try_to_connect=True)
            async with asyncio.timeout(LIMIT_S):
                while state in (IDLE, CONNECTING):
                    await channel.wait_for_state_change(state)
                    state = channel.get_state()
        assert state is (READY if accepted else TRANSIENT_FAILURE)


def break_key(files: TlsFiles) -> None:
    files.key.write_text("no key")


def remove_ca(files: TlsFiles) -> None:
    files.ca.unlink()


def empty_ca(files: TlsFiles) -> None:
    files.ca.write_text("")


def mix_keys(files: TlsFiles) -> None:
    files.key.write_bytes(trustme.CA().issue_cert("x").private_key_pem.bytes())


def encrypt_key(files: TlsFiles) -> None:
    key = load_pem_private_key(files.key.read_bytes(), None)
    files.key.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    )


def replace_ca(files: TlsFiles) -> None:
    files.ca.write_bytes(trustme.CA().cert_pem.bytes())


FAULTS = [
    (break_key, "tls_key_file .*/tls.key are not a PEM certificate and its key"),
    (mix_keys, "tls_key_file .*/tls.key are not a PEM .*KEY_VALUES_MISMATCH"),
    (encrypt_key, "tls_key_file .*/tls.key are not .* the key is encrypted"),
    (remove_ca, "tls_ca_file .*/ca.crt cannot be read: No such file"),
    (empty_ca, "tls_ca_file .*/ca.crt is not valid"),
    (replace_ca, "tls_cert_file .*/tls.crt is not accepted .*: unable to get local issuer"),
]


@pytest.mark.parametrize(("damage", "reason"), FAULTS)
async def test_files_with_faults_are_refused_at_start_and_replace_none_later(
    authority: Authority, damage: Callable[[TlsFiles], None], reason: str
) -> None:
    used = authority.tls("metrics")
    context = client_context(authority, authority)
    async with metrics_port(used) as port:
        damage(authority.files("metrics"))
        with capture_logs() as logs:
            for _ in range(2):
                _, answer = await request(port, "metrics", context)
                assert answer.endswith(b" 200")
        (record,) = (entry for entry in logs if entry["log_level"] == "error")
        assert re.search(reason, record["reason"])
        with pytest.raises(SettingsError, match=reason):
            MutualTls(authority.files("metrics"))


async def test_expired_certificate_is_refused_at_start_and_replaces_none_later(
    authority: Authority,
) -> None:
    used = authority.tls("metrics")
    async with metrics_port(used) as port:
        files = authority.issue("metrics", expired=True)
        context = client_context(authority, authority)
        assert not await is_refused(port, "metrics", context)
    with pytest.raises(SettingsError, match=f"{files.certificate} .*certificate has expired"):
        MutualTls(files)


async def test_unchanged_files_that_were_refused_are_tried_again(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new certificate may not be valid yet, because the clocks of two hosts differ."""

    def refuse(*_: object) -> None:
        raise SettingsError("certificate is not yet valid")

    context = client_context(authority, authority)
    async with metrics_port(authority.tls("metrics")) as port:
        first, _ = await request(port, "metrics", context)
        authority.issue("metrics")
        with monkeypatch.context() as refusing, capture_logs() as logs:
            refusing.setattr(tls, "_load", refuse)
            refusing.setattr(tls, "_RETRY_S", 0.0)
            for _ in range(2):
                assert (await request(port, "metrics", context))[0] == first
        assert [entry["reason"] for entry in logs] == ["certificate is not yet valid"]
        assert (await request(port, "metrics", context))[0] != first


async def test_refresh_reports_faults_and_the_time_of_expiry(authority: Authority) -> None:
    """Without a new connection, which would read the files as well."""
    used = authority.tls("metrics")
    first = used.expires_at
    assert first > used.loaded_at > time.time() - 60
    files = authority.files("metrics")
    files.ca.rename(files.ca.with_suffix(".moved"))
    used.refresh()
    assert re.search("tls_ca_file .* cannot be read", str(used.failure))
    authority.issue("metrics", lifetime=timedelta(days=2))
    used.refresh(at_once=True)
    assert used.failure is None
    assert used.expires_at == pytest.approx(time.time() + 2 * 86_400, abs=600)
    assert used.expires_at != first


async def test_mounted_secret_is_read_again_after_its_link_has_changed(
    authority: Authority, tmp_path: Path
) -> None:
    """A kubelet replaces a link to a folder. The files that services open are links into it."""
    mount = tmp_path / "mount"
    mount.mkdir()
    expected: list[float] = []
    for version in ("..2026_1", "..2026_2"):
        authority.issue("metrics", lifetime=timedelta(days=2 + len(expected)))
        shutil.copytree(authority.files("metrics").ca.parent, mount / version)
        (mount / "..data_tmp").symlink_to(version)
        (mount / "..data_tmp").replace(mount / "..data")
        if not expected:
            for name in ("tls.crt", "tls.key", "ca.crt"):
                (mount / name).symlink_to(Path("..data") / name)
            used = MutualTls(TlsFiles.of(mount))
        used.refresh()
        assert used.expires_at is not None
        expected.append(used.expires_at)
        assert used.failure is None
    assert expected[1] - expected[0] == pytest.approx(86_400, abs=600)


async def test_clients_refuse_an_expired_certificate_of_a_server(authority: Authority) -> None:
    client, files = authority.tls("client"), authority.issue("old", expired=True)
    expired = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    expired.load_cert_chain(files.certificate, files.key)
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=expired)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ssl.SSLCertVerificationError, match="certificate has expired"):
            await request(port, "metrics", client.client_context)


async def test_client_that_does_not_shake_hands_delays_no_other(authority: Authority) -> None:
    async with metrics_port(authority.tls("metrics")) as port:
        _, silent = await asyncio.open_connection("127.0.0.1", port)
        context = client_context(authority, authority)
        assert (await request(port, "metrics", context))[1].endswith(b" 200")
        silent.close()
