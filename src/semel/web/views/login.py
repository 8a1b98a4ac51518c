"""Logging in and out, where a password is asked for."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from semel.web.forms import read_form
from semel.web.guard import COOKIE, SESSION_S
from semel.web.site import site_of

_TRIES_AT_ONCE: Final = 2
_TRY_S: Final = 0.4
_WAITING_MAX: Final = 20


class Tries:
    """Slows down those who guess: so many passwords are looked at in a second, whoever sends them."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(_TRIES_AT_ONCE)
        self._waiting = 0

    async def wait_turn(self) -> bool:
        """False if too many are waiting already."""
        if self._waiting >= _WAITING_MAX:
            return False
        self._waiting += 1
        try:
            async with self._slots:
                await asyncio.sleep(_TRY_S)
        finally:
            self._waiting -= 1
        return True


async def login(request: Request) -> Response:
    """The form."""
    site = site_of(request)
    if site.sessions.password is None:
        return RedirectResponse("/", 303)
    return site.page(request, "login.html", wanted=_own_path(request.query_params.get("next", "")), trouble=None)


async def try_login(request: Request) -> Response:
    """Looks at a password."""
    site, form = site_of(request), await read_form(request)
    wanted = _own_path(form.get("next", ""))
    if site.sessions.password is None:
        return RedirectResponse("/", 303)
    tries = request.app.state.tries
    trouble = "That is not the password."
    status = 403
    if not await tries.wait_turn():
        trouble, status = "Too many are trying to log in. Wait a moment.", 429
    elif site.sessions.is_right(form.get("password", "")):
        response = RedirectResponse(wanted, 303)
        response.set_cookie(
            COOKIE,
            site.sessions.begin(),
            max_age=SESSION_S,
            httponly=True,
            samesite="strict",
            secure=site.sessions.is_secure,
        )
        return response
    response = site.page(request, "login.html", wanted=wanted, trouble=trouble)
    response.status_code = status
    return response


async def logout(request: Request) -> Response:
    """Ends the session."""
    site, form = site_of(request), await read_form(request)
    cookie = request.cookies.get(COOKIE, "")
    if site.sessions.is_csrf_token(form.get("csrf", ""), cookie):
        site.sessions.end(cookie)
    response = RedirectResponse("/login", 303)
    response.delete_cookie(COOKIE)
    return response


def _own_path(text: str) -> str:
    r"""A path on this site, never another site.

    >>> _own_path("/groups?q=a"), _own_path("//evil"), _own_path("/\\evil"), _own_path("https://evil")
    ('/groups?q=a', '/', '/', '/')
    """
    is_path = text.startswith("/") and not text.startswith("//") and "\\" not in text and text.isprintable()
    return text if is_path else "/"
