"""The first page: the cluster at a glance."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.errors import KafkaError
from semel.web.site import site_of
from semel.web.views.pipelines import FRESH_S as PIPELINES_FRESH_S
from semel.web.views.pipelines import look_at_pipelines
from semel.web.views.transactions import FRESH_S as OPEN_FRESH_S
from semel.web.views.transactions import look_at_open

_FRESH_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class ClusterNow:
    """Brokers and counts."""

    brokers: list[tuple[int, str]]
    transaction_protocol: int
    topics: int
    partitions: int
    groups: int | None
    """None if this user may not list them."""


def _look_at_cluster(cluster: Cluster) -> ClusterNow:
    topics = cluster.list_topics()
    return ClusterNow(
        [(node, f"{host}:{port}") for node, (host, port) in sorted(cluster.nodes().items())],
        cluster.transaction_protocol,
        len(topics),
        sum(map(len, topics.values())),
        _count_groups(cluster),
    )


def _count_groups(cluster: Cluster) -> int | None:
    try:
        return len(Admin(cluster).list_groups())
    except KafkaError:
        return None


async def overview(request: Request) -> Response:
    """Counts, each a link to where it is explained."""
    site = site_of(request)
    ledger = site.settings.ledger
    look, opened, pipelines = await asyncio.gather(
        site.looks.ask("cluster", _look_at_cluster, fresh_s=_FRESH_S),
        site.looks.ask("open", look_at_open, fresh_s=OPEN_FRESH_S, deadline_s=20.0),
        site.looks.ask(
            "pipelines", lambda cluster: look_at_pipelines(cluster, ledger), fresh_s=PIPELINES_FRESH_S, deadline_s=20.0
        ),
    )
    return site.page(request, "overview.html", look, opened=opened, pipelines=pipelines)
