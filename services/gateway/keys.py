"""API keys. The gateway stores only their SHA-256 digests."""

import hashlib
import hmac
import re
from pathlib import Path
from typing import Self

from services.common.errors import SettingsError, Unauthenticated

_LINE = re.compile(r"^([0-9a-fA-F]{64})(?:\s+(\S{1,128}))?$")


class ApiKeys:
    """The accepted API keys and the tenant of each.

    Args:
        tenants: tenant of each key, by the SHA-256 digest of the key. If empty, no key is required.
    """

    def __init__(self, tenants: dict[bytes, str] | None = None) -> None:
        self._tenants = tenants or {}

    @property
    def required(self) -> bool:
        """Whether requests need a key."""
        return bool(self._tenants)

    @classmethod
    def load(cls, path: Path | None) -> Self:
        """Read ``sha256-hex [name]`` lines, skipping blank lines and ``#`` comments.

        Raises:
            SettingsError: if the file cannot be read, has an invalid line, or has no key.
        """
        if path is None:
            return cls()
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"cannot read API keys: {error}") from error
        tenants = {}
        for number, line in enumerate(lines, 1):
            if not (text := line.partition("#")[0].strip()):
                continue
            if not (match := _LINE.match(text)):
                raise SettingsError(
                    f"{path}, line {number}: expected a SHA-256 digest in hex and an optional name"
                )
            tenants[bytes.fromhex(match[1])] = match[2] or f"key-{match[1][:8]}"
        if not tenants:  # an empty file must not disable authentication
            raise SettingsError(f"{path} has no API key: add one, or do not set --api-keys-file")
        return cls(tenants)

    def tenant(self, authorization: str | None) -> str | None:
        """Return the tenant of the key in an ``Authorization`` header; None if no key is required.

        Every stored digest is compared, so that the duration does not depend on the key.

        Raises:
            Unauthenticated: if the key is missing or unknown.
        """
        if not self._tenants:
            return None
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Unauthenticated("the API key is missing: send it as 'Authorization: Bearer KEY'")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise Unauthenticated("the API key is unknown")
        return found
