"""What every page of the site has: the looks at the cluster, who is logged in, and how a page is written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from semel.errors import ConfigError, KafkaError, NotAuthorized, OffsetOutOfRange, SemelError, UnknownTopic
from semel.inspect.shown import show_span, show_text, show_time
from semel.inspect.wording import LAG_TITLES, lag_cells
from semel.web.guard import COOKIE, Sessions
from semel.web.shared import Look, SharedLooks, TooBusy

PART_HEADER: Final = "x-semel-part"
"""The script asks with it for the live part of a page alone."""
_SEARCH_MAX: Final = 249
_INT64_MAX: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SiteSettings:
    """What `semel ui` was told."""

    client_settings: dict[str, object]
    host: str = "127.0.0.1"
    port: int = 0
    ledger: str = "semel-ledger"
    reports: Path | None = None
    allowed_hosts: Sequence[str] = ()
    password: str | None = None
    """None: nobody has to log in."""
    certificate: str | None = None
    key: str | None = None

    @property
    def bootstrap(self) -> str:
        return str(self.client_settings.get("bootstrap.servers", ""))


class WrongAddress(ConfigError):
    """The address of a page does not say what it must, or says it wrongly."""


class Site:
    """The site, for its pages."""

    def __init__(self, settings: SiteSettings, looks: SharedLooks, sessions: Sessions) -> None:
        self.settings = settings
        self.looks = looks
        self.sessions = sessions
        self._templates = _templates()

    def warm_up(self) -> None:
        """Compile the templates."""
        for name in self._templates.list_templates():
            self._templates.get_template(name)

    def page(self, request: Request, template: str, look: Look[Any] | None = None, **values: object) -> Response:
        """The whole page, or its live part alone if the script asks for it."""
        is_part = PART_HEADER in request.headers
        cookie = request.cookies.get(COOKIE, "")
        text = self._templates.get_template(template).render(
            layout="part.html" if is_part else "layout.html",
            path=request.url.path,
            look=look,
            age_s=None if look is None or look.at is None else max(0.0, time.time() - look.at),
            bootstrap=self.settings.bootstrap,
            has_login=self.sessions.password is not None,
            csrf_token=self.sessions.csrf_token(cookie),
            **values,
        )
        headers = {"Vary": PART_HEADER}
        if is_part:
            headers[PART_HEADER] = "live"  # what has it not comes from something else that answers here
        return HTMLResponse(text, _status(look), headers)

    def error(self, request: Request, error: SemelError) -> Response:
        """A page that says one sentence."""
        return self.page(request, "error.html", Look(error=error), title="Not shown")


def site_of(request: Request) -> Site:
    site = request.app.state.site
    assert isinstance(site, Site)
    return site


def _status(look: Look[Any] | None) -> int:
    if look is None or look.error is None or look.value is not None:
        return 200
    if isinstance(look.error, UnknownTopic | OffsetOutOfRange):
        return 404
    if isinstance(look.error, NotAuthorized):
        return 403
    if isinstance(look.error, ConfigError):
        return 400
    if isinstance(look.error, TooBusy):
        return 503
    return 404 if isinstance(look.error, KafkaError) else 502


def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("semel.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        text=show_text,
        whole=lambda value: show_text(value, longest=None),
        time=show_time,
        span=show_span,
        count=lambda number: f"{number:,}",
        lag=lag_cells,
    )
    environment.globals.update(address=address, lag_titles=LAG_TITLES)
    return environment


def address(path: str, **values: object) -> str:
    """A link: names may hold any character, so they go into the query.

    >>> address("/group", name="a/b&c", page=None)
    '/group?name=a%2Fb%26c'
    """
    given = {name: value for name, value in values.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


def text_of(request: Request, name: str) -> str:
    """A value that the address must have."""
    found = request.query_params.get(name)
    if not found:
        raise WrongAddress(f"The address of this page lacks {name}. Nothing was asked; begin at a list.")
    return found


def number_of(request: Request, name: str, default: int | None = None) -> int:
    """A whole number from 0 on."""
    return parse_number(request.query_params.get(name), name, default)


def optional_number_of(request: Request, name: str) -> int | None:
    return number_of(request, name) if request.query_params.get(name) else None


def parse_number(text: str | None, name: str, default: int | None = None) -> int:
    """
    >>> parse_number("12", "offset"), parse_number(None, "page", 1)
    (12, 1)
    """
    if not text and default is not None:
        return default
    if not text or not text.isascii() or not text.isdigit() or len(text) > 19 or int(text) > _INT64_MAX:
        raise WrongAddress(f"{name} must be a whole number. Nothing was asked.")
    return int(text)


@dataclass(frozen=True, slots=True)
class Paging:
    """One page of a long list."""

    number: int
    size: int
    total: int

    @property
    def count(self) -> int:
        return max(1, -(-self.total // self.size))

    @property
    def start(self) -> int:
        return (min(self.number, self.count) - 1) * self.size

    @property
    def end(self) -> int:
        return min(self.start + self.size, self.total)


def search_of(request: Request) -> str:
    """What a list is searched for. It is shown in its field again, so it has nothing that cannot be seen."""
    return "".join(one for one in request.query_params.get("q", "") if one.isprintable())[:_SEARCH_MAX]


def page_number(request: Request) -> int:
    return max(1, number_of(request, "page", 1))
