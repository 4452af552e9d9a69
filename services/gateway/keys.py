"""API keys and their tenants. The gateway stores only SHA-256 digests of the keys."""

import hashlib
import hmac
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import structlog

from services.common.errors import SettingsError, Unauthenticated
from services.common.messages import MAX_PRIORITY, MAX_WEIGHT

log = structlog.get_logger()

_DIGEST_DIGITS = 64
_LINE = re.compile(
    r"^(?P<digest>[0-9a-fA-F]{64})"
    r"(?:\s+(?!weight=|priority=)(?P<name>\S{1,128}))?"
    r"(?:\s+weight=(?P<weight>[1-9][0-9]{0,3}))?"
    r"(?:\s+priority=(?P<priority>-?[0-9]{1,3}))?$"
)


@dataclass(frozen=True)
class Tenant:
    """The owner of API keys. Under load, tenants get tokens in proportion to their weights.

    Attributes:
        first_priority: lowest value of `priority`, and so the most urgent one, that requests with
            this key have. Keys of one tenant may differ in it.
    """

    name: str
    weight: int = 1
    first_priority: int = field(default=-MAX_PRIORITY, compare=False)

    @property
    def id(self) -> str:
        """Hash of the name, by which routers distinguish tenants."""
        return hashlib.sha256(self.name.encode()).hexdigest()[:32]


class ApiKeys:
    """The accepted API keys and the tenant of each.

    Args:
        tenants: tenant of each key, by the SHA-256 digest of the key. If empty, no key is required.

    Attributes:
        kind, failure, loaded_at, expires_at: see `services.common.secret_files.SecretFiles`.
    """

    kind = "api_keys"
    expires_at = None

    def __init__(self, tenants: Mapping[bytes, Tenant] | None = None) -> None:
        self._tenants = tenants or {}
        self._path: Path | None = None
        # The last content that was accepted or rejected.
        self._handled: bytes | str = b""
        self._last_read: bytes | str = b""
        self.failure: str | None = None
        self.loaded_at = time.time()

    @property
    def required(self) -> bool:
        """Whether requests need a key."""
        return bool(self._tenants)

    @property
    def tenants(self) -> set[str]:
        """Names of the tenants."""
        return {tenant.name for tenant in self._tenants.values()}

    @classmethod
    def load(cls, path: Path | None) -> Self:
        """Read ``sha256-hex [name] [weight=N] [priority=N]`` lines.

        Blank lines and ``#`` comments are skipped.

        Keys with the same name belong to one tenant.

        Raises:
            SettingsError: if the file cannot be read, has no key or an invalid line, or gives one
                tenant different weights.
        """
        if path is None:
            return cls()
        content = _read(path)
        keys = cls(_parse(path, content))
        keys._path = path
        keys._handled = content
        log.info("API keys loaded", file=str(path), keys=len(keys._tenants), sha256=_id(content))
        return keys

    def refresh(self, *, at_once: bool = False) -> None:
        """Read the file again; see `services.common.secret_files.SecretFiles`.

        New content is used, or reported, if two consecutive calls have read it, or with
        ``at_once``: an editor may still be writing the file.
        """
        if self._path is None:
            return
        found = _read(self._path)
        is_settled = at_once or found == self._last_read
        self._last_read = found
        is_handled = found == self._handled and not (at_once and self.failure)
        if not is_settled or is_handled:
            return
        self._handled = found
        try:
            tenants = _parse(self._path, found)
        except SettingsError as error:
            self.failure = str(error)
            log.error("API keys not reloaded; using the last ones", reason=self.failure)
            return
        added, removed = tenants.keys() - self._tenants, self._tenants.keys() - tenants
        self._tenants = tenants
        self.failure = None
        self.loaded_at = time.time()
        changes = {"keys": len(tenants), "added": len(added), "removed": len(removed)}
        log.info("API keys reloaded", **changes, sha256=_id(found))

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
            raise Unauthenticated(
                f"the API key is unknown: its SHA-256 digest begins with {digest.hex()[:8]}"
            )
        return found


def _read(path: Path) -> bytes | str:
    """Return the content of a file, or why it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        return f"cannot read API keys: {error}"


def _id(content: bytes | str) -> str:
    """Return the beginning of what `sha256sum` prints for a file with this content."""
    return hashlib.sha256(content if isinstance(content, bytes) else b"").hexdigest()[:12]


def _parse(path: Path, content: bytes | str) -> dict[bytes, Tenant]:
    """Return the tenant of each key in the result of `_read`.

    Raises:
        SettingsError: see `ApiKeys.load`.
    """
    if isinstance(content, str):
        raise SettingsError(content)
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError as error:
        raise SettingsError(f"cannot read API keys: {path}: {error}") from error
    tenants: dict[bytes, Tenant] = {}
    weights: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not (text := line.partition("#")[0].strip()):
            continue
        tenant = _parse_line(text)
        if tenant is None:
            raise SettingsError(
                f"{path}, line {number}: expected a SHA-256 digest in hex, an optional name, an "
                f"optional weight=N, from 1 to {MAX_WEIGHT}, and an optional priority=N, from "
                f"{-MAX_PRIORITY} to {MAX_PRIORITY}"
            )
        if weights.setdefault(tenant.name, tenant.weight) != tenant.weight:
            raise SettingsError(f"{path}, line {number}: {tenant.name} has two weights")
        tenants[bytes.fromhex(text[:_DIGEST_DIGITS])] = tenant
    if not tenants:  # an empty file must not disable authentication
        raise SettingsError(f"{path} has no API key: add one, or do not set --api-keys-file")
    return tenants


def _parse_line(text: str) -> Tenant | None:
    """Return the tenant of a key, or None if the line is invalid."""
    match = _LINE.match(text)
    if match is None:
        return None
    weight = int(match["weight"] or 1)
    priority = int(match["priority"] or -MAX_PRIORITY)
    if weight > MAX_WEIGHT or abs(priority) > MAX_PRIORITY:
        return None
    return Tenant(match["name"] or f"key-{match['digest'][:8]}", weight, priority)
