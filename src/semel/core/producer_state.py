"""What one partition remembers of each producer: epoch, last five batches, open transaction; repeats and gaps are told.

The rules are those of Kafka's `ProducerAppendInfo`. A producer that is not known may begin with any sequence, since its
state may have been expired or deleted together with its records.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from kio.schema.errors import ErrorCode

from semel.core.producer_budget import Idle, ProducerBudget
from semel.core.refusal import Refused
from semel.records.control import ControlMarker
from semel.records.layout import SEQUENCE_MAX, BatchHeader

NO_PRODUCER_ID = -1
NO_EPOCH = -1
NO_SEQUENCE = -1
NO_TIMESTAMP = -1
BATCHES_REMEMBERED = 5
PRODUCERS_MAX = 100_000
# What CPython spends, measured: the entry with its dictionary slot and numbers, and one remembered batch.
ENTRY_BYTES = 270
BATCH_BYTES = 195


class ProducerBatch(NamedTuple):
    """One accepted batch of a producer. A tuple, because a broker may hold hundreds of thousands."""

    last_sequence: int
    last_offset: int
    offset_delta: int
    timestamp_ms: int

    @property
    def first_offset(self) -> int:
        return self.last_offset - self.offset_delta


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The batch is a repeat: nothing is to be stored, and the answer is that of the first time."""

    base_offset: int
    last_offset: int
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class CompletedTransaction:
    """A transaction that its marker, at `last_offset`, has just ended in this partition."""

    producer_id: int
    first_offset: int
    last_offset: int
    is_aborted: bool


@dataclass(frozen=True, slots=True)
class LastRecord:
    """Where compaction finds what a producer's state is rebuilt from; see `ProducerStates.last_records`."""

    last_data_offset: int | None
    producer_epoch: int


@dataclass(slots=True)
class ProducerEntry:
    """The state of one producer id in one partition. Only `ProducerStates.replay_*` changes it.

    `last_seen_ms` is the broker's own clock at the last append, kept in memory only; `last_timestamp_ms` comes from the
    records and goes into the snapshot.
    """

    producer_id: int
    producer_epoch: int = NO_EPOCH
    coordinator_epoch: int = -1
    last_timestamp_ms: int = NO_TIMESTAMP
    transaction_first_offset: int | None = None
    batches: tuple[ProducerBatch, ...] = ()
    last_seen_ms: int = NO_TIMESTAMP

    @property
    def last_sequence(self) -> int:
        return self.batches[-1].last_sequence if self.batches else NO_SEQUENCE

    @property
    def last_data_offset(self) -> int | None:
        return self.batches[-1].last_offset if self.batches else None

    def find_duplicate(self, header: BatchHeader) -> ProducerBatch | None:
        if header.producer_epoch != self.producer_epoch:
            return None
        last_sequence, offset_delta = header.last_sequence, header.last_offset_delta
        for batch in self.batches:
            if batch.last_sequence == last_sequence and batch.offset_delta == offset_delta:
                return batch
        return None

    def move_to_epoch(self, producer_epoch: int) -> None:
        """Sequences start again at 0 in a new epoch, so what is known of the old one's batches is void."""
        if producer_epoch != self.producer_epoch:
            self.producer_epoch = producer_epoch
            self.batches = ()


