"""Bugs to plant in Semel's client, and in the programs of users: the checker must find every one in a small run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import client_mutants
import numpy as np
import pyarrow as pa
import pytest
import small_scenes as scenes
from planted_bug import Bugs

from semel.client import producer as producer_module
from semel.client import routing
from semel.client.admin import Admin
from semel.client.fetch_requests import FetchRequests
from semel.client.partitions import TopicPartition
from semel.client.producer import Producer
from semel.client.send_queue import OutgoingBatch, SendQueue
from semel.client.sender import Sender
from semel.client.transactions import TransactionCalls
from semel.client.visibility import Visibility
from semel.errors import ConnectionLost, KafkaError
from semel.records import BatchHeader
from semel.verify.clients import semel_client
from semel.verify.clients.face import Incoming, Integers, Outcome
from semel.verify.clients.manual_consumer import ManualConsumer
from semel.verify.workloads import copier, counters
from semel.verify.workloads.bank import Bank
from semel.verify.workloads.life import Life
from semel.verify.workloads.transactions import Batch, Taken

CLIENT_BUGS = Bugs("client")
shown_in = CLIENT_BUGS.shown_in

_READER: Any = vars(semel_client)["_Reader"]
_WRITER: Any = vars(semel_client)["_TransactionalWriter"]
_ROUTES: Any = vars(semel_client)["_Routes"]
_COPY: Any = vars(copier)["_Copy"]
_TOTALS: Any = vars(counters)["_Totals"]


# Producers.


@shown_in(scenes.copying_with_a_lost_request, "lost_write")
def a_lost_request_counts_as_stored(patch: pytest.MonkeyPatch) -> None:
    """The connection broke, and the batch is told as acknowledged."""
    original: Any = vars(Sender)["_again"]

    def again(self: Any, batch: OutgoingBatch, error: Any, judged: Any) -> None:
        if isinstance(error, ConnectionLost):
            self._store(batch, -1)
        else:
            original(self, batch, error, judged)

    patch.setattr(Sender, "_again", again)


@shown_in(scenes.copying, "unseen")
def a_table_leaves_with_the_next_one(patch: pytest.MonkeyPatch) -> None:
    """To fill a batch; and `flush` does not know that one waits, so that the last is never sent."""
    original = Producer.send_table
    waiting: dict[Producer, tuple[str | None, pa.Table]] = {}

    def send_table(self: Producer, topic: str | None, table: pa.Table, *, partition: int | None = None) -> None:
        if self.config.transactional_id is None:
            if self in waiting:
                original(self, *waiting[self])
            waiting[self] = (topic, table)
        else:
            original(self, topic, table, partition=partition)

    patch.setattr(Producer, "send_table", send_table)


shown_in(scenes.copying_with_a_lost_answer, "duplicate")(client_mutants.a_repeat_gets_a_new_sequence)
shown_in(scenes.copying_with_a_lost_answer, "duplicate")(client_mutants.a_repeat_goes_under_a_new_epoch)


@shown_in(scenes.writing_many_batches, "order_violation")
def batches_leave_in_reverse(patch: pytest.MonkeyPatch) -> None:
    """The last of a table first."""

    def encode(*args: Any, **how: Any) -> Iterator[Any]:
        return reversed(list(routing.encode_for_partitions(*args, **how)))

    patch.setattr(producer_module, "encode_for_partitions", encode)


@shown_in(scenes.writing_many_batches_plainly, "order_violation")
def a_repeat_goes_to_the_end_of_the_queue(patch: pytest.MonkeyPatch) -> None:
    """Behind batches that were to follow it."""

    def give_back(self: Any, batch: OutgoingBatch) -> None:
        self._in_flight.remove(batch)
        self._waiting.append(batch)

    patch.setattr(SendQueue, "give_back", give_back)


@shown_in(scenes.writing_many_batches, "nonmonotonic_send", "inconsistent_offsets")
def offsets_are_told_in_reverse(patch: pytest.MonkeyPatch) -> None:
    """The last batch of a write is told to be where the first is."""
    original = _ROUTES.offsets
    patch.setattr(_ROUTES, "offsets", lambda self, sent, stored: original(self, sent, stored)[::-1])


@shown_in(scenes.moving, "misrouted_payload")
def records_go_to_the_next_partition(patch: pytest.MonkeyPatch) -> None:
    """Not to the one that was asked for."""
    original: Any = vars(routing)["_partitions"]

    def partitions(topic: str, table: pa.Table, partition: int | None, count: int, sticky: Any) -> Any:
        return (original(topic, table, partition, count, sticky) + 1) % count

    patch.setattr(routing, "_partitions", partitions)


@shown_in(scenes.moving_with_a_refused_batch, "torn_transaction", "wrong_aggregate")
def a_refused_batch_does_not_doom_its_transaction(patch: pytest.MonkeyPatch) -> None:
    """The rest of it is committed."""
    original: Any = vars(Sender)["_fail"]

    def fail(self: Sender, batch: OutgoingBatch, error: Any) -> None:
        original(self, batch, error)
        self.failure = None

    patch.setattr(Sender, "_fail", fail)


@shown_in(scenes.moving_unverified, "hung_lso")
def a_partition_is_not_announced(patch: pytest.MonkeyPatch) -> None:
    """The coordinator does not know of it, and writes no marker there."""
    original = TransactionCalls.add_partitions

    def add_partitions(self: TransactionCalls, identity: Any, partitions: Any) -> None:
        original(self, identity, [named for named in partitions if named.partition == 0])

    patch.setattr(TransactionCalls, "add_partitions", add_partitions)


@shown_in(scenes.moving_by_a_teller_that_is_killed, "dirty_read")
def a_new_owner_commits_what_it_finds(patch: pytest.MonkeyPatch) -> None:
    """Instead of aborting what its former life has left open."""
    original = TransactionCalls.init_producer_id

    def init_producer_id(self: TransactionCalls, *current: Any, **patience: Any) -> Any:
        if not current:
            with suppress(KafkaError):  # an id that is new has no owner
                owner = self.owner()
                if owner is not None and owner.is_open:
                    self.end(owner.identity, commit=True)
        return original(self, *current, **patience)

    patch.setattr(TransactionCalls, "init_producer_id", init_producer_id)


shown_in(scenes.moving_with_a_lost_commit, "aborted_read")(client_mutants.an_unknown_commit_counts_as_aborted)
shown_in(scenes.moving_with_a_lost_end, "lost_write")(client_mutants.a_lost_answer_counts_as_a_commit)


# Readers.

shown_in(scenes.moving, "aborted_read")(client_mutants.aborted_records_are_handed_out)
shown_in(scenes.moving_by_a_teller_that_is_killed, "dirty_read")(client_mutants.open_transactions_are_read)
shown_in(scenes.moving_under_observation, "precommitted_read")(client_mutants.open_transactions_are_read)
shown_in(scenes.appending_at_the_same_time, "g1c")(client_mutants.open_transactions_are_read)
shown_in(scenes.reading_over_a_lost_connection, "poll_skip")(client_mutants.a_lost_answer_counts_as_read)


@shown_in(scenes.moving, "inconsistent_offsets")
def a_reader_counts_its_records(patch: pytest.MonkeyPatch) -> None:
    """Instead of reading their offsets, which have gaps where markers and aborted records are."""
    original = _READER._incoming
    seen: Counter[int] = Counter()

    def incoming(self: Any, taken: Any) -> Incoming:
        found = original(self, taken)
        offsets = np.array([seen.update([number]) or seen[number] - 1 for number in found.partition.tolist()])
        return replace(found, offset=offsets)

    patch.setattr(_READER, "_incoming", incoming)


@shown_in(scenes.moving, "poll_skip")
def an_abort_has_no_end(patch: pytest.MonkeyPatch) -> None:
    """Once a producer has aborted, all that follows of it in the same answer is left out."""
    original = Visibility.admits

    def admits(self: Visibility, header: BatchHeader, read_marker: Any) -> bool:
        return original(self, header, lambda: None)

    patch.setattr(Visibility, "admits", admits)


@shown_in(scenes.moving, "nonmonotonic_poll")
def a_reader_does_not_move_on(patch: pytest.MonkeyPatch) -> None:
    """It hands out its first records, and asks for them once more."""
    original = FetchRequests.advance
    moved: set[tuple[FetchRequests, TopicPartition]] = set()

    def advance(self: FetchRequests, partition: TopicPartition, next_offset: int, leader_epoch: int) -> None:
        is_first = (self, partition) not in moved
        moved.add((self, partition))
        original(self, partition, self.readings[partition].position if is_first else next_offset, leader_epoch)

    patch.setattr(FetchRequests, "advance", advance)


@shown_in(scenes.reading_to_a_lost_connection, "nonmonotonic_poll")
def a_new_connection_begins_at_the_beginning(patch: pytest.MonkeyPatch) -> None:
    """The reader's place is lost with the old one."""
    original: Any = vars(FetchRequests)["_retry"]

    def retry(self: Any, reading: Any, error: Any, *rest: Any) -> None:
        if isinstance(error, ConnectionLost):
            reading.position = 0
        original(self, reading, error, *rest)

    patch.setattr(FetchRequests, "_retry", retry)


