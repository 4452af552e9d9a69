"""Check of the Host header and of the cluster token of requests."""

from werkzeug.exceptions import Forbidden

from services.common.router_errors import ErrorCode
from services.common.tracing import Headers
from services.router.errors import Refusal
from services.router.settings import RouterSettings


class Access:
    """Refuses requests that the settings do not allow."""

    def __init__(self, settings: RouterSettings) -> None:
        self._token = settings.token_check
        self._hosts = settings.host_check(authenticated=settings.authenticates_services)

    def check(self, path: str, headers: Headers) -> None:
        """Check a request.

        Raises:
            Forbidden: if the name in ``Host`` is not allowed.
            Refusal: if the path needs the cluster token, and it is missing or wrong.
        """
        if self._hosts and (refusal := self._hosts.refusal(headers("host"))):
            raise Forbidden(refusal)
        if self._token is None:
            return
        given = next(iter(headers("authorization")), "")
        if path == "/metrics":
            authorized = self._token.accepts_scraper(given)
        else:
            authorized = not path.startswith("/v1/") or self._token.accepts(given)
        if not authorized:
            raise Refusal(ErrorCode.UNAUTHENTICATED, "the cluster token is missing or wrong")
