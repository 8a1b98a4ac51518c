"""Consumer groups with their true lag, and the naive one beside it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.errors import KafkaError, SemelError
from semel.inspect.groups import GroupReport, group_report
from semel.web.site import Paging, page_number, search_of, site_of, text_of
from semel.wire import ErrorCode

_FRESH_S: Final = 5.0
_GROUPS: Final = 50
_PARTITIONS: Final = 200
LIST_BYTES_MAX: Final = 2 << 20
"""How much of the logs is read for one group of a list."""
_GROUP_BYTES_MAX: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class GroupsNow:
    """One page of the groups."""

    total: int
    reports: list[GroupReport] = field(default_factory=list[GroupReport])
    troubles: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Groups that could not be looked at, and why."""


def _look_at_groups(cluster: Cluster, wanted: str, page: int) -> GroupsNow:
    names = [one.group for one in Admin(cluster).list_groups() if wanted in one.group]
    paging = Paging(page, _GROUPS, len(names))
    found = GroupsNow(len(names))
    for name in names[paging.start : paging.end]:
        try:
            found.reports.append(group_report(cluster, name, bytes_max=LIST_BYTES_MAX))
        except SemelError as error:
            found.troubles.append((name, str(error)))
    return found


async def groups(request: Request) -> Response:
    """All groups."""
    site, page = site_of(request), page_number(request)
    wanted = search_of(request)
    look = await site.looks.ask(
        ("groups", wanted, page),
        lambda cluster: _look_at_groups(cluster, wanted, page),
        fresh_s=_FRESH_S,
        deadline_s=20.0,
    )
    paging = Paging(page, _GROUPS, 0 if look.value is None else look.value.total)
    return site.page(request, "groups.html", look, paging=paging, wanted=wanted)


def _look_at_group(cluster: Cluster, name: str) -> GroupReport:
    report = group_report(cluster, name, bytes_max=_GROUP_BYTES_MAX)
    if report.state == "Dead" and not report.partitions:
        raise KafkaError(f"The cluster has no group {name!r}. Check the name.", code=ErrorCode.group_id_not_found)
    return report


async def group(request: Request) -> Response:
    """One group with its partitions."""
    site, name = site_of(request), text_of(request, "name")
    look = await site.looks.ask(
        ("group", name), lambda cluster: _look_at_group(cluster, name), fresh_s=_FRESH_S, deadline_s=20.0
    )
    partitions = () if look.value is None else look.value.partitions
    paging = Paging(page_number(request), _PARTITIONS, len(partitions))
    return site.page(
        request, "group.html", look, name=name, partitions=partitions[paging.start : paging.end], paging=paging
    )
