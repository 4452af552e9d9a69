"""Certificates for tests of mutual TLS."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from services.common.tls import MutualTls, TlsFiles


class Authority:
    """A CA that issues certificates for services on 127.0.0.1, into a folder each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ca = trustme.CA()

    def files(self, name: str) -> TlsFiles:
        """Return the paths of a service's files."""
        folder = self._folder / name
        return TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")

    def issue(
        self,
        name: str,
        *,
        host: str = "127.0.0.1",
        expired: bool = False,
        lifetime: timedelta | None = None,
        into: "Authority | None" = None,
    ) -> TlsFiles:
        """Write a certificate with its key and the CA; they replace earlier ones of this name.

        Args:
            host: name or address that the certificate has.
            expired: whether its time is over.
            lifetime: time until it expires; default: many years.
            into: authority whose files are replaced; default: this one.
        """
        files = (into or self).files(name)
        files.ca.parent.mkdir(parents=True, exist_ok=True)
        if expired:
            lifetime = timedelta(seconds=-1)
        end = None if lifetime is None else datetime.now(UTC) + lifetime
        leaf = self._ca.issue_cert(host, common_name=name, not_after=end)
        files.certificate.write_bytes(b"".join(pem.bytes() for pem in leaf.cert_chain_pems))
        files.key.write_bytes(leaf.private_key_pem.bytes())
        files.ca.write_bytes(self._ca.cert_pem.bytes())
        return files

    def tls(self, name: str) -> MutualTls:
        """Issue a certificate and load it."""
        return MutualTls(self.issue(name))
