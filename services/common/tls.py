"""Mutual TLS between services, with certificates from files that are read again when they change.

Every server requires a client certificate that the CA has signed, and every client verifies the
server's certificate and its name. Each new connection uses the current content of the files.
Open connections are not affected. Unusable files are reported, and the previous ones stay in use.
"""

import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc
import structlog

from services.common.errors import SettingsError

log = structlog.get_logger()

_RETRY_S = 5.0
"""Time until unchanged content is tried again, seconds. A certificate may not be valid yet."""
_HANDSHAKE_STEPS = 4
"""Maximum number of steps of a handshake. One of TLS 1.3 takes each side two steps."""


@dataclass(frozen=True)
class TlsFiles:
    """Files in PEM format.

    Attributes:
        certificate: certificate of this service, and intermediate ones after it.
        key: its private key, not encrypted.
        ca: certificates of the CAs that sign the certificates of all services.
    """

    certificate: Path
    key: Path
    ca: Path

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Return the files of a folder, with the names that Kubernetes gives them in a secret."""
        return cls(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")


@dataclass(frozen=True)
class _Content:
    """Content of the files."""

    certificate: bytes
    key: bytes
    ca: bytes


@dataclass(frozen=True)
class _Loaded:
    """TLS contexts that use the content of the files. Times are in seconds since 1970."""

    content: _Content
    server: ssl.SSLContext
    client: ssl.SSLContext
    expires_at: float
    loaded_at: float


class MutualTls:
    """Certificates of one service, for all of its servers and clients.

    Args:
        files: certificate, key and CAs.
        server_name: DNS name that the certificate of every server must have; None for the host of
            its address.

    Attributes:
        server_context: context for servers that use `ssl`.
        client_context: context for clients that use `ssl`.
        failure: see `services.common.secret_files.SecretFiles`.

    Raises:
        SettingsError: if a file cannot be read, or the CAs do not verify the certificate.
    """

    kind = "certificates"

    def __init__(self, files: TlsFiles, server_name: str | None = None) -> None:
        self.server_name = server_name
        self._files = files
        self._lock = threading.Lock()
        self._loaded = _load(files, _read(files))
        # Content that will be tried again at `_retry_at`.
        self._rejected: _Content | None = None
        self._retry_at = 0.0
        self.failure: str | None = None
        self.server_context: ssl.SSLContext = _CurrentContext(
            ssl.PROTOCOL_TLS_SERVER, lambda: self._current().server, None
        )
        self.client_context: ssl.SSLContext = _CurrentContext(
            ssl.PROTOCOL_TLS_CLIENT, lambda: self._current().client, server_name
        )

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials of a gRPC server."""
        used = self._current().content

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal used
            content = self._current().content
            if content is used:
                return None
            used = content
            return _configuration(content)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(used),
            changed,  # type: ignore[arg-type]  # the stubs lack None, which means "unchanged"
            require_client_authentication=True,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return credentials of a new gRPC channel, with the files' current content."""
        content = self._current().content
        return grpc.ssl_channel_credentials(content.ca, content.key, content.certificate)

    @property
    def loaded_at(self) -> float:
        """Time at which the used files were read, seconds since 1970."""
        return self._loaded.loaded_at

    @property
    def expires_at(self) -> float:
        """Time at which the used certificate expires, seconds since 1970."""
        return self._loaded.expires_at

    def refresh(self, *, at_once: bool = False) -> None:
        """Read the files again; see `services.common.secret_files.SecretFiles`."""
        self._current(at_once=at_once)

    def _current(self, *, at_once: bool = False) -> _Loaded:
        """Return the content of the files. If it cannot be used, return the last usable content."""
        with self._lock:
            found: _Content | None = None
            try:
                found = _read(self._files)
                wait = not at_once and time.monotonic() < self._retry_at
                if found == self._loaded.content:
                    self.failure = None
                elif found != self._rejected or not wait:
                    self._loaded = _load(self._files, found)
                    self.failure = None
                    log.info("certificates reloaded", file=str(self._files.certificate))
            except SettingsError as error:
                if at_once or str(error) != self.failure:
                    log.error("certificates not reloaded; using the last ones", reason=str(error))
                self.failure = str(error)
                self._rejected = found
                self._retry_at = time.monotonic() + _RETRY_S
            return self._loaded


