"""What `semel doctor` finds in the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from semel.advise.examine import examine_cluster
from semel.advise.rules import SEVERITIES, Finding
from semel.web.site import site_of

_FRESH_S: Final = 60.0
_WATCH_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Examined:
    """The findings, and what could not be looked at."""

    findings: list[Finding]
    not_seen: list[str]

    @property
    def counts(self) -> list[tuple[str, int]]:
        return [(name, sum(one.rule.severity == name for one in self.findings)) for name in SEVERITIES]


async def doctor(request: Request) -> Response:
    """Its findings, at most a minute old."""
    site = site_of(request)

    def look_at_all(_: object) -> Examined:
        # It watches for two seconds, with a connection of its own.
        findings, facts = examine_cluster(site.settings.client_settings, watch_s=_WATCH_S)
        return Examined(findings, facts.not_seen)

    look = await site.looks.ask("doctor", look_at_all, fresh_s=_FRESH_S, deadline_s=60.0)
    return site.page(request, "doctor.html", look)
