"""Reads the topics of a source database and gives out its transactions, each whole and in commit order."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import numpy as np
import pyarrow as pa

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.fetched import READ_SCHEMA, PartitionRecords
from semel.client.fetcher import Fetcher
from semel.client.offsets import list_offsets
from semel.client.partitions import TopicPartition
from semel.client.settings import parse_config
from semel.client.source_transactions import TransactionEnd, transactions_topic
from semel.errors import ConfigError, InvalidState, OffsetOutOfRange, TopicRecreated, TransactionIncomplete
from semel.session.claims import LOG
from semel.session.source_assembler import Assembler, WholeTransactions
from semel.session.source_events import EventStore, TakenEvents
from semel.session.source_headers import SourceEvents, events_of
from semel.session.transaction import Row, rows_of

MEMORY_BYTES_MAX: Final = 64 * 1024 * 1024
_SLICE_MS: Final = 500.0
_LOOK_AT_TOPICS_S: Final = 30.0
"""How often to look whether a topic has more partitions."""
_ENDS_MAX: Final = 50_000
"""How many end records may wait for their events before no more are read."""
_CHECK_LOST_S: Final = 1.0
_TELL_S: Final = 30.0
"""How often the log says what a transaction waits for."""
_TAKEN: Final = {
    "auto.offset.reset": "events that were deleted before they were read are an error, as transactions lack them",
    "isolation.level": "only committed events are read",
    "group.id": "there is no group: one process reads all partitions, and the last one that was started goes on",
}


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What is read, and what it may take."""

    source: str
    """The name of the relay that writes the events."""
    topics: Collection[str]
    transactions_topic: str | None = None
    """Where its end records are, if not in `<source>.transactions`."""
    after: int | None = None
    """The last transaction that the target had before the first start."""
    memory_bytes_max: int = MEMORY_BYTES_MAX
    spill_folder: str | None = None

    @property
    def ends_topic(self) -> str:
        return self.transactions_topic or transactions_topic(self.source)

    @property
    def all_topics(self) -> list[str]:
        return sorted({*self.topics, self.ends_topic})

    def check(self, settings: Mapping[str, object]) -> None:
        if isinstance(self.topics, str) or not self.topics:
            raise ConfigError('topics must be a list of at least one name, such as ["orders"]. Nothing was read.')
        if self.ends_topic in self.topics:
            raise ConfigError(
                f"topics= names {self.ends_topic!r}, which has the ends of transactions and is read anyway: leave it "
                "out. Nothing was read."
            )
        for name in settings:
            reason = _TAKEN.get(name.replace("_", "."))
            if reason is not None:
                raise ConfigError(f"{name}= cannot be set with source transactions: {reason}. Nothing was read.")


@dataclass(frozen=True, slots=True)
class SourceTransaction:
    """One transaction of the source, with all of its events in the topics that are read."""

    end: TransactionEnd
    _taken: TakenEvents
    _begin: int
    count: int
    """How many events of it there are in these topics."""

    @property
    def number(self) -> int:
        """Counted from 1 in commit order; 0 is the snapshot at the beginning."""
        return self.end.transaction

    def tables(self) -> Iterator[pa.Table]:
        """The events in their order, in tables of at most about 32 MB."""
        return self._taken.tables(self._begin, self._begin + self.count)

    @property
    def table(self) -> pa.Table:
        """All events in their order, in memory; columns as in Spark's Kafka connector."""
        tables = list(self.tables())
        return pa.concat_tables(tables) if tables else READ_SCHEMA.empty_table()

    def rows(self) -> Iterator[Row]:
        """The events one by one, in their order."""
        return (row for table in self.tables() for row in rows_of(table))


