"""Open transactions on a timeline, what one id did lately, and the one action of the site: ending one that hangs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from semel.client.cluster import Cluster
from semel.client.offsets import edge_offsets
from semel.client.partitions import TopicPartition
from semel.errors import InvalidState, KafkaError, SemelError, UnsupportedByBroker
from semel.inspect.hanging import OpenTransaction
from semel.inspect.transaction_log import Transition, recent_transitions
from semel.inspect.transactions import (
    HeldPartition,
    KnownTransaction,
    end_hanging,
    find_open,
    held_partitions,
    known_transactions,
    open_transactions,
)
from semel.web.forms import read_form
from semel.web.guard import COOKIE
from semel.web.shared import Look
from semel.web.site import Paging, WrongAddress, address, number_of, page_number, parse_number, site_of, text_of
from semel.web.timeline import OpenBar, open_bars, scale_of

OPEN_STATES: Final = ("Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence")
FRESH_S: Final = 3.0
_ROWS: Final = 50


@dataclass(frozen=True, slots=True)
class OpenNow:
    """Everything that is open at one moment. `trouble` says what could not be looked at."""

    bars: list[OpenBar]
    held: list[HeldPartition]
    trouble: str | None = None

    @property
    def hanging(self) -> list[HeldPartition]:
        return [one for one in self.held if one.holder is not None and one.holder.standing == "hanging"]


def look_at_open(cluster: Cluster) -> OpenNow:
    """What `semel inspect transactions` looks at."""
    known: list[KnownTransaction] = []
    trouble = None
    try:
        known = known_transactions(cluster, states=OPEN_STATES)
    except (KafkaError, UnsupportedByBroker) as error:
        trouble = str(error)
    held = held_partitions(cluster)
    return OpenNow(open_bars(known, held), held, trouble)


async def transactions(request: Request) -> Response:
    """The timeline."""
    site = site_of(request)
    look = await site.looks.ask("open", look_at_open, fresh_s=FRESH_S, deadline_s=20.0)
    found = look.value
    bars = [] if found is None else found.bars
    paging = Paging(page_number(request), _ROWS, len(bars))
    return site.page(
        request,
        "transactions.html",
        look,
        bars=bars[paging.start : paging.end],
        paging=paging,
        scale=scale_of(bars, time.time() * 1000),
        now_ms=time.time() * 1000,
    )


# -- one id --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IdNow:
    """A transactional id, and what it did lately."""

    known: KnownTransaction
    lately: list[Transition]
    trouble: str | None = None


def _look_at_id(cluster: Cluster, name: str) -> IdNow:
    [known] = known_transactions(cluster, transactional_ids=[name])
    try:
        return IdNow(known, recent_transitions(cluster, name)[::-1])
    except (KafkaError, UnsupportedByBroker) as error:
        return IdNow(known, [], f"__transaction_state cannot be read. {error}")


async def transaction(request: Request) -> Response:
    """One transactional id."""
    site, name = site_of(request), text_of(request, "id")
    look = await site.looks.ask(("id", name), lambda cluster: _look_at_id(cluster, name), fresh_s=FRESH_S)
    return site.page(request, "transaction.html", look, name=name)


# -- ending --------------------------------------------------------------------------------------------------------


async def before_ending(request: Request) -> Response:
    """What would be ended, looked at right now, and the form."""
    site = site_of(request)
    topic, partition = text_of(request, "topic"), number_of(request, "partition")
    producer_id = number_of(request, "producer")
    try:
        found = await site.looks.do(lambda cluster: find_open(cluster, topic, partition, producer_id))
    except SemelError as error:
        return site.error(request, error)
    return site.page(request, "end.html", found=found, refusal=None)


async def end(request: Request) -> Response:
    """Ends it, if it hangs or the user insists."""
    site = site_of(request)
    form = await read_form(request)
    if not site.sessions.is_csrf_token(form.get("csrf", ""), request.cookies.get(COOKIE, "")):
        response = site.error(request, WrongAddress("The form is out of date, so nothing was changed: open it again."))
        response.status_code = 403
        return response
    topic = form.get("topic", "")
    partition = parse_number(form.get("partition"), "partition")
    producer_id = parse_number(form.get("producer"), "producer")
    start_offset = parse_number(form.get("start"), "start")
    is_forced = form.get("force") == "yes"

    def job(cluster: Cluster) -> OpenTransaction:
        return end_hanging(cluster, topic, partition, producer_id, start_offset=start_offset, force=is_forced)

    try:
        await site.looks.do(job)
    except InvalidState as error:
        return await _refused(request, error, topic, partition, producer_id)
    except SemelError as error:
        return site.error(request, error)
    finally:
        site.looks.forget()
    return RedirectResponse(address("/transactions/after", topic=topic, partition=partition, was=start_offset), 303)


async def _refused(request: Request, error: InvalidState, topic: str, partition: int, producer_id: int) -> Response:
    site = site_of(request)
    try:
        found = await site.looks.do(lambda cluster: find_open(cluster, topic, partition, producer_id))
    except SemelError:
        response = site.error(request, error)  # it has ended by itself
    else:
        response = site.page(request, "end.html", found=found, refusal=str(error))
    response.status_code = 409
    return response


@dataclass(frozen=True, slots=True)
class PlaceNow:
    """Where a partition stands, and what is open in it."""

    last_stable_offset: int
    high_watermark: int
    open: list[OpenTransaction]


def _look_at_place(cluster: Cluster, named: TopicPartition) -> PlaceNow:
    [stable] = edge_offsets(cluster, [named], "latest", "read_committed").values()
    [high] = edge_offsets(cluster, [named], "latest", "read_uncommitted").values()
    return PlaceNow(stable, high, open_transactions(cluster, [named]))


async def after_ending(request: Request) -> Response:
    """Where the partition stands now."""
    site = site_of(request)
    named = TopicPartition(text_of(request, "topic"), number_of(request, "partition"))
    look: Look[PlaceNow] = await site.looks.ask(("place", named), lambda cluster: _look_at_place(cluster, named))
    return site.page(request, "after.html", look, named=named, was=number_of(request, "was"))
