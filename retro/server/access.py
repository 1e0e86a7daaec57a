"""Who may ask: whoever has the token; without a token, requests that no web page of another site can have sent.

A page of another site can let a name of its own point to this machine (DNS rebinding). To a browser the server then belongs to
that site, and neither CORS nor the content type keeps the page from reading answers. But the browser sends the site's name as
`Host`, which a server without a token does not accept.
"""

import hmac
import ipaddress
import re
from collections.abc import Sequence

from starlette.types import Scope

from retro.server.errors import ApiError

_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::\d*)?")  # a name, an IPv4 address or an IPv6 address in brackets, and a port


class Access:
    """Checks requests.

    Args:
        token: that requests must bear; empty = none.
        allowed_hosts: names by which a server without a token may be called, besides `localhost` and IP addresses; `*` = any.
    """

    def __init__(self, token: str, allowed_hosts: Sequence[str]) -> None:
        self._token = token.encode()
        self._hosts = {"", "localhost", *(name.lower() for name in allowed_hosts)}

    def check(self, scope: Scope) -> None:
        """Raise ApiError where a request may not ask."""
        if self._token:
            self._check_token(scope)
        elif "*" not in self._hosts:
            for value in (value for name, value in scope["headers"] if name == b"host"):
                self._check_host(value.decode("latin-1"))

    def _check_token(self, scope: Scope) -> None:
        given = header(scope, b"authorization")
        scheme, _, token = given.partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(token.strip(), self._token):
            said = "the bearer token is wrong" if given else "a bearer token is needed"
            message = f"{said}: send the header `Authorization: Bearer TOKEN` with the one the server was started with."
            raise ApiError(401, message, headers={"WWW-Authenticate": "Bearer", "Connection": "close"})

    def _check_host(self, host: str) -> None:
        matched = _HOST.fullmatch(host.strip().lower())
        name = matched[1].removesuffix(".") if matched else host
        if name not in self._hosts and not _is_address(name.strip("[]")):
            message = (
                f"Host = {name!r}: a server without a token accepts localhost, IP addresses and the names of --allowed-hosts. "
                "Start it with that option, or with a token."
            )
            raise ApiError(403, message, headers={"Connection": "close"})


def header(scope: Scope, name: bytes) -> bytes:
    """The first value of a request's header; empty if there is none."""
    return next((value for key, value in scope["headers"] if key == name), b"")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
