"""Bugs to plant in the broker, each as a patch of its own code: the checker must find every one in a small run."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import broker_mutants
import pytest
import small_scenes as scenes
from crc32c import crc32c
from kio.schema.errors import ErrorCode
from planted_bug import Bugs

from semel.broker.handlers import k00_produce, k01_fetch
from semel.broker.storage.partition import Appended, Partition
from semel.broker.storage.segment import Segment
from semel.broker.transaction_runtime import TransactionRuntime
from semel.core.group_offsets import GroupOffsets
from semel.core.partition_log import PartitionLog
from semel.core.producer_state import ProducerEntry
from semel.core.refusal import Refused
from semel.core.transaction_metadata import to_prepared
from semel.core.transactions import TransactionCoordinator
from semel.records import iter_batches
from semel.records.layout import CRC_POSITION, CRC_START, LENGTH_FIELD_END, BatchHeader

BROKER_BUGS = Bugs("broker")
shown_in = BROKER_BUGS.shown_in


def _is_data(partition: Partition) -> bool:
    return not partition.topic.startswith("__")


# What is acknowledged and not there.


@shown_in(scenes.copying, "lost_write")
def an_acknowledged_batch_is_not_stored(patch: pytest.MonkeyPatch) -> None:
    """The first batch of all gets its offsets, and its bytes are forgotten."""
    original: Any = vars(Partition)["_store"]
    batches = itertools.count()

    def store(self: Partition, batch: Any, header: BatchHeader, now_ms: int) -> None:
        if not _is_data(self) or next(batches) != 0:
            original(self, batch, header, now_ms)

    patch.setattr(Partition, "_store", store)


@shown_in(scenes.copying, "lost_write")
def a_fetch_leaves_out_a_batch(patch: pytest.MonkeyPatch) -> None:
    """Of an answer with three batches or more the second is missing."""
    original = Partition.read

    def read(self: Partition, offset: int, **limits: Any) -> bytes | memoryview:
        data = original(self, offset, **limits)
        batches = [batch for _, batch in iter_batches(data)]
        if not _is_data(self) or len(batches) < 3:
            return data
        return b"".join((batches[0], *batches[2:]))

    patch.setattr(Partition, "read", read)


@shown_in(scenes.copying, "unseen")
def a_full_log_acknowledges_and_stores_nothing(patch: pytest.MonkeyPatch) -> None:
    """From the fourth batch of a partition on."""
    original = Partition.append
    batches: Counter[Partition] = Counter()
    promised: Counter[Partition] = Counter()

    def append(self: Partition, batch: Any, header: BatchHeader, **how: Any) -> Appended:
        batches[self] += 1
        if not _is_data(self) or batches[self] < 4:
            return original(self, batch, header, **how)
        base_offset = self.log.log_end_offset + promised[self]
        promised[self] += header.record_count
        return Appended(base_offset, base_offset + header.last_offset_delta, -1, False)

    patch.setattr(Partition, "append", append)


@shown_in(scenes.copying, "unseen")
def the_high_watermark_stands_still(patch: pytest.MonkeyPatch) -> None:
    """What is behind the fifth record is never shown to anybody."""
    original: Any = vars(Partition)["_appended"]

    def appended(self: Partition) -> None:
        if not _is_data(self) or self.log.log_end_offset <= 5:
            original(self)

    patch.setattr(Partition, "_appended", appended)


def _with_markers(patch: pytest.MonkeyPatch, outcome: Any) -> None:
    """Let `outcome(partition, committed, number)` say what is marked in place of `committed`; None: nothing is."""
    original: Any = vars(TransactionRuntime)["_mark"]
    numbers: Counter[Partition] = Counter()

    def mark(self: Any, partition: Partition, *identity: int, committed: bool, protocol_2: bool) -> None:
        numbers[partition] += 1
        told = outcome(partition, committed, numbers[partition]) if _is_data(partition) else committed
        if told is not None:
            original(self, partition, *identity, committed=told, protocol_2=protocol_2)

    patch.setattr(TransactionRuntime, "_mark", mark)


@shown_in(scenes.moving, "unseen")
def late_commits_are_marked_as_aborts(patch: pytest.MonkeyPatch) -> None:
    """From the fourth transaction in a partition on."""
    _with_markers(patch, lambda _, committed, number: committed and number < 4)


# What is there twice, or elsewhere, or not as it was told.

shown_in(scenes.copying_with_a_lost_answer, "duplicate")(broker_mutants.repeats_are_stored_again)


@shown_in(scenes.copying, "inconsistent_offsets")
def the_answer_names_the_next_offset(patch: pytest.MonkeyPatch) -> None:
    """One more than where the batch is."""
    original = Partition.append

    def append(self: Partition, *args: Any, **how: Any) -> Appended:
        stored = original(self, *args, **how)
        return stored._replace(base_offset=stored.base_offset + 1) if _is_data(self) else stored

    patch.setattr(Partition, "append", append)


@shown_in(scenes.copying_with_a_lost_answer, "inconsistent_offsets", "nonmonotonic_send")
def a_repeat_is_answered_with_the_oldest_batch(patch: pytest.MonkeyPatch) -> None:
    """It is recognised, and the offset that is told is that of another."""
    original = ProducerEntry.find_duplicate

    def find_duplicate(self: ProducerEntry, header: BatchHeader) -> Any:
        return self.batches[0] if original(self, header) is not None else None

    patch.setattr(ProducerEntry, "find_duplicate", find_duplicate)


@shown_in(scenes.copying, "nonmonotonic_send", "inconsistent_offsets")
def the_answer_has_the_offset_of_the_request(patch: pytest.MonkeyPatch) -> None:
    """Every producer's batch says 0 there."""
    original = Partition.append

    def append(self: Partition, batch: Any, header: BatchHeader, **how: Any) -> Appended:
        stored = original(self, batch, header, **how)
        return stored._replace(base_offset=header.base_offset) if _is_data(self) else stored

    patch.setattr(Partition, "append", append)


