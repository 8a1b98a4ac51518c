"""The application: which page is where, what stands before it, and what becomes of errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from semel.client.settings import parse_config
from semel.errors import SemelError
from semel.web.clusters import ClusterPool
from semel.web.guard import Guard, Sessions
from semel.web.shared import SharedLooks
from semel.web.site import Site, SiteSettings, WrongAddress, site_of
from semel.web.views.doctor import doctor
from semel.web.views.groups import group, groups
from semel.web.views.login import Tries, login, logout, try_login
from semel.web.views.overview import overview
from semel.web.views.pipelines import pipeline, pipelines
from semel.web.views.record import record, value
from semel.web.views.reports import report, report_page, reports
from semel.web.views.topics import records, topic, topics
from semel.web.views.transactions import after_ending, before_ending, end, look_at_open, transaction, transactions

_SETUP_TIMEOUT_MS: Final = 3_000
"""Of a new connection, unless the user says otherwise: no deadline ends it earlier."""
_TYPES: Final = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_STATIC: Final = {file.name: file.read_bytes() for file in (Path(__file__).parent / "static").iterdir()}
"""From memory: a page is not painted before its style is there."""


def build_app(settings: SiteSettings) -> Starlette:
    """The site for one cluster. Nothing is asked of it before the application starts."""
    given = {"socket.connection.setup.timeout.ms": _SETUP_TIMEOUT_MS, **settings.client_settings}
    looks = SharedLooks(ClusterPool(parse_config(given).client))
    sessions = Sessions(settings.password, is_secure=settings.certificate is not None)
    site = Site(settings, looks, sessions)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        # The first who comes need not wait: what it takes to ask and to show is loaded, and the first look under way.
        await looks.ask("open", look_at_open, patience_s=0.0)
        site.warm_up()
        yield
        looks.close()

    app = Starlette(
        routes=[
            Route("/", overview),
            Route("/pipelines", pipelines),
            Route("/pipeline", pipeline),
            Route("/transactions", transactions),
            Route("/transaction", transaction),
            Route("/transactions/end", before_ending),
            Route("/transactions/end", end, methods=["POST"]),
            Route("/transactions/after", after_ending),
            Route("/topics", topics),
            Route("/topic", topic),
            Route("/records", records),
            Route("/record", record),
            Route("/value", value),
            Route("/groups", groups),
            Route("/group", group),
            Route("/doctor", doctor),
            Route("/reports", reports),
            Route("/report", report),
            Route("/report/page", report_page),
            Route("/login", login),
            Route("/login", try_login, methods=["POST"]),
            Route("/logout", logout, methods=["POST"]),
            Route("/static/{name}", static),
            Route("/favicon.ico", icon),
        ],
        middleware=[Middleware(Guard, sessions, settings.host, settings.allowed_hosts)],
        exception_handlers={SemelError: _expected, 404: _not_found},  # type: ignore[dict-item]
        lifespan=lifespan,
    )
    app.state.site = site
    app.state.tries = Tries()
    return app


async def static(request: Request) -> Response:
    """Style, script and picture."""
    content = _STATIC.get(name := request.path_params["name"])
    if content is None:
        return Response(status_code=404)
    return Response(content, media_type=_TYPES[Path(name).suffix], headers={"Cache-Control": "max-age=60"})


async def icon(_: Request) -> Response:
    """What browsers ask for beside pages that name none, such as those of reports."""
    return Response(_STATIC["semel.svg"], media_type=_TYPES[".svg"])


async def _expected(request: Request, error: SemelError) -> Response:
    return site_of(request).error(request, error)


async def _not_found(request: Request, _: Exception) -> Response:
    response = site_of(request).error(request, WrongAddress("There is no such page."))
    response.status_code = 404
    return response