class SourceTransactions:
    """Some whole transactions that follow each other."""

    def __init__(self, whole: WholeTransactions, taken: TakenEvents) -> None:
        self._taken = taken
        self._whole = whole
        begins = np.searchsorted(taken.transactions, [end.transaction for end in whole.ends])
        self._begins: list[int] = [*begins.tolist(), taken.count]

    @property
    def first(self) -> int:
        return self._whole.first

    @property
    def last(self) -> int:
        return self._whole.last

    @property
    def positions(self) -> Mapping[TopicPartition, int]:
        """How far each partition is done with after them."""
        return self._whole.positions

    @property
    def count(self) -> int:
        """How many events they have."""
        return self._taken.count

    @property
    def is_small(self) -> bool:
        """Whether `tables` is one table."""
        return self._taken.is_small

    def tables(self) -> Iterator[pa.Table]:
        """The events in the order of transactions and of events in them, in tables of at most about 32 MB."""
        return self._taken.tables()

    @property
    def table(self) -> pa.Table:
        return pa.concat_tables(self.tables()) if self.count else next(self._taken.tables())

    def __len__(self) -> int:
        return len(self._whole.ends)

    def __iter__(self) -> Iterator[SourceTransaction]:
        for end, begin, until in zip(self._whole.ends, self._begins[:-1], self._begins[1:], strict=True):
            yield SourceTransaction(end, self._taken, begin, until - begin)