@shown_in(scenes.writing_many_batches_plainly, "order_violation")
def two_batches_change_places(patch: pytest.MonkeyPatch) -> None:
    """The second of a partition is acknowledged, and written behind the third."""
    original = Partition.append
    held: list[tuple[bytearray, BatchHeader]] = []
    batches = itertools.count(1)

    def append(self: Partition, batch: Any, header: BatchHeader, **how: Any) -> Appended:
        number = next(batches) if _is_data(self) else 0
        if number == 2:
            held.append((bytearray(batch), header))
            return Appended(self.log.log_end_offset, self.log.log_end_offset, -1, False)
        stored = original(self, batch, header, **how)
        while held and number == 3:
            original(self, *held.pop(), **how)
        return stored

    patch.setattr(Partition, "append", append)


@shown_in(scenes.moving, "misrouted_payload")
def partitions_are_exchanged(patch: pytest.MonkeyPatch) -> None:
    """What is for the first is stored in the second, and the reverse."""
    production: Any = vars(k00_produce)["_Production"]
    original = production._writable_partition
    patch.setattr(production, "_writable_partition", lambda self, topic, index: original(self, topic, 1 - index))


@shown_in(scenes.moving, "misrouted_payload")
def a_bit_flips_before_the_checksum_is_made(patch: pytest.MonkeyPatch) -> None:
    """In the last record of each batch, from the fifth on."""
    original = Partition.append
    batches = itertools.count()

    def append(self: Partition, batch: Any, header: BatchHeader, **how: Any) -> Appended:
        if _is_data(self) and next(batches) >= 4:
            batch[-3] ^= 1
            batch[CRC_POSITION:CRC_START] = crc32c(memoryview(batch)[CRC_START:]).to_bytes(4, "big")
        return original(self, batch, header, **how)

    patch.setattr(Partition, "append", append)


# Transactions that do not end as they should.

shown_in(scenes.moving, "aborted_read")(broker_mutants.aborted_records_are_not_told)
shown_in(scenes.moving, "aborted_read")(broker_mutants.aborts_become_commits)


@shown_in(scenes.moving_by_a_teller_that_is_killed, "dirty_read")
def what_was_left_open_is_committed(patch: pytest.MonkeyPatch) -> None:
    """When the next owner of the id comes."""

    def fence(self: Any, metadata: Any, now_ms: int, new_producer_id: Any) -> Any:
        return to_prepared(metadata, True, self.settings.transaction_version, -1, now_ms)

    patch.setattr(TransactionCoordinator, "_fence", fence)


