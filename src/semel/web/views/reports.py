"""Reports of `semel verify` in the folder that `--reports` names."""

from __future__ import annotations

import asyncio
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from semel.errors import SemelError
from semel.web.reports import find_report, list_reports, read_page
from semel.web.shared import Look
from semel.web.site import Site, WrongAddress, site_of, text_of


def _folder(site: Site) -> Path:
    folder = site.settings.reports
    if folder is None:
        raise WrongAddress("No folder with reports was named: start semel ui with --reports FOLDER.")
    return folder


async def reports(request: Request) -> Response:
    """All reports."""
    site = site_of(request)
    folder = site.settings.reports
    found = [] if folder is None else await asyncio.to_thread(list_reports, folder)
    return site.page(request, "reports.html", None, folder=folder, reports=found)


async def report(request: Request) -> Response:
    """What one of them says."""
    site, name = site_of(request), text_of(request, "name")
    try:
        found = await asyncio.to_thread(find_report, _folder(site), name)
    except SemelError as error:
        return site.page(request, "error.html", Look(error=error), title="No report")
    return site.page(request, "report.html", None, report=found)


async def report_page(request: Request) -> Response:
    """The page that the run has written, shown without scripts and without a network."""
    site, name = site_of(request), text_of(request, "name")
    try:
        text, policy = await asyncio.to_thread(read_page, _folder(site), name)
    except SemelError as error:
        return site.page(request, "error.html", Look(error=error), title="No report")
    return HTMLResponse(text, headers={"Content-Security-Policy": policy})
