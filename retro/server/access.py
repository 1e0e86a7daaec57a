"""Access control: check the bearer token, or, on a server without a token, the `Host` header.

The `Host` check prevents DNS rebinding: a web page of another site points a host name of that site to this machine. The browser
then treats the server as part of that site, so neither CORS nor the content type protects the answers. But the browser sends
the site's name as `Host`, and a server without a token rejects unknown names.
"""

import hmac
import ipaddress
import re
from collections.abc import Sequence

from starlette.types import Scope

from retro.server.errors import ApiError

_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::\d*)?")  # a name, an IPv4 address or an IPv6 address in brackets, and a port


class Access:
    """Checks the token or the host of each request.

    Args:
        token: the bearer token that requests must send; empty = none.
        allowed_hosts: host names that a server without a token accepts in addition to `localhost` and IP addresses; `*` = any.
    """

    def __init__(self, token: str, allowed_hosts: Sequence[str]) -> None:
        self._token = token.encode()
        self._hosts = {"", "localhost", *(name.lower() for name in allowed_hosts)}

    def check(self, scope: Scope) -> None:
        """Raise ApiError if the request is not allowed."""
        if self._token:
            self._check_token(scope)
        elif "*" not in self._hosts:
            for value in (value for name, value in scope["headers"] if name == b"host"):
                self._check_host(value.decode("latin-1"))

    def _check_token(self, scope: Scope) -> None:
        given = header(scope, b"authorization")
        scheme, _, token = given.partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(token.strip(), self._token):
            problem = "the bearer token is wrong" if given else "a bearer token is required"
            message = f"{problem}: send the header `Authorization: Bearer TOKEN` with the server's token."
            raise ApiError(401, message, headers={"WWW-Authenticate": "Bearer", "Connection": "close"})

    def _check_host(self, host: str) -> None:
        matched = _HOST.fullmatch(host.strip().lower())
        name = matched[1].removesuffix(".") if matched else host
        if name not in self._hosts and not _is_address(name.strip("[]")):
            message = (
                f"Host = {name!r}: a server without a token accepts localhost, IP addresses and the names in --allowed-hosts. "
                "Start the server with that option or with a token."
            )
            raise ApiError(403, message, headers={"Connection": "close"})


def header(scope: Scope, name: bytes) -> bytes:
    """Return the first value of a request header; empty if the header is missing."""
    return next((value for key, value in scope["headers"] if key == name), b"")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