class _CurrentContext(ssl.SSLContext):
    """Context that delegates each new connection to the context that is current then.

    Args:
        protocol: protocol of `ssl.SSLContext`.
        current: returns the current context.
        server_name: name to verify instead of the host of the address, or None.
    """

    def __init__(
        self,
        protocol: int,  # noqa: ARG002 - `ssl.SSLContext.__new__` reads it
        current: Callable[[], ssl.SSLContext],
        server_name: str | None,
    ) -> None:
        self._current = current
        self._server_name = server_name

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        name = self._server_name or server_hostname
        made = self._current().wrap_bio(incoming, outgoing, server_side, name, session)
        if isinstance(made, _ServerObject):
            made.outgoing = outgoing
        return made

    def wrap_socket(
        self,
        sock: socket.socket,
        server_side: bool = False,
        do_handshake_on_connect: bool = True,
        suppress_ragged_eofs: bool = True,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLSocket:
        return self._current().wrap_socket(
            sock,
            server_side,
            do_handshake_on_connect,
            suppress_ragged_eofs,
            self._server_name or server_hostname,
            session,
        )


class _ServerObject(ssl.SSLObject):
    """Server side of a connection, which sends the alert of a failed handshake before it fails.

    Event loops close a connection without sending it. The client would not learn the reason.

    Attributes:
        outgoing: bytes to be sent to the client.
    """

    outgoing: ssl.MemoryBIO
    _failure: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            log.warning("TLS handshake failed", reason=str(error))
            if not self.outgoing.pending:
                raise  # there is no alert if the client does not use TLS
            self._failure = error
            raise ssl.SSLWantReadError from error  # the loop sends the alert and waits for its peer


def _read(files: TlsFiles) -> _Content:
    """Read the files.

    Raises:
        SettingsError: if one cannot be read.
    """

    def content(setting: str, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise SettingsError(f"{setting} {path} cannot be read: {error.strerror}") from error

    return _Content(
        certificate=content("tls_cert_file", files.certificate),
        key=content("tls_key_file", files.key),
        ca=content("tls_ca_file", files.ca),
    )


def _load(files: TlsFiles, content: _Content) -> _Loaded:
    """Return TLS contexts that use the content of the files.

    Raises:
        SettingsError: if a file is invalid, if the CAs do not verify the certificate, or if a file
            has changed meanwhile.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False  # until the handshake below
    for context in (server, client):
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        _load_files(context, files)
    server.num_tickets = 0  # a resumed session is not verified again
    try:
        expires_at = _shake_hands(server, client)
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", None) or error.reason
        raise SettingsError(
            f"tls_cert_file {files.certificate} is not accepted by services with the tls_ca_file "
            f"{files.ca}: {reason}"
        ) from error
    client.check_hostname = True
    server.sslobject_class = _ServerObject
    if _read(files) != content:
        raise SettingsError(f"{files.certificate} or its key or CA changed while it was read")
    return _Loaded(content, server, client, expires_at, time.time())


def _load_files(context: ssl.SSLContext, files: TlsFiles) -> None:
    def no_password() -> str:
        raise ValueError("the key is encrypted")

    try:
        context.load_verify_locations(files.ca)
    except (OSError, ValueError) as error:
        raise SettingsError(f"tls_ca_file {files.ca} is not valid: {_reason(error)}") from error
    try:
        context.load_cert_chain(files.certificate, files.key, no_password)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"tls_cert_file {files.certificate} and tls_key_file {files.key} are not a PEM "
            f"certificate and its key: {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error)


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> float:
    """Connect a client to a server in memory; return when the server's certificate expires.

    Raises:
        ssl.SSLError: if one of them does not accept the certificate of the other.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for step in range(_HANDSHAKE_STEPS):
        with suppress(ssl.SSLWantReadError):
            sides[step % 2].do_handshake()
    certificate = sides[0].getpeercert() or {}
    return float(ssl.cert_time_to_seconds(str(certificate["notAfter"])))


def _configuration(content: _Content) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(content.key, content.certificate)], content.ca
    )
