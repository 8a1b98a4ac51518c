"""A running pipeline by its name: what ledger, groups and coordinators know of it. Nothing is changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from semel.advise.pipeline_check import IdFacts, PipelineFacts
from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.errors import SemelError
from semel.inspect.ledgers import DEFAULT_LEDGER, LedgerEntry, read_ledger
from semel.inspect.shown import show_time
from semel.inspect.transaction_log import Transition, recent_transitions

_BY_COLUMN: Final = "*"

T = TypeVar("T")


def find_pipeline(cluster: Cluster, name: str, *, ledger: str = DEFAULT_LEDGER) -> PipelineFacts:
    """Look for a sink, session or relay of this name. What may not be seen is noted."""
    facts = PipelineFacts(name)
    admin = Admin(cluster)

    def look(what: str, action: Callable[[], T], otherwise: T) -> T:
        try:
            return action()
        except SemelError as error:
            facts.not_seen.append(f"{what}: {error}")
            return otherwise

    topics: set[str] = set()
    entries = look("the ledger", lambda: _entries(cluster, ledger), [])
    mine = [one for one in entries if one.pipeline == name and one.status == "committed" and not one.is_by_query]
    if mine:
        last = mine[-1]
        facts.last_batch = f"job {last.job}" if last.job is not None else f"batch {last.entry.batch}"
        facts.last_commit_ms = last.entry.at_ms
        topics |= {ledger, *_outputs(mine)}
    groups = look("groups", lambda: [one.group for one in admin.list_groups()], list[str]())
    if name in groups:
        facts.group = name
        read = look("positions of the group", lambda: admin.committed_offsets(name, require_stable=False), {})
        topics |= {place.topic for place in read}
    others = {one.pipeline for one in entries} - {name}
    facts.ids = look("transactional ids", lambda: list(_ids(cluster, admin, name, others)), list[IdFacts]())
    existing = set(cluster.list_topics())
    facts.topics = sorted(topics & existing)
    return facts


def _entries(cluster: Cluster, ledger: str) -> list[LedgerEntry]:
    return read_ledger(cluster, topic=ledger) if ledger in cluster.list_topics() else []


def _outputs(entries: list[LedgerEntry]) -> Iterator[str]:
    for entry in entries:
        for output in entry.entry.outputs or []:
            if not output.startswith(_BY_COLUMN):
                yield output.partition("#")[0]


def is_id_of(transactional_id: str, name: str, others: set[str]) -> bool:
    """Whether a pipeline of this name has such an id: sinks, jobs, sessions (NAME-INSTANCE), relays.

    >>> ids = ("orders/1", "orders-0", "/relay/orders", "orders-old", "o")
    >>> [is_id_of(one, "orders", others={"orders-old"}) for one in ids]
    [True, True, True, False, False]
    """
    if transactional_id in (name, f"/relay/{name}", f"/source/{name}"):
        return True
    return transactional_id.startswith((f"{name}/", f"{name}-")) and transactional_id not in others


def _ids(cluster: Cluster, admin: Admin, name: str, others: set[str]) -> Iterator[IdFacts]:
    listed = [one.transactional_id for one in admin.list_transactions()]
    mine = [one for one in listed if is_id_of(one, name, others)]
    for described in (admin.describe_transactions(mine) if mine else {}).values():
        changes = recent_transitions(cluster, described.transactional_id, limit=200)
        yield IdFacts(
            described.transactional_id,
            described.state,
            described.timeout_ms,
            tuple(open_times(changes, now_ms=int(time.time() * 1000))),
        )


def open_times(changes: list[Transition], now_ms: int) -> Iterator[int]:
    """How long each transaction in the coordinator's log was open; one that still is counts until now."""
    began_ms: int | None = None
    for change in changes:
        if change.state == "Ongoing" and began_ms is None:
            began_ms = change.at_ms
        elif change.state != "Ongoing" and began_ms is not None:
            yield max(0, change.at_ms - began_ms)
            began_ms = None
    if began_ms is not None:
        yield max(0, now_ms - began_ms)


def told(facts: PipelineFacts) -> list[str]:
    """What was found, for people."""
    lines = [f"Pipeline {facts.name}"]
    if facts.last_batch is not None:
        lines.append(f"  last committed: {facts.last_batch}, {show_time(facts.last_commit_ms or 0)}")
    if facts.group is not None:
        lines.append(f"  group: {facts.group} (`semel inspect groups {facts.group}` shows its lag)")
    for one in facts.ids:
        longest = max(one.open_ms, default=None)
        spent = "" if longest is None else f", longest of {len(one.open_ms)} transactions {longest / 1000:.1f} s"
        lines.append(f"  transactional.id: {one.transactional_id}, {one.state}, timeout {one.timeout_ms} ms{spent}")
    if facts.topics:
        lines.append(f"  topics: {', '.join(facts.topics)}")
    return lines