class SourceReader:
    """Blocking, for one thread. The caller keeps where it stands, and calls `begin` with that, also after failures."""

    def __init__(self, settings: Mapping[str, object], options: SourceOptions) -> None:
        options.check(settings)
        self._settings = settings
        self._options = options
        self._fetcher: Fetcher | None = None
        self._cluster: Cluster | None = None
        """With connections of its own: a fetch that waits for records would keep its questions waiting."""
        self._admin: Admin | None = None
        self.topic_ids: dict[TopicPartition, str | None] = {}
        """Every partition that is read, with the id of its topic."""
        self.must_begin = True
        """Whether the topics have changed or a call has failed, so that `begin` must be called."""

    def __enter__(self) -> Self:
        self._fetcher = Fetcher(self._settings)
        try:
            self._cluster = Cluster(parse_config(self._settings).client)
            self._admin = Admin(self._cluster)
            self.topic_ids = self._topics_now()  # raises if one is not there
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        for client in (self._fetcher, self._cluster):
            if client is not None:
                client.close()
        self._fetcher = self._cluster = self._admin = None

    @property
    def _ends(self) -> TopicPartition:
        return TopicPartition(self._options.ends_topic, 0)

    # -- where to begin ----------------------------------------------------------------------------------------------

    def begin(self, stored: Mapping[TopicPartition, tuple[int, str | None]], applied: int | None) -> None:
        """Read from these positions on, which have the topics' ids, after the transaction that was applied last.

        Partitions without a position, and those of topics that were created again, are read from their beginning: what
        was applied is passed over, and what is missing is noticed.
        """
        fetcher = self._reading()
        self.topic_ids = self._topics_now()
        self._store = EventStore(self._options.memory_bytes_max, self._options.spill_folder)
        self._applied = applied if applied is not None else self._options.after
        self._assembler = Assembler(self._options.source, self._options.topics, applied=self._applied)
        positions: dict[TopicPartition, int] = {}
        for place, topic_id in self.topic_ids.items():
            offset, stored_id = stored.get(place, (None, None))
            if offset is not None and None not in (topic_id, stored_id) and topic_id != stored_id:
                LOG.warning("Topic %r was deleted and created again: it is read from its beginning.", place.topic)
                offset = None
            if offset is not None:
                positions[place] = offset
        missing = self.topic_ids.keys() - positions.keys()
        positions |= fetcher.offsets_for(missing, "earliest") if missing else {}
        for place, offset in positions.items():
            if place == self._ends:
                self._assembler.begin_ends(place, offset, has_applied=applied is None)
            else:
                self._assembler.add_partition(place, offset)
        self._read_to = dict(positions)
        fetcher.assign(positions)
        self._forget_check()
        self._last_progress = time.monotonic()
        self.must_begin = False

    def _topics_now(self) -> dict[TopicPartition, str | None]:
        self._looked_at = time.monotonic()
        assert self._admin is not None
        found = self._admin.describe_topics(*self._options.all_topics)
        count = len(found[self._ends.topic].partitions)
        if count != 1:
            raise ConfigError(
                f"Topic {self._ends.topic!r} has {count} partitions. It holds the ends of transactions in their order, "
                "so it must have one. Nothing was read. Create it with one partition before the relay first runs."
            )
        return {
            TopicPartition(name, one.partition): None if topic.topic_id is None else str(topic.topic_id)
            for name, topic in found.items()
            for one in topic.partitions
        }

    def _look_at_topics(self) -> bool:
        """Whether they have changed."""
        if self._topics_now() != self.topic_ids:
            self.must_begin = True
        return self.must_begin

    # -- reading -----------------------------------------------------------------------------------------------------

    def next(self, timeout_ms: float, events_max: int) -> SourceTransactions | None:
        """The next whole transactions; None if none became whole in time, or if `must_begin` is set.

        As many as have `events_max` events together, and one at least.
        """
        fetcher = self._reading()
        if self.must_begin:
            raise InvalidState("The topics have changed, or the last call has failed: begin() again.")
        try:
            return self._next(fetcher, timeout_ms, events_max)
        except BaseException:
            self.must_begin = True  # what was read and not given out would be skipped
            raise

    def _next(self, fetcher: Fetcher, timeout_ms: float, events_max: int) -> SourceTransactions | None:
        deadline = time.monotonic() + timeout_ms / 1000
        while True:
            if self._assembler.has_whole:
                return self._take(events_max)
            if time.monotonic() - self._looked_at >= _LOOK_AT_TOPICS_S and self._look_at_topics():
                return None
            remaining_ms = (deadline - time.monotonic()) * 1000
            if remaining_ms <= 0:
                return None
            self._choose_partitions(fetcher)
            try:
                fetched = fetcher.fetch(min(remaining_ms, _SLICE_MS))
            except OffsetOutOfRange as error:
                if not isinstance(error, TopicRecreated) and not self._look_at_topics():
                    raise self._deleted(error) from error
                self.must_begin = True
                return None
            if fetched and self._look_at_topics():
                return None  # the records may be of another topic than the positions
            for records in fetched:
                self._add(records)
            if not self._assembler.has_whole and self._check_lost():
                return None

    def _add(self, records: PartitionRecords) -> None:
        place = TopicPartition(records.topic, records.partition)
        self._read_to[place] = records.next_offset
        if place == self._ends:
            self._assembler.add_ends(self._ends_in(records), records.next_offset)
            return
        events = events_of(records.table, self._options.source, f"{place.topic}-{place.partition}")
        self._assembler.add_events(place, events.runs(), records.next_offset)
        if self._applied is not None and not (is_new := events.transactions > self._applied).all():
            events = SourceEvents(
                events.table.filter(pa.array(is_new)),
                *(numbers[is_new] for numbers in (events.offsets, events.transactions, events.indexes)),
            )
        self._store.add(place, events)

    def _ends_in(self, records: PartitionRecords) -> list[tuple[int, TransactionEnd]]:
        found: list[tuple[int, TransactionEnd]] = []
        for offset, value in zip(
            records.table.column("offset").to_pylist(), records.table.column("value").to_pylist(), strict=True
        ):
            try:
                found.append((offset, TransactionEnd.decode(value)))
            except (ValueError, TypeError, AttributeError) as error:
                if isinstance(error, ConfigError):
                    raise
                raise TransactionIncomplete(
                    f"{self._ends.topic}-0 at offset {offset} is no end record of a transaction: {error}. Nothing "
                    "after it was applied. Let only relays write to this topic."
                ) from error
        return found

    def _take(self, events_max: int) -> SourceTransactions:
        whole = self._assembler.take(events_max)
        assert whole is not None
        self._forget_check()
        self._last_progress = time.monotonic()
        return SourceTransactions(whole, self._store.take(whole.positions))

    def _choose_partitions(self, fetcher: Fetcher) -> None:
        """With enough in memory, read on only where the next transaction may be."""
        chosen = set(self._read_to)
        if self._store.is_full:
            chosen = self._assembler.wanted()
        elif self._assembler.ends_waiting > _ENDS_MAX:
            chosen -= {self._ends}
        if fetcher.positions.keys() != chosen:
            fetcher.assign({place: self._read_to[place] for place in chosen})

    def is_at_end(self) -> bool:
        """Whether everything that the topics have now was read."""
        if self.must_begin or self._assembler.has_whole:
            return False
        ends = self._reading().offsets_for(self._read_to, "latest")
        return all(self._read_to[place] >= end for place, end in ends.items())

    def waits_for(self) -> str | None:
        """What was read of a transaction that is not whole, in words; None if there is none."""
        lacking = self._assembler.lacking()
        if lacking is not None:
            end, lacks = lacking
            parts = ", ".join(f"{count} of {end.topics[topic]} events in {topic!r}" for topic, count in lacks.items())
            return f"transaction {end.transaction} of source {self._options.source!r}: it lacks {parts}"
        started = self._assembler.started()
        if started:
            return f"transaction {started[0]} of source {self._options.source!r}: it lacks its end record"
        return None

    # -- what can never come -----------------------------------------------------------------------------------------

    def _forget_check(self) -> None:
        self._high_watermarks: dict[TopicPartition, int] | None = None
        self._checked_at = time.monotonic()

    def _check_lost(self) -> bool:
        """Raises if the next transaction can never be whole. True if the topics have changed."""
        now = time.monotonic()
        if now - self._checked_at < _CHECK_LOST_S:
            return False
        self._checked_at = now
        if now - self._last_progress >= _TELL_S and (what := self.waits_for()) is not None:
            self._last_progress = now
            LOG.warning("Nothing was applied for %.0f s. The next is %s.", _TELL_S, what)
        lacking = self._assembler.lacking()
        if lacking is None:
            return False
        end, lacks = lacking
        if self._high_watermarks is None:
            assert self._cluster is not None
            # Asked after the end record was read, and its events were written before it. Not the last stable offset:
            # the markers of the transaction may not have got to every partition yet.
            questions = {place: "latest" for place in self._read_to if place.topic in lacks}
            answers = list_offsets(self._cluster, questions, "read_uncommitted")  # pyright: ignore[reportArgumentType]
            self._high_watermarks = {place: listed.offset for place, listed in answers.items()}
        lost = [topic for topic in lacks if self._assembler.has_passed(topic, self._high_watermarks)]
        if not lost:
            return False
        if self._look_at_topics():
            return True
        raise self._lost(end, lost[0], lacks[lost[0]])

    def _lost(self, end: TransactionEnd, topic: str, count: int) -> TransactionIncomplete:
        return TransactionIncomplete(
            f"Transaction {end.transaction} of source {self._options.source!r} can never be whole: it lacks {count} of "
            f"its {end.topics[topic]} events in topic {topic!r}, and every partition was read beyond them. They were "
            "deleted before they were read (by retention, compaction, or with the topic). Nothing of the transaction "
            f"was applied, and everything up to {end.transaction - 1} was. {_START_OVER}"
        )

    def _deleted(self, error: OffsetOutOfRange) -> TransactionIncomplete:
        return TransactionIncomplete(
            f"Events of source {self._options.source!r} were deleted before they were read, so a transaction can never "
            f"be whole: {error} Nothing of it was applied. {_START_OVER}"
        )

    def _reading(self) -> Fetcher:
        if self._fetcher is None:
            raise InvalidState("The reader is not open: use it in a `with` block.")
        return self._fetcher


_START_OVER: Final = (
    "Fill the tables from the source up to some transaction, and start under another name= with after= that number; or "
    "let the relay begin again with a snapshot. Then let the topics keep events for longer than the reader may stand "
    "still."
)
