"""Spark pipelines: what their ledger says was committed, and how far they are behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from semel.client.cluster import Cluster
from semel.errors import SemelError, UnknownTopic
from semel.inspect.groups import GroupReport, group_report
from semel.inspect.ledgers import LedgerEntry, read_ledger
from semel.web.site import Paging, page_number, site_of, text_of
from semel.web.views.groups import LIST_BYTES_MAX

FRESH_S: Final = 4.0
_LEDGER_BYTES_MAX: Final = 32 << 20
_BATCHES: Final = 50
_LAGS_MAX: Final = 50


@dataclass(frozen=True, slots=True)
class PipelineNow:
    """A pipeline, its entries from the newest to the oldest, and the group that shows its lag."""

    name: str
    entries: list[LedgerEntry]
    group: GroupReport | None = None
    """None if there is no group of the pipeline's name, or it may not be seen."""

    @property
    def newest(self) -> LedgerEntry:
        return next((one for one in self.entries if one.status == "committed"), self.entries[0])


@dataclass(frozen=True, slots=True)
class PipelinesNow:
    """All pipelines of a ledger."""

    has_ledger: bool
    pipelines: list[PipelineNow] = field(default_factory=list[PipelineNow])


def look_at_pipelines(cluster: Cluster, ledger: str) -> PipelinesNow:
    """What `semel inspect ledger` reads, by pipeline."""
    try:
        entries = read_ledger(cluster, topic=ledger, bytes_max=_LEDGER_BYTES_MAX)
    except UnknownTopic:
        return PipelinesNow(has_ledger=False)
    by_name: dict[str, list[LedgerEntry]] = {}
    for one in reversed(entries):
        if not one.is_by_query:
            by_name.setdefault(one.pipeline, []).append(one)
    found = [
        PipelineNow(name, its, _group(cluster, name) if number < _LAGS_MAX else None)
        for number, (name, its) in enumerate(by_name.items())
    ]
    return PipelinesNow(has_ledger=True, pipelines=found)


def _group(cluster: Cluster, name: str) -> GroupReport | None:
    try:
        report = group_report(cluster, name, bytes_max=LIST_BYTES_MAX)
    except SemelError:
        return None
    return report if report.partitions else None


async def pipelines(request: Request) -> Response:
    """All of them."""
    site = site_of(request)
    ledger = site.settings.ledger
    look = await site.looks.ask(
        "pipelines", lambda cluster: look_at_pipelines(cluster, ledger), fresh_s=FRESH_S, deadline_s=20.0
    )
    return site.page(request, "pipelines.html", look, ledger=ledger)


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A batch, and how long after the one before it was committed."""

    one: LedgerEntry
    after_ms: int | None
    width: float
    """Of its bar: its records, where 100 are those of the largest batch."""


def batch_rows(entries: list[LedgerEntry]) -> list[BatchRow]:
    """From the newest to the oldest, as they come."""
    most = max((one.entry.records for one in entries), default=0) or 1
    gaps: list[int | None] = [newer.entry.at_ms - older.entry.at_ms for newer, older in pairwise(entries)]
    return [
        BatchRow(one, None if gap is None or gap < 0 else gap, round(100 * one.entry.records / most, 1))
        for one, gap in zip(entries, [*gaps, None], strict=True)
    ]


async def pipeline(request: Request) -> Response:
    """One pipeline with its batches."""
    site, name = site_of(request), text_of(request, "name")
    ledger = site.settings.ledger

    def look_at_one(cluster: Cluster) -> PipelineNow:
        entries = [
            one
            for one in read_ledger(cluster, name, topic=ledger, bytes_max=_LEDGER_BYTES_MAX)[::-1]
            if not one.is_by_query
        ]
        if not entries:
            raise UnknownTopic(f"The ledger {ledger!r} has no pipeline {name!r}. Check the name.")
        return PipelineNow(name, entries, _group(cluster, name))

    look = await site.looks.ask(("pipeline", name), look_at_one, fresh_s=FRESH_S, deadline_s=20.0)
    rows = [] if look.value is None else batch_rows(look.value.entries)
    paging = Paging(page_number(request), _BATCHES, len(rows))
    return site.page(request, "pipeline.html", look, name=name, rows=rows[paging.start : paging.end], paging=paging)