shown_in(scenes.moving_by_a_teller_that_is_killed, "dirty_read")(broker_mutants.stable_offset_ignores_open_transactions)
shown_in(scenes.moving_under_observation, "precommitted_read")(broker_mutants.stable_offset_ignores_open_transactions)
shown_in(scenes.appending_at_the_same_time, "g1c")(broker_mutants.stable_offset_ignores_open_transactions)


@shown_in(scenes.moving_under_observation, "precommitted_read")
def a_transaction_begins_at_its_last_batch(patch: pytest.MonkeyPatch) -> None:
    """What it wrote before counts as stable."""
    original: Any = vars(PartitionLog)["_replay_data"]

    def replay_data(self: Any, header: BatchHeader, now_ms: int | None) -> None:
        before = self.producers.transaction_first_offset(header.producer_id)
        original(self, header, now_ms)
        if header.is_transactional and before is not None:
            del self._open[before]
            self._open[header.base_offset] = header.producer_id
            self.producers._entries[header.producer_id].transaction_first_offset = header.base_offset

    patch.setattr(PartitionLog, "_replay_data", replay_data)


@shown_in(scenes.moving, "torn_transaction", "lost_write", "wrong_aggregate")
def one_partition_is_aborted(patch: pytest.MonkeyPatch) -> None:
    """Of every other transaction that is committed in the other partition."""
    _with_markers(patch, lambda partition, committed, number: committed and (partition.index == 0 or number % 2 == 0))


@shown_in(scenes.moving, "torn_transaction", "hung_lso")
def a_marker_is_left_out(patch: pytest.MonkeyPatch) -> None:
    """Nobody ends a transaction in the second partition."""
    _with_markers(patch, lambda partition, committed, _: None if partition.index == 1 else committed)


@shown_in(scenes.moving_by_a_teller_that_stays_away, "hung_lso")
def nobody_is_ever_out_of_time(patch: pytest.MonkeyPatch) -> None:
    """What a client has left open stays open."""
    patch.setattr(TransactionCoordinator, "decide_timeouts", lambda *_, **__: [])


@shown_in(scenes.moving, "hung_lso")
def the_stable_offset_is_never_moved_on(patch: pytest.MonkeyPatch) -> None:
    """A marker that was not below the high watermark when it was written counts as such for ever."""
    patch.setattr(PartitionLog, "_settle", lambda _: None)


# Groups and readers.

shown_in(scenes.copying, "lost_write")(broker_mutants.pending_offsets_count_at_once)


@shown_in(scenes.copying, "double_consume")
def positions_in_transactions_never_count(patch: pytest.MonkeyPatch) -> None:
    """A commit ends them as an abort does."""
    original = GroupOffsets.replay_marker

    def replay_marker(self: GroupOffsets, producer_id: int, *, committed: bool, log_partition: int) -> None:
        original(self, producer_id, committed=False, log_partition=log_partition)

    patch.setattr(GroupOffsets, "replay_marker", replay_marker)


@shown_in(scenes.reading_in_pieces, "poll_skip")
def a_reader_of_pieces_is_sent_on_too_far(patch: pytest.MonkeyPatch) -> None:
    """Where the next piece begins is remembered as one batch later."""
    original: Any = vars(Segment)["_last_border"]

    def last_border(self: Any, data: memoryview, start: int) -> int:
        at = original(self, data, start)
        length_at = at + LENGTH_FIELD_END - 4
        next_border = start + at + LENGTH_FIELD_END
        next_border += int.from_bytes(self.file.read(start + length_at, 4), "big")
        if next_border < self.file.size:
            self._hints = {offset: next_border if hint == start + at else hint for offset, hint in self._hints.items()}
        return at

    patch.setattr(Segment, "_last_border", last_border)


@shown_in(scenes.reading_from_the_earliest, "nonmonotonic_poll")
def the_end_of_the_log_is_out_of_range(patch: pytest.MonkeyPatch) -> None:
    """A reader that has read all is told that its place is gone, and begins anew."""
    fetch: Any = vars(k01_fetch)["_Fetch"]
    original = fetch._read_partition

    def read_partition(self: Any, partition: Partition, wanted: Any) -> Any:
        if wanted.fetch_offset == partition.log.log_end_offset > 0:
            raise Refused(ErrorCode.offset_out_of_range, f"{wanted.fetch_offset}")
        return original(self, partition, wanted)

    patch.setattr(fetch, "_read_partition", read_partition)