class ProducerStates:
    """All producers of one partition, least recently used first.

    Beyond `producers_max` the least recently used ones without an open transaction are forgotten; `evicted_count` tells
    how many. A forgotten producer can go on writing, but a repeat of its is no longer recognised.

    >>> from semel.records.layout import read_header
    >>> from semel.records.reference import Record, encode_batch
    >>> states = ProducerStates()
    >>> header = read_header(encode_batch([Record(0, 1000, None, b"a", ())], producer_id=7, producer_epoch=0,
    ...                                   base_sequence=0))
    >>> states.decide_batch(header, now_ms=1000) is None
    True
    >>> states.replay_batch(header)
    >>> states.decide_batch(header, now_ms=1000)
    Duplicate(base_offset=0, last_offset=0, timestamp_ms=1000)
    """

    def __init__(self, *, producers_max: int = PRODUCERS_MAX, budget: ProducerBudget | None = None) -> None:
        """`budget` is shared with other partitions."""
        self.producers_max = producers_max
        self.evicted_count = 0
        self._budget = budget
        self._bytes = 0
        self._entries: OrderedDict[int, ProducerEntry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[ProducerEntry]:
        """Copies of the entries, least recently used first."""
        return (replace(entry) for entry in self._entries.values())

    def get(self, producer_id: int) -> ProducerEntry | None:
        """A copy of what is known of a producer."""
        entry = self._entries.get(producer_id)
        return None if entry is None else replace(entry)

    def transaction_first_offset(self, producer_id: int) -> int | None:
        entry = self._entries.get(producer_id)
        return None if entry is None else entry.transaction_first_offset

    def decide_batch(
        self, header: BatchHeader, *, now_ms: int, from_client: bool = True, protocol_2: bool = False
    ) -> Duplicate | None:
        """Whether a data batch may be appended (None), is a repeat, or is refused.

        Batches of the group coordinator (`from_client=False`) carry no sequence, so only their epoch is checked.
        `protocol_2` tells that the request came from a client of transaction protocol 2.
        """
        if header.producer_id == NO_PRODUCER_ID:
            return None
        entry = self._entries.get(header.producer_id)
        if entry is None:
            entry = ProducerEntry(header.producer_id)
            if from_client and self._budget is not None and self._budget.is_full:
                raise Refused(
                    ErrorCode.policy_violation,
                    f"producer {header.producer_id} is new here, and what the broker remembers of producers with open "
                    f"transactions takes all of its share of the memory ({self._budget.bytes_max:,} bytes). Nothing "
                    "was stored. End transactions, or raise semel.client.memory.max.bytes.",
                )
        if from_client:
            known = entry.find_duplicate(header)
            if known is not None:
                return Duplicate(known.first_offset, known.last_offset, known.timestamp_ms)
        _check_producer_epoch(entry, header.producer_epoch)
        if from_client:
            _check_sequence(entry, header, protocol_2=protocol_2)
        if entry.transaction_first_offset is not None and not header.is_transactional:
            raise Refused(
                ErrorCode.invalid_txn_state,
                f"producer {header.producer_id} has a transaction open here since offset "
                f"{entry.transaction_first_offset} and sent a batch outside of it",
            )
        return None

    def decide_marker(
        self, producer_id: int, producer_epoch: int, coordinator_epoch: int, *, protocol_2: bool = False
    ) -> None:
        """Refuse a marker of a fenced producer epoch or of a fenced coordinator.

        Under protocol 2 the marker's epoch is above that of the records (KIP-890): one with the records' own epoch is a
        late marker of the transaction before and would end the wrong one. A repeat of the marker that ended the last
        transaction does no harm and passes, as after a coordinator's restart.
        """
        entry = self._entries.get(producer_id)
        if entry is None:
            return
        _check_producer_epoch(entry, producer_epoch)
        if protocol_2 and producer_epoch == entry.producer_epoch and entry.transaction_first_offset is not None:
            raise Refused(
                ErrorCode.invalid_producer_epoch,
                f"the marker for producer {producer_id} has epoch {producer_epoch}, as the open transaction's records "
                "do: it belongs to an earlier transaction",
            )
        if coordinator_epoch < entry.coordinator_epoch:
            raise Refused(
                ErrorCode.transaction_coordinator_fenced,
                f"the marker for producer {producer_id} comes from coordinator epoch {coordinator_epoch}, and "
                f"{entry.coordinator_epoch} has written since",
            )

    def replay_batch(self, header: BatchHeader, *, now_ms: int | None = None) -> None:
        """Take up a stored data batch; `header` has its final offsets and timestamps."""
        if header.producer_id == NO_PRODUCER_ID:
            return
        entry = self._touch(header.producer_id, now_ms)
        self._move_to_epoch(entry, header.producer_epoch)
        batch = ProducerBatch(header.last_sequence, header.last_offset, header.last_offset_delta, header.max_timestamp)
        batches = len(entry.batches)
        entry.batches = (*entry.batches[1 - BATCHES_REMEMBERED :], batch)
        entry.last_timestamp_ms = header.max_timestamp
        if header.is_transactional and entry.transaction_first_offset is None:
            entry.transaction_first_offset = header.base_offset
        if batches < BATCHES_REMEMBERED:
            self._note(BATCH_BYTES)
        self._evict()

    def replay_marker(
        self, marker: ControlMarker, offset: int, timestamp_ms: int, *, now_ms: int | None = None
    ) -> CompletedTransaction | None:
        """Take up a stored marker; returns the transaction it ended, if that had records here."""
        entry = self._touch(marker.producer_id, now_ms)
        self._move_to_epoch(entry, marker.producer_epoch)
        entry.coordinator_epoch = marker.coordinator_epoch
        entry.last_timestamp_ms = timestamp_ms
        first_offset = entry.transaction_first_offset
        entry.transaction_first_offset = None
        self._evict()
        if first_offset is None:
            return None
        return CompletedTransaction(marker.producer_id, first_offset, offset, marker.kind == "abort")

    def replay_emptied_marker(self, header: BatchHeader, *, now_ms: int | None = None) -> None:
        """Take up a control batch whose marker compaction removed: its epoch still fences older producers."""
        if header.producer_id == NO_PRODUCER_ID:
            return
        entry = self._touch(header.producer_id, now_ms)
        entry.last_timestamp_ms = max(entry.last_timestamp_ms, header.max_timestamp)
        if header.producer_epoch > entry.producer_epoch:
            self._move_to_epoch(entry, header.producer_epoch)
        self._evict()

    def replay_entries(self, entries: Iterable[ProducerEntry], *, now_ms: int | None = None) -> None:
        """Start from the entries of a snapshot in place of what is known, least recently used first."""
        self._entries = OrderedDict((entry.producer_id, replace(entry)) for entry in entries)
        self._note(sum(map(_bytes_of, self._entries.values())) - self._bytes)
        if now_ms is not None:
            for entry in self._entries.values():
                entry.last_seen_ms = now_ms
        self._evict()

    def expired(self, now_ms: int, expiration_ms: int) -> tuple[int, ...]:
        """Ids of producers without an open transaction that have been idle for `expiration_ms` or longer.

        A producer that sends old event times is not idle: the broker's own clock counts where it is known.
        """
        return tuple(
            entry.producer_id
            for entry in self._entries.values()
            if entry.transaction_first_offset is None
            and now_ms - max(entry.last_timestamp_ms, entry.last_seen_ms) >= expiration_ms
        )

    def replay_expiry(self, producer_ids: Iterable[int]) -> None:
        for producer_id in producer_ids:
            self.forget(producer_id)

    def idle(self) -> Iterator[Idle]:
        """Producers without an open transaction, the longest unused first."""
        return (
            (entry.last_seen_ms, entry.producer_id, _bytes_of(entry))
            for entry in self._entries.values()
            if entry.transaction_first_offset is None
        )

    def forget(self, producer_id: int) -> None:
        """Remember nothing more of a producer."""
        entry = self._entries.pop(producer_id, None)
        if entry is not None:
            self._note(-_bytes_of(entry))

    def leave_budget(self) -> None:
        """The partition is closed: what is remembered here no longer counts."""
        if self._budget is not None:
            self._budget.leave(self, self._bytes)
            self._budget = None

    def last_records(self) -> Mapping[int, LastRecord]:
        """Per producer, the batch that compaction must keep so that recovery finds sequence and epoch again."""
        return {
            entry.producer_id: LastRecord(entry.last_data_offset, entry.producer_epoch)
            for entry in self._entries.values()
        }

    def memory_bytes(self) -> int:
        """About what the states cost in memory."""
        return self._bytes

    def _note(self, changed_bytes: int) -> None:
        self._bytes += changed_bytes
        if self._budget is not None:
            self._budget.add(changed_bytes)

    def _touch(self, producer_id: int, now_ms: int | None) -> ProducerEntry:
        """The producer's entry, now the most recently used one."""
        entry = self._entries.get(producer_id)
        if entry is None:
            entry = self._entries[producer_id] = ProducerEntry(producer_id)
            self._note(ENTRY_BYTES)
        else:
            self._entries.move_to_end(producer_id)
        if now_ms is not None:
            entry.last_seen_ms = now_ms
        return entry

    def _move_to_epoch(self, entry: ProducerEntry, producer_epoch: int) -> None:
        batches = len(entry.batches)
        entry.move_to_epoch(producer_epoch)
        self._note(BATCH_BYTES * (len(entry.batches) - batches))

    def _evict(self) -> None:
        """Forget the least recently used beyond the cap, but never the one in use now."""
        while len(self._entries) > self.producers_max:
            newest = next(reversed(self._entries))
            idle = (entry.producer_id for entry in self._entries.values() if entry.transaction_first_offset is None)
            producer_id = next(idle, newest)
            if producer_id == newest:
                break
            self.forget(producer_id)
            self.evicted_count += 1
        if self._budget is not None:
            self._budget.settle(self)


def _bytes_of(entry: ProducerEntry) -> int:
    return ENTRY_BYTES + BATCH_BYTES * len(entry.batches)


def _check_producer_epoch(entry: ProducerEntry, producer_epoch: int) -> None:
    # INVALID_PRODUCER_EPOCH, not PRODUCER_FENCED: the client may abort and go on with a new epoch (KIP-588).
    if producer_epoch < entry.producer_epoch:
        raise Refused(
            ErrorCode.invalid_producer_epoch,
            f"producer {entry.producer_id} has epoch {producer_epoch}, and epoch {entry.producer_epoch} has written "
            "since: another instance has taken over",
        )


def _check_sequence(entry: ProducerEntry, header: BatchHeader, *, protocol_2: bool) -> None:
    sequence = header.base_sequence
    starts_transaction = header.is_transactional and entry.transaction_first_offset is None
    if protocol_2 and starts_transaction and not entry.batches and sequence != 0:
        # KIP-890: such a producer begins each epoch at 0, so an earlier batch of this transaction is missing.
        raise _out_of_order(entry, header, expected=0)
    if header.producer_epoch != entry.producer_epoch:
        if entry.producer_epoch != NO_EPOCH and sequence != 0:
            raise _out_of_order(entry, header, expected=0)
        return
    expected = 0 if entry.last_sequence == SEQUENCE_MAX else entry.last_sequence + 1
    if entry.producer_epoch != NO_EPOCH and sequence != expected:
        raise _out_of_order(entry, header, expected=expected)


def _out_of_order(entry: ProducerEntry, header: BatchHeader, *, expected: int) -> Refused:
    return Refused(
        ErrorCode.out_of_order_sequence_number,
        f"producer {entry.producer_id} epoch {header.producer_epoch} sent sequence {header.base_sequence} where "
        f"{expected} was expected: a batch is missing, or this is a repeat older than the last {BATCHES_REMEMBERED}",
    )
