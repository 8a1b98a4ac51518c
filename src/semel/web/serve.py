"""Runs the page with uvicorn until it is told to stop."""

from __future__ import annotations

import secrets
import socket
import ssl
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import uvicorn

from semel.errors import ConfigError
from semel.web.app import build_app
from semel.web.guard import is_loopback
from semel.web.site import SiteSettings

_CONNECTIONS_MAX: Final = 200
_SHUTDOWN_S: Final = 2
_SWITCH_INTERVAL_S: Final = 0.001


def with_login(settings: SiteSettings) -> tuple[SiteSettings, str | None]:
    """The settings with a login if others than this machine could connect, and the token that was made for it.

    >>> with_login(SiteSettings({}, host="127.0.0.1"))[1] is None
    True
    """
    if settings.password is not None or is_loopback(settings.host):
        return settings, None
    token = secrets.token_urlsafe(24)
    return replace(settings, password=token), token


def listen(settings: SiteSettings) -> socket.socket:
    """A socket at the address; with port 0 at a free one."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"semel ui cannot listen on {settings.host}:{settings.port} ({error.strerror or error}): choose another "
            "--host or --port."
        ) from error
    listener.listen(_CONNECTIONS_MAX)
    return listener


def make_server(settings: SiteSettings) -> uvicorn.Server:
    """A server that is not running yet."""
    config = uvicorn.Config(
        build_app(settings),
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="on",
        ws="none",
        limit_concurrency=_CONNECTIONS_MAX,
        timeout_graceful_shutdown=_SHUTDOWN_S,
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.key,
    )
    return uvicorn.Server(config)


def address_of(settings: SiteSettings, port: int) -> str:
    """
    >>> address_of(SiteSettings({}, host="::1"), 80)
    'http://[::1]:80/'
    """
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{'http' if settings.certificate is None else 'https'}://{host}:{port}/"


def _check_certificate(settings: SiteSettings) -> None:
    if settings.certificate is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.certificate, settings.key)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The certificate {settings.certificate!r} cannot be used with its key ({error}); nothing was started."
        ) from error


def serve(settings: SiteSettings, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. `say` prints a line."""
    settings, token = with_login(settings)
    _check_certificate(settings)
    server = make_server(settings)
    with listen(settings) as listener:
        say(f"semel ui ready on {address_of(settings, listener.getsockname()[1])}")
        if token is not None:
            say(f"Log in with this token, or choose a password with --password-file: {token}")
        if settings.certificate is None and not is_loopback(settings.host):
            say("What is sent is not encrypted: add --tls-certificate, or listen behind a proxy that does it.")
        # Answers of a large cluster take long to decode, in threads beside the loop that serves the pages.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        server.run(sockets=[listener])
