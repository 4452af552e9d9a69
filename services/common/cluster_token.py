"""Check of the cluster token of incoming calls. Services share this secret."""

import base64
import binascii
import hmac
from collections.abc import Callable


class TokenCheck:
    """Compares credentials with the cluster token. A second token is accepted during a rotation.

    Args:
        token: token that services send.
        second: token that is accepted as well, or None.

    Attributes:
        on_second: called when the second token is accepted.
    """

    on_second: Callable[[], None] | None = None

    def __init__(self, token: str, second: str | None = None) -> None:
        self._token = token.encode()
        self._second = second.encode() if second else None

    def accepts(self, authorization: str | bytes) -> bool:
        """Return whether an Authorization header has an accepted token as bearer token."""
        given = authorization if isinstance(authorization, bytes) else authorization.encode()
        scheme, _, token = given.partition(b" ")
        return scheme == b"Bearer" and self._accepts_token(token)

    def accepts_scraper(self, authorization: str) -> bool:
        """Return whether an Authorization header has an accepted token.

        Scrapers send it as a bearer token, or as the password of basic authentication.
        """
        scheme, _, value = authorization.partition(" ")
        given = value.encode()
        if scheme.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        return self._accepts_token(given)

    def _accepts_token(self, given: bytes) -> bool:
        if hmac.compare_digest(given, self._token):
            return True
        if self._second is None or not hmac.compare_digest(given, self._second):
            return False
        if self.on_second is not None:
            self.on_second()
        return True
