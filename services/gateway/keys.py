"""API keys and their tenants. The gateway stores only SHA-256 digests of the keys."""

import hashlib
import hmac
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from services.common.errors import SettingsError, Unauthenticated
from services.common.messages import MAX_WEIGHT

_LINE = re.compile(
    r"^([0-9a-fA-F]{64})(?:\s+(?!weight=)(\S{1,128}))?(?:\s+weight=([1-9][0-9]{0,3}))?$"
)


@dataclass(frozen=True)
class Tenant:
    """The owner of API keys. Under load, tenants get tokens in proportion to their weights."""

    name: str
    weight: int = 1

    @property
    def id(self) -> str:
        """Hash of the name, by which routers distinguish tenants."""
        return hashlib.sha256(self.name.encode()).hexdigest()[:32]


class ApiKeys:
    """The accepted API keys and the tenant of each.

    Args:
        tenants: tenant of each key, by the SHA-256 digest of the key. If empty, no key is required.
    """

    def __init__(self, tenants: dict[bytes, Tenant] | None = None) -> None:
        self._tenants = tenants or {}

    @property
    def required(self) -> bool:
        """Whether requests need a key."""
        return bool(self._tenants)

    @classmethod
    def load(cls, path: Path | None) -> Self:
        """Read ``sha256-hex [name] [weight=N]`` lines, skipping blank lines and ``#`` comments.

        Keys with the same name belong to one tenant.

        Raises:
            SettingsError: if the file cannot be read, has no key or an invalid line, or gives one
                tenant different weights.
        """
        if path is None:
            return cls()
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"cannot read API keys: {error}") from error
        tenants: dict[bytes, Tenant] = {}
        weights: dict[str, int] = {}
        for number, line in enumerate(lines, 1):
            if not (text := line.partition("#")[0].strip()):
                continue
            match = _LINE.match(text)
            if not match or int(match[3] or 1) > MAX_WEIGHT:
                raise SettingsError(
                    f"{path}, line {number}: expected a SHA-256 digest in hex, an optional name "
                    f"and an optional weight=N, from 1 to {MAX_WEIGHT}"
                )
            tenant = Tenant(match[2] or f"key-{match[1][:8]}", int(match[3] or 1))
            if weights.setdefault(tenant.name, tenant.weight) != tenant.weight:
                raise SettingsError(f"{path}, line {number}: {tenant.name} has two weights")
            tenants[bytes.fromhex(match[1])] = tenant
        if not tenants:  # an empty file must not disable authentication
            raise SettingsError(f"{path} has no API key: add one, or do not set --api-keys-file")
        return cls(tenants)

    def tenant(self, authorization: str | None) -> Tenant | None:
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