# Programs of users.


@shown_in(scenes.copying, "lost_write")
def an_abort_leaves_the_consumer_where_it_is(patch: pytest.MonkeyPatch) -> None:
    """What the aborted transaction had taken is never taken again."""
    patch.setattr(ManualConsumer, "rewind", lambda _: None)


@shown_in(scenes.copying, "lost_write")
def positions_are_committed_before_the_transaction(patch: pytest.MonkeyPatch) -> None:
    """By a request of their own, which an abort does not take back."""

    def send_positions(self: Any, positions: Mapping[int, int], group: str, member: object) -> None:
        places = self._surroundings.partitions
        with Admin({"bootstrap.servers": self._surroundings.bootstrap}) as admin:
            admin.commit_offsets(group, {places[number]: offset for number, offset in positions.items()})

    patch.setattr(_WRITER, "send_positions", send_positions)


@shown_in(scenes.copying, "double_consume", "duplicate")
def a_consumer_always_begins_at_the_beginning(patch: pytest.MonkeyPatch) -> None:
    """Whatever its group has committed."""

    def rewind(self: Any) -> None:
        self._reader.seek(dict.fromkeys(self._places, 0))

    patch.setattr(ManualConsumer, "rewind", rewind)


@shown_in(scenes.copying, "double_consume")
def positions_are_those_of_the_last_record(patch: pytest.MonkeyPatch) -> None:
    """Not of the next one to read."""
    original = _WRITER.send_positions

    def send_positions(self: Any, positions: Mapping[int, int], group: str, member: object) -> None:
        original(self, {number: offset - 1 for number, offset in positions.items()}, group, member)

    patch.setattr(_WRITER, "send_positions", send_positions)


