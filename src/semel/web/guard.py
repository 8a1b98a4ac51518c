"""What stands before every request: which Host it may name, who is logged in, and the headers of every answer.

A page of another site can make a browser send requests to this one, and by DNS rebinding can even read the answers
under a name of its own. So the Host header must be a name that the user has chosen, or an address: no site of somebody
else's can have an address as its name.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE: Final = "semel_session"
SESSION_S: Final = 12 * 3600
_SESSIONS_MAX: Final = 1_000
_OPEN_PATHS: Final = ("/login", "/static/")
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(slots=True)
class Sessions:
    """Who is logged in, in memory only: a restart logs everybody out. Without a password everybody is."""

    password: str | None = field(default=None, repr=False)
    is_secure: bool = False
    """The page is served over TLS, so its cookie is never sent without."""
    _key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    _until: dict[str, float] = field(default_factory=dict[str, float], repr=False)

    def is_right(self, password: str) -> bool:
        """Compared in constant time."""
        assert self.password is not None, "there is nothing to log in to"
        return hmac.compare_digest(password.encode(), self.password.encode())

    def begin(self) -> str:
        """The cookie of a new session."""
        while len(self._until) >= _SESSIONS_MAX:
            del self._until[next(iter(self._until))]
        cookie = secrets.token_urlsafe(32)
        self._until[cookie] = time.monotonic() + SESSION_S
        return cookie

    def end(self, cookie: str) -> None:
        self._until.pop(cookie, None)

    def holds(self, cookie: str) -> bool:
        return self.password is None or self._until.get(cookie, 0.0) > time.monotonic()

    def csrf_token(self, cookie: str) -> str:
        """What a form must send back: another site cannot read it, and it is worth nothing in another session."""
        return hmac.new(self._key, cookie.encode(), hashlib.sha256).hexdigest()

    def is_csrf_token(self, token: str, cookie: str) -> bool:
        return hmac.compare_digest(token.encode(), self.csrf_token(cookie).encode())


class Guard:
    """The outermost layer of the application."""

    def __init__(self, app: ASGIApp, sessions: Sessions, host: str, allowed_hosts: Collection[str]) -> None:
        self._app = app
        self._sessions = sessions
        self._is_loopback = is_loopback(host)
        self._allowed = {name.lower() for name in (host, *allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        request = Request(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refusal = self._refusal(request)
        await (self._app if refusal is None else refusal)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        if not self._may_name(request.headers.get("host", "")):
            return PlainTextResponse(
                "This page does not answer to that name. Open it by its address, or start semel ui with "
                "--allow-host NAME.\n",
                421,
            )
        path = request.url.path
        if path.startswith(_OPEN_PATHS) or self._sessions.holds(request.cookies.get(COOKIE, "")):
            return None
        if request.method != "GET":
            return PlainTextResponse("Log in first.\n", 401)
        wanted = path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(f"/login?next={quote(wanted, safe='')}", 303)

    def _may_name(self, host_header: str) -> bool:
        name = host_name(host_header)
        if name is None:
            return False
        if name in self._allowed or name == "localhost":
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not self._is_loopback


def host_name(header: str) -> str | None:
    """The name or address in a Host header, without the port; None if it is none.

    >>> host_name("LOCALHOST:80"), host_name("[::1]:80"), host_name("a b"), host_name("x:y")
    ('localhost', '::1', None, None)
    """
    if header.startswith("["):
        name, bracket, port = header[1:].partition("]")
        port = port.removeprefix(":") if bracket else "?"
    else:
        name, _, port = header.partition(":")
    is_name = bool(name) and all(one.isalnum() or one in ".-_:" for one in name) and name.isascii()
    return name.lower() if is_name and (not port or (port.isascii() and port.isdigit())) else None


def is_loopback(host: str) -> bool:
    """
    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
