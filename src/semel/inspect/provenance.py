"""Where a record came from: its transactional id, and the Spark batch that wrote it."""

from __future__ import annotations

from dataclasses import dataclass

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.errors import SemelError
from semel.inspect.ledgers import DEFAULT_LEDGER, LedgerEntry, entry_of_producer, read_ledger
from semel.inspect.transactions import by_producer


@dataclass(frozen=True, slots=True)
class Provenance:
    """What can be told of a producer. `left_out` says in sentences what could not be asked, and why."""

    transactional_id: str | None = None
    spark: LedgerEntry | None = None
    left_out: tuple[str, ...] = ()


def find_provenance(
    cluster: Cluster, producer_id: int, producer_epoch: int, *, ledger: str = DEFAULT_LEDGER
) -> Provenance:
    """The transactional id that has this producer id now, and the ledger's entry of this id and epoch."""
    if producer_id < 0:
        return Provenance()
    left_out: list[str] = []
    transactional_id = spark = None
    try:
        known = by_producer(Admin(cluster), [producer_id])
        transactional_id = known[producer_id].transactional_id if producer_id in known else None
    except SemelError as error:
        left_out.append(f"The transactional id: {error}")
    try:
        if ledger in cluster.list_topics():
            spark = entry_of_producer(read_ledger(cluster, topic=ledger), producer_id, producer_epoch)
    except SemelError as error:
        left_out.append(f"The Spark batch: {error}")
    return Provenance(transactional_id, spark, tuple(left_out))