@shown_in(scenes.copying_what_was_committed, "aborted_read")
@shown_in(scenes.appending_at_the_same_time, "g1c")
def a_program_reads_what_is_not_committed(patch: pytest.MonkeyPatch) -> None:
    """It leaves the isolation level as most libraries have it, which is to see everything."""
    original = _READER.__init__

    def init(self: Any, surroundings: Any, positions: Any, isolation: Any) -> None:
        original(self, surroundings, positions, "read_uncommitted")

    patch.setattr(_READER, "__init__", init)


@shown_in(scenes.copying, "order_violation")
def a_copier_turns_its_batches_around(patch: pytest.MonkeyPatch) -> None:
    """The last record that it took is the first that it writes."""
    original = _COPY.apply

    def apply(self: Any, taken: Taken) -> Batch:
        made = original(self, taken)
        return Batch(*(getattr(made, name)[::-1] for name in Batch.__slots__))

    patch.setattr(_COPY, "apply", apply)


@shown_in(scenes.counting, "wrong_aggregate")
def totals_outlive_an_abort(patch: pytest.MonkeyPatch) -> None:
    """What was added in an aborted transaction stays in memory."""
    original = _TOTALS.settle
    patch.setattr(_TOTALS, "settle", lambda self, _: original(self, Outcome.COMMITTED))


@shown_in(scenes.counting, "wrong_aggregate")
def a_new_life_begins_with_nothing(patch: pytest.MonkeyPatch) -> None:
    """It does not read the totals of the life before."""
    patch.setattr(_TOTALS, "_read_totals", lambda *_: {})


@shown_in(scenes.moving, "wrong_aggregate")
def a_fee_is_taken(patch: pytest.MonkeyPatch) -> None:
    """Of each credit, and credited to nobody."""
    original: Any = vars(Bank)["_moves"]

    def moves(self: Bank, life: Life, count: int, sequence: int) -> Batch:
        made = original(self, life, count, sequence)
        fees: Integers = np.where(made.value > 0, 1, 0)
        return replace(made, value=made.value - fees)

    patch.setattr(Bank, "_moves", moves)
