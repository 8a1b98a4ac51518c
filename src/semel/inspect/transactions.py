"""Transactions as coordinators know them, those that are open in partitions, and how to end one that hangs."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from semel.client.admin import Admin, TransactionDescription
from semel.client.admin_transactions import ListedTransaction
from semel.client.cluster import TRANSPORT_ERRORS, Cluster, CoordinatorKind
from semel.client.offsets import edge_offsets
from semel.client.partitions import TopicPartition
from semel.errors import InvalidState, KafkaError, NotAuthorized
from semel.inspect.hanging import ENDED_STATES, OpenTransaction, judge
from semel.inspect.log import fetch
from semel.records import iter_batches
from semel.wire import ErrorCode


@dataclass(frozen=True, slots=True)
class KnownTransaction:
    """A transactional id with its coordinator."""

    description: TransactionDescription
    coordinator: int
    age_ms: int | None
    """How long its transaction has been open; None if none is."""


@dataclass(frozen=True, slots=True)
class HeldPartition:
    """A partition that readers of committed records cannot read to its end, and what holds them back."""

    topic: str
    partition: int
    last_stable_offset: int
    high_watermark: int
    holder: OpenTransaction | None
    """The transaction that is open at the last stable offset; None if this user may not see it."""
    since_ms: int | None = None
    """The time of the first record of that transaction, as its producer or broker has written it."""
    trouble: str | None = None
    """Why there is no holder."""


def known_transactions(
    cluster: Cluster,
    *,
    states: Iterable[str] = (),
    transactional_ids: Collection[str] = (),
    clock: Callable[[], float] = time.time,
) -> list[KnownTransaction]:
    """Those of these ids, or all that coordinators list (in one of `states`)."""
    admin = Admin(cluster)
    nodes: dict[str, int | None] = {}
    if transactional_ids:
        described = admin.describe_transactions(transactional_ids)
    else:
        listed = admin.list_transactions(states=states)
        described = _describe_listed(admin, listed)
        nodes = {one.transactional_id: one.coordinator for one in listed}
    found: list[KnownTransaction] = []
    for one in described.values():
        age_ms = None
        if one.start_time_ms is not None and one.state not in ENDED_STATES:
            age_ms = max(0, int(clock() * 1000) - one.start_time_ms)
        node = nodes.get(one.transactional_id)
        if node is None:
            node = cluster.coordinator(CoordinatorKind.TRANSACTION, one.transactional_id)
        found.append(KnownTransaction(one, node, age_ms))
    return found


def _describe_listed(admin: Admin, listed: Sequence[ListedTransaction]) -> dict[str, TransactionDescription]:
    """Many at once, and one by one where that does not tell. One that was listed may expire before it is described."""
    try:
        found = admin.describe_listed(listed)
    except TRANSPORT_ERRORS:
        found = {}
    for one in listed:
        if one.transactional_id not in found:
            try:
                found |= admin.describe_transactions(one.transactional_id)
            except KafkaError as error:
                if error.code != ErrorCode.transactional_id_not_found:
                    raise
    return found


def open_transactions(cluster: Cluster, partitions: Iterable[tuple[str, int]]) -> list[OpenTransaction]:
    """What is open in these partitions, each judged by its coordinator: alive, hanging, or not to be told."""
    named = [TopicPartition(*one) for one in partitions]
    before = Admin(cluster).describe_all_producers(named)
    candidates = {
        (place, producer.producer_id): producer
        for place, producers in before.items()
        for producer in producers
        if producer.transaction_start_offset is not None
    }
    if not candidates:
        return []
    known = by_producer(Admin(cluster), {producer_id for _, producer_id in candidates})
    after = Admin(cluster).describe_all_producers(sorted({place for place, _ in candidates}))
    judged = [
        judge(place, producer, known, {one.producer_id: one for one in after[place]})
        for (place, _), producer in candidates.items()
    ]
    return sorted((one for one in judged if one is not None), key=lambda one: (*one.named, one.start_offset))


def by_producer(admin: Admin, producer_ids: Collection[int]) -> Mapping[int, TransactionDescription]:
    """What coordinators say of these producer ids, as far as this user may see it."""
    listed = admin.list_transactions(producer_ids=sorted(producer_ids))
    described = _describe_listed(admin, listed)
    # The list is older than the description: a producer id that has been replaced since is told by the list alone.
    ids = {one.transactional_id: one.producer_id for one in listed}
    return {ids[name]: one for name, one in described.items() if one.producer_id == ids[name]}


def held_partitions(cluster: Cluster, topics: Collection[str] = ()) -> list[HeldPartition]:
    """The partitions whose last stable offset is behind their end, of these topics or of all."""
    listed = cluster.list_topics()
    chosen = topics or listed
    partitions = [TopicPartition(topic, number) for topic in chosen for number in cluster.leaders(topic)]
    led = [one for one in partitions if cluster.leader(*one).node >= 0]
    # The stable ends first: an end that is asked for later cannot lie before them.
    stable = edge_offsets(cluster, led, "latest", "read_committed")
    ends = edge_offsets(cluster, led, "latest", "read_uncommitted")
    by_topic: dict[str, list[TopicPartition]] = {}
    for one in led:
        if stable[one] < ends[one]:
            by_topic.setdefault(one.topic, []).append(one)
    found: list[HeldPartition] = []
    for held in by_topic.values():
        try:
            holders = {(one.named, one.start_offset): one for one in open_transactions(cluster, held)}
        except NotAuthorized as error:  # of one topic; the others are told all the same
            found += [HeldPartition(*one, stable[one], ends[one], None, trouble=str(error)) for one in held]
            continue
        for one in held:
            # Without a holder the partition was only being written to while its two ends were asked for.
            if (holder := holders.get((one, stable[one]))) is not None:
                since_ms = _time_at(cluster, one, stable[one])
                found.append(HeldPartition(*one, stable[one], ends[one], holder, since_ms))
    return found


def _time_at(cluster: Cluster, named: TopicPartition, offset: int) -> int | None:
    answer = fetch(cluster, named, offset, "read_uncommitted", bytes_max=1)
    at_ms = next((header.base_timestamp for header, _ in iter_batches(answer.records)), -1)
    return None if at_ms < 0 else at_ms


class NotHanging(InvalidState):
    """The transaction is not known to hang, so it was left alone."""


def find_open(cluster: Cluster, topic: str, partition: int, producer_id: int) -> OpenTransaction:
    """The transaction of this producer that is open in this partition; `InvalidState` if there is none."""
    for one in open_transactions(cluster, [(topic, partition)]):
        if one.producer.producer_id == producer_id:
            return one
    raise InvalidState(
        f"Producer {producer_id} has no open transaction in topic {topic!r} partition {partition}; nothing was changed."
    )


def end_hanging(
    cluster: Cluster, topic: str, partition: int, producer_id: int, *, start_offset: int, force: bool = False
) -> OpenTransaction:
    """Write the abort marker that no coordinator will write; returns what was ended. Looks again right before.

    `start_offset` says which transaction is meant, so that a later one of the same producer is never ended.
    """
    found = find_open(cluster, topic, partition, producer_id)
    if found.start_offset != start_offset:
        raise NotHanging(
            f"The open transaction of producer {producer_id} in topic {topic!r} partition {partition} begins at offset "
            f"{found.start_offset} and not at {start_offset}: it is not the one that was meant. Nothing was changed."
        )
    if found.standing != "hanging" and not force:
        raise NotHanging(_refusal(found))
    producer = found.producer
    Admin(cluster).abort_transaction(
        topic,
        partition,
        producer_id=producer_id,
        producer_epoch=producer.producer_epoch,
        coordinator_epoch=max(producer.coordinator_epoch, 0),
    )
    return found


def _refusal(found: OpenTransaction) -> str:
    where = f"topic {found.topic!r} partition {found.partition}"
    if found.standing == "unknown":
        return (
            f"It cannot be told whether the transaction in {where} hangs: {found.explanation} Nothing was changed. "
            "Look as a user who may DESCRIBE all transactional ids. If its producer is certainly gone, end it by force "
            "(--force)."
        )
    return (
        f"The transaction in {where} does not hang. {found.explanation} Nothing was changed. To abort it here alone "
        "could leave half of it committed elsewhere. Stop its producer and wait, or start it again: that aborts it "
        "everywhere."
    )
