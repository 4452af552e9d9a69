"""API keys: the gateway knows their hashes alone."""

import hashlib
import hmac
import re
from pathlib import Path
from typing import Self

from services.common.errors import SettingsError, Unauthenticated

_LINE = re.compile(r"^([0-9a-fA-F]{64})(?:\s+(\S{1,128}))?$")


class ApiKeys:
    """Which keys may pass, and the tenant each stands for.

    Args:
        tenants: SHA-256 digest of a key to its tenant's name. Empty lets everyone pass.
    """

    def __init__(self, tenants: dict[bytes, str] | None = None) -> None:
        self._tenants = tenants or {}

    @classmethod
    def load(cls, path: Path | None) -> Self:
        """Reads ``sha256-hex [name]`` lines; blank ones and ``#`` comments are skipped.

        Raises:
            SettingsError: the file cannot be read, has another line, or holds no key.
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
                raise SettingsError(f"{path}, line {number}: not a SHA-256 in hex and a name")
            tenants[bytes.fromhex(match[1])] = match[2] or f"key-{match[1][:8]}"
        if not tenants:  # an empty file must not open the door
            raise SettingsError(f"{path} holds no API key")
        return cls(tenants)

    def tenant(self, authorization: str | None) -> str | None:
        """Whose key an ``Authorization`` value carries; None where no keys are asked for.

        Takes the same time for every wrong key: all digests are compared.

        Raises:
            Unauthenticated: no key, or one that is not known.
        """
        if not self._tenants:
            return None
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Unauthenticated("no API key: send it as 'Authorization: Bearer KEY'")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise Unauthenticated("incorrect API key")
        return found
