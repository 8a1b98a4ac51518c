"""Connection strings of Postgres, as URL or as settings: without their passwords, and with timeouts. Pure."""

from __future__ import annotations

import re
from typing import Final

from semel.errors import ConfigError

_TIMEOUTS: Final = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
"""Seconds, and the last one milliseconds. Those that the user has written count more."""
_PASSWORD: Final = re.compile(
    r"(password\s*=\s*)(?:'(?:\\.|[^'\\])*(?:'|$)|(?:\\.|[^\\])*?(?=\s+\w+\s*=|\s*$))", re.IGNORECASE | re.DOTALL
)
"""In a string of settings, with or without quotes."""
_PASSWORD_IN_URL: Final = re.compile(r"(password=).*?(?=&\w+=|$)", re.IGNORECASE | re.DOTALL)
_UNREADABLE: Final = re.compile(r"connection info string|connection option|URI")
"""Of errors that quote parts of a connection string which cannot be read."""


def hide_password(uri: str) -> str:
    """
    >>> hide_password("postgresql://me:secret@db/shop?password=x")
    'postgresql://me:***@db/shop?password=***'
    >>> hide_password("host=db password = 'top secret' dbname=shop")
    'host=db password = *** dbname=shop'
    """
    scheme, mark, rest = uri.partition("://")
    if not mark:
        return _PASSWORD.sub(r"\1***", uri)
    rest = _PASSWORD_IN_URL.sub(r"\1***", rest)
    login, at, place = rest.rpartition("@")
    user, colon, _ = login.partition(":")
    return f"{scheme}://{user}:***@{place}" if at and colon else f"{scheme}://{rest}"


def check_url(uri: str) -> None:
    """Raises if the login has a character that ends it for Postgres, whose error would show parts of the password."""
    login = uri.partition("://")[2].partition("?")[0].rpartition("@")[0]
    if "/" in login or "@" in login:
        raise ConfigError(
            f"The URL {hide_password(uri)!r} has a / or @ in user or password that ends them too early; nothing was "
            "read or written. Write %2F for / and %40 for @ there."
        )


def with_timeouts(uri: str) -> str:
    """The same, such that a server that has vanished from the network is noticed within a minute, not after hours.

    >>> with_timeouts("postgresql://db/shop?connect_timeout=3").partition("&")[0]
    'postgresql://db/shop?connect_timeout=3'
    >>> with_timeouts("dbname=shop").partition(" keepalives_idle")[0]
    'dbname=shop connect_timeout=10'
    """
    missing = [f"{name}={value}" for name, value in _TIMEOUTS.items() if f"{name}=" not in uri]
    if not missing:
        return uri
    if "://" not in uri:
        return " ".join([uri, *missing])
    return uri + ("&" if "?" in uri else "?") + "&".join(missing)


def hide_quoted(text: str) -> str:
    """An error of the driver, without the parts of a connection string that it could not read.

    >>> hide_quoted('missing "=" after "secret" in connection info string')
    'missing (hidden) after (hidden) in connection info string'
    """
    return re.sub(r'"[^"]*"', "(hidden)", text) if _UNREADABLE.search(text) else text


def place_of(uri: str) -> str:
    """Host and database, without user and password."""
    return re.sub(r"^\w+://(.*@)?", "", hide_password(uri)).partition("?")[0] or "local socket"
