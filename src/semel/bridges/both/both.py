"""`semel.both`: a database transaction and a Kafka transaction that commit together; and recovery by hand."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from semel.bridges.both.block_records import BlockRecords
from semel.bridges.both.course import Lost, block, finish_by_hand, recover
from semel.bridges.both.decision import StoredBatch
from semel.bridges.both.kafka_side import ClusterInquiry, ProducerSide
from semel.bridges.both.recovery import Step
from semel.bridges.both.sqlite_store import SqliteStore
from semel.bridges.both.store import Store
from semel.client.cluster import Cluster
from semel.client.producer import Producer
from semel.client.rows import Headers
from semel.client.settings import merge_settings, parse_config
from semel.errors import CommitPending, ConfigError, InvalidState, SemelError
from semel.metrics.parts import BOTH
from semel.observe import Pipeline, Work

if TYPE_CHECKING:
    import psycopg

    Connection = sqlite3.Connection | psycopg.Connection[Any]


class Both:
    """What a block sends to Kafka. It belongs to the thread that opened the block."""

    def __init__(self, records: BlockRecords) -> None:
        self._records = records
        self._thread = threading.get_ident()
        self._is_open = True

    def send(
        self,
        topic: str,
        value: bytes | str | None,
        *,
        key: bytes | str | None = None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> None:
        """Take one record, as `Producer.send` does."""
        self.check_use()
        self._records.add(topic, value, key, headers, partition, timestamp_ms)

    def send_table(self, topic: str | None, table: pa.Table, *, partition: int | None = None) -> None:
        """Take the records of a table, as `Producer.send_table` does."""
        self.check_use()
        self._records.add_table(topic, table, partition)

    def check_use(self) -> None:
        if not self._is_open:
            raise InvalidState("This block of semel.both is over; the record was not taken. Send inside of the block.")
        if threading.get_ident() != self._thread:
            raise InvalidState(
                "A block of semel.both belongs to the thread that opened it; nothing was done. Compute in others "
                "if you like, and send in that one; or give each thread its own connection and producer."
            )

    def close(self) -> None:
        self._is_open = False


@contextmanager
def both(connection: Connection, producer: Producer, *, create_tables: bool = False) -> Iterator[Both]:
    """A transaction of the database and one of Kafka, which commit together or not at all.

    `connection` is yours (sqlite3, or psycopg 3) and has no transaction open; what you execute on it in the block is
    part of it. Records go through the block's `send`. Leaving the block by an exception undoes both.

    Raises `CommitPending` if the database has committed and Kafka could not be reached to confirm: it will, and the
    block must not be run again. `CommitUnknown` says that it cannot be told whether the database has committed. After
    every other error neither has. docs/both.md has the details.

    >>> with both(connection, producer) as t:  # doctest: +SKIP
    ...     connection.execute("INSERT INTO orders VALUES (1, 'tea')")
    ...     t.send("orders", '{"item": "tea"}', key="1")
    """
    store = open_store(connection)
    kafka = ProducerSide(producer)
    records = BlockRecords(producer.cluster, producer.config)
    with kafka.turn(), _watched(kafka.name) as work:
        t = Both(records)
        taken: Sequence[StoredBatch] = ()

        def take() -> Sequence[StoredBatch]:
            nonlocal taken
            t.check_use()
            taken = records.take()
            return taken

        try:
            with block(store, kafka, take, create_tables=create_tables):
                yield t
        finally:
            t.close()
        work.committed(sum(one.record_count for one in taken))


@contextmanager
def _watched(name: str) -> Iterator[Work]:
    """A block as metrics, log and trace see it."""
    pipeline = Pipeline(BOTH, name)
    with pipeline.begin(transactional_id=name) as work:
        try:
            yield work
        except SemelError as error:
            pipeline.failed(error)
            if isinstance(error, CommitPending):
                work.pending(error)
            raise


def open_store(connection: Any) -> Store:
    """The store behind a connection, or what is wrong with it."""
    if isinstance(connection, sqlite3.Connection):
        return SqliteStore(connection)
    kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(connection).__mro__}
    if "psycopg.Connection" in kinds:
        from semel.bridges.both.postgres_store import PostgresStore

        return PostgresStore(connection)
    if "psycopg.AsyncConnection" in kinds:
        raise ConfigError(
            "semel.both takes no AsyncConnection, since its steps wait for each other; nothing was written. Open a "
            "psycopg.Connection and run the block in a thread: await asyncio.to_thread(...)."
        )
    raise ConfigError(
        f"semel.both cannot use a {type(connection).__qualname__}; nothing was written. Give it a connection of "
        "sqlite3 or psycopg 3."
    )


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a recovery has done for a name: how its last decided transaction got into Kafka."""

    name: str
    outcome: Literal["committed", "sent again"]
    """`committed`: as it was, or it had been before. `sent again`: Kafka had aborted it."""


def recover_both(
    connection: Connection,
    settings: Mapping[str, object] | None = None,
    *,
    name: str | None = None,
    lost: Lost | None = None,
    **more_settings: object,
) -> list[Recovered]:
    """Finish what programs left behind that died between the commit of the database and that of Kafka.

    Not needed where `semel.both` runs again with the same `transactional.id`, since it begins with the same. `name` is
    that id; without it, all names with something to finish. Settings are those of a producer. A program that is still
    running is disturbed only if its records must be sent again: then it is fenced.

    `lost` is your answer where Kafka cannot tell any more how a transaction ended.

    >>> recover_both(connection, bootstrap_servers=bootstrap)  # doctest: +SKIP
    [Recovered(name='shop-1', outcome='committed')]
    """
    if lost not in (None, "committed", "aborted"):
        raise ConfigError(f'lost={lost!r} is not known: write "committed" or "aborted", or leave it out.')
    store = open_store(connection)
    store.check()
    store.make_tables(create=False)
    given = merge_settings(settings, more_settings)
    done: list[Recovered] = []
    for found in store.unfinished():
        if name in (None, found):
            done += _recover_name(store, given, found, lost)
    return done


def _recover_name(store: Store, settings: Mapping[str, object], name: str, lost: Lost | None) -> list[Recovered]:
    config = parse_config({**settings, "transactional.id": name})
    with Cluster(config.client) as cluster:
        step = finish_by_hand(store, ClusterInquiry(cluster, name, config.producer.transaction_timeout_ms), name, lost)
    if step is None:  # its own program was quicker
        return []
    if step is Step.DELETE:
        return [Recovered(name, "committed")]
    with Producer({**settings, "transactional.id": name}) as producer:
        kafka = ProducerSide(producer)
        with kafka.turn():
            recover(store, kafka, lost)
    return [Recovered(name, "committed" if step is Step.TAKE_OVER else "sent again")]
