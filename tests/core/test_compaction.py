"""Which records, markers and batches outlive a cleaning, against what a reader and a recovery must still find."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from partition_model import at_offset, make_header, make_marker

from semel.core.compaction import (
    BatchFacts,
    BatchPlan,
    Compaction,
    RecordFacts,
    emptied_header,
    plan_compaction,
    rewritten_header,
)
from semel.core.partition_log import Append, PartitionLog
from semel.records.control import MarkerKind
from semel.records.layout import BatchHeader, read_header, write_header

RETENTION_MS = 100
DAY_MS = 24 * 3600 * 1000


@dataclass
class CompactedPartition:
    """A partition of keyed records whose batches are rewritten as the plans say."""

    log: PartitionLog = field(default_factory=PartitionLog)
    batches: list[BatchFacts] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)

    def write(self, *keys: str, producer_id: int = -1, epoch: int = -1, transactional: bool = False) -> None:
        """One batch; a key in upper case stands for a tombstone of the key in lower case."""
        known = self.log.producers.get(producer_id)
        same_epoch = known is not None and known.producer_epoch == epoch
        header = make_header(
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=-1 if producer_id < 0 else known.last_sequence + 1 if known and same_epoch else 0,
            count=len(keys),
            transactional=transactional,
        )
        decision = self.log.decide_append(header, now_ms=0)
        assert isinstance(decision, Append)
        header = at_offset(header, decision.base_offset)
        self.log.replay_append(header)
        records = [
            RecordFacts(header.base_offset + n, key.lower().encode() or None, key.isupper())
            for n, key in enumerate(keys)
        ]
        self.batches.append(BatchFacts(header, records))

    def end(self, kind: MarkerKind, producer_id: int, epoch: int) -> None:
        offset = self.log.decide_marker(kind, producer_id, epoch, 0).base_offset
        header, marker = make_marker(kind, producer_id, epoch, offset)
        self.log.replay_append(header, marker)
        self.batches.append(BatchFacts(header, [RecordFacts(offset, b"marker", False)], marker))

    def clean(self, now_ms: int, *, end_offset: int | None = None) -> Compaction:
        self.log.replay_high_watermark(self.log.log_end_offset)
        end_offset = self.log.last_stable_offset if end_offset is None else end_offset
        compaction = Compaction(
            end_offset,
            now_ms=now_ms,
            delete_retention_ms=RETENTION_MS,
            aborted=self.log.aborted_transactions(0, end_offset),
            last_records=self.log.producers.last_records(),
        )
        plans = plan_compaction(compaction, self.batches)
        self.actions = [plan.action for plan in plans]
        self.batches = [
            carried
            for batch, plan in zip(self.batches, plans, strict=True)
            if (carried := carry_out(batch, plan)) is not None
        ]
        self.log.replay_forgotten_aborts(compaction.aborts_gone)
        return compaction

    def committed(self) -> dict[bytes, int]:
        """What a read_committed reader from the start ends up with: key -> offset, deleted keys left out."""
        found: dict[bytes, int] = {}
        aborted = self.log.aborted_transactions(0, 2**40)
        for batch in self.batches:
            header = batch.header
            if header.is_control or header.last_offset >= self.log.last_stable_offset:
                continue
            if header.is_transactional and any(
                entry.producer_id == header.producer_id
                and entry.first_offset <= header.base_offset <= entry.last_offset
                for entry in aborted
            ):
                continue
            for record in batch.records:
                assert record.key is not None
                found.pop(record.key, None)
                if not record.is_tombstone:
                    found[record.key] = record.offset
        return found

    def recovered(self) -> PartitionLog:
        log = PartitionLog()
        for batch in self.batches:
            log.replay_append(batch.header, batch.marker)
        log.replay_high_watermark(log.log_end_offset)
        return log


def carry_out(batch: BatchFacts, plan: BatchPlan) -> BatchFacts | None:
    if plan.action == "copy":
        return batch
    if plan.action == "drop":
        return None
    if plan.action == "empty":
        return BatchFacts(emptied_header(batch.header))
    kept = [record for record in batch.records if record.offset in plan.kept_offsets]
    assert len(kept) == len(plan.kept_offsets) > 0
    return BatchFacts(rewritten_header(batch.header, plan), kept, batch.marker)


def offsets(partition: CompactedPartition) -> list[int]:
    return [record.offset for batch in partition.batches for record in batch.records]


def test_the_latest_record_of_each_key_stays() -> None:
    """And within a batch the others are taken out, without moving its offsets."""
    partition = CompactedPartition()
    partition.write("a", "b")
    partition.write("a", "c", "c")
    partition.write("d")
    partition.clean(0)
    assert offsets(partition) == [1, 2, 4, 5]
    assert partition.actions == ["rewrite", "rewrite", "copy"]
    assert [(batch.header.base_offset, batch.header.last_offset) for batch in partition.batches] == [
        (0, 1),
        (2, 4),
        (5, 5),
    ]


def test_a_second_cleaning_of_the_same_part_changes_nothing() -> None:
    """What was the latest still is."""
    partition = CompactedPartition()
    for keys in (("a", "b"), ("a",), ("b", "c")):
        partition.write(*keys)
    partition.clean(0)
    before = list(partition.batches)
    partition.clean(1)
    assert partition.batches == before
    assert set(partition.actions) == {"copy"}


def test_records_without_key_go() -> None:
    """They cannot be told apart; topics that were compacted later may hold some."""
    partition = CompactedPartition()
    partition.write("", "a")
    partition.clean(0)
    assert offsets(partition) == [1]


def test_what_is_not_yet_decided_is_not_touched() -> None:
    """Above the last stable offset nothing is removed, and nothing there makes an older record go."""
    partition = CompactedPartition()
    partition.write("a")
    partition.write("a", producer_id=7, epoch=0, transactional=True)
    partition.write("a")
    partition.clean(0)
    assert offsets(partition) == [0, 1, 2]
    assert partition.actions == ["copy", "copy", "copy"]


def test_aborted_records_go_and_do_not_shadow_committed_ones() -> None:
    """The value before the aborted one is still the key's value."""
    partition = CompactedPartition()
    partition.write("a")
    partition.write("a", producer_id=7, epoch=0, transactional=True)
    partition.end("abort", 7, 1)
    partition.write("b")
    partition.clean(0)
    assert partition.committed() == {b"a": 0, b"b": 3}
    assert offsets(partition) == [0, 2, 3]


def test_a_tombstone_outlives_its_key_by_the_delete_retention() -> None:
    """KIP-534: counted from the cleaning that first found it, so that a slow reader learns of the deletion."""
    partition = CompactedPartition()
    partition.write("a")
    partition.write("A", "b")
    partition.clean(1000)
    header = partition.batches[0].header
    assert offsets(partition) == [1, 2]
    assert header.has_delete_horizon
    assert header.base_timestamp == 1000 + RETENTION_MS
    partition.clean(1000 + RETENTION_MS - 1)
    assert offsets(partition) == [1, 2]
    assert partition.actions == ["copy"]
    partition.clean(1000 + RETENTION_MS)
    assert offsets(partition) == [2]
    assert partition.batches[0].header.base_timestamp == 1000 + RETENTION_MS


def test_a_marker_stays_while_any_batch_of_its_transaction_does() -> None:
    """Without it the records would count as undecided, or aborted ones as committed."""
    partition = CompactedPartition()
    partition.write("a", producer_id=7, epoch=0, transactional=True)
    partition.end("commit", 7, 1)
    partition.write("b")
    for now_ms in (0, DAY_MS, 2 * DAY_MS):
        partition.clean(now_ms)
        assert offsets(partition) == [0, 1, 2]
    assert not partition.batches[1].header.has_delete_horizon


@pytest.mark.parametrize("kind", ["commit", "abort"])
def test_a_marker_goes_a_delete_retention_after_the_last_record_of_its_transaction(kind: MarkerKind) -> None:
    """A reader that is inside the transaction has that long to reach its end; the aborted index forgets it then too."""
    partition = CompactedPartition()
    partition.write("a", producer_id=7, epoch=0, transactional=True)
    partition.end(kind, 7, 1)
    partition.write("a")
    partition.write("z", producer_id=7, epoch=1)  # so that the marker is not the producer's last entry
    partition.clean(1000)
    assert offsets(partition) == [1, 2, 3]
    assert not partition.batches[0].header.has_delete_horizon, "the transaction's record was there in this walk"
    partition.clean(2000)
    assert partition.batches[0].header.base_timestamp == 2000 + RETENTION_MS
    partition.clean(2000 + RETENTION_MS - 1)
    assert offsets(partition) == [1, 2, 3]
    assert len(partition.log.all_aborted()) == (1 if kind == "abort" else 0)
    compaction = partition.clean(2000 + RETENTION_MS)
    assert offsets(partition) == [2, 3]
    assert len(compaction.aborts_gone) == (1 if kind == "abort" else 0)
    assert partition.log.all_aborted() == ()


def test_a_kept_transaction_does_not_hold_the_markers_of_later_ones() -> None:
    """Each marker belongs to the batches since the producer's marker before it."""
    partition = CompactedPartition()
    partition.write("kept", producer_id=7, epoch=0, transactional=True)
    partition.end("commit", 7, 0)
    partition.write("a", producer_id=7, epoch=0, transactional=True)
    partition.end("commit", 7, 0)
    partition.write("a", producer_id=7, epoch=0, transactional=True)
    partition.end("abort", 7, 0)
    partition.write("a", producer_id=7, epoch=0, transactional=True)
    partition.end("commit", 7, 0)
    for now_ms in (0, DAY_MS, 2 * DAY_MS):
        partition.clean(now_ms)
    assert offsets(partition) == [0, 1, 6, 7]


def test_the_last_batch_of_a_producer_stays_as_an_empty_one() -> None:
    """Recovery must know the sequence, or a repeat would be stored twice after a restart."""
    partition = CompactedPartition()
    partition.write("a", "b", producer_id=7, epoch=3)
    partition.write("a", "b", "c")
    partition.clean(0)
    assert partition.actions == ["empty", "copy"]
    header = partition.batches[0].header
    assert (header.record_count, header.total_bytes, header.base_timestamp) == (0, 61, -1)
    entry = partition.recovered().producers.get(7)
    assert entry is not None
    assert (entry.producer_epoch, entry.last_sequence, entry.last_data_offset) == (3, 1, 1)
    partition.clean(1)
    assert partition.actions == ["copy", "copy"]
    partition.write("d", producer_id=7, epoch=3)
    partition.clean(2)
    assert partition.actions == ["drop", "copy", "copy"]


def test_the_last_marker_of_a_producer_stays_for_its_epoch() -> None:
    """After an epoch bump it is all that fences the old epoch when the state is rebuilt from the log."""
    partition = CompactedPartition()
    partition.write("a", producer_id=7, epoch=0, transactional=True)
    partition.end("commit", 7, 1)
    partition.write("a")
    for now_ms in (0, DAY_MS, 2 * DAY_MS):
        partition.clean(now_ms)
    assert [(batch.header.base_offset, batch.header.record_count) for batch in partition.batches] == [(1, 0), (2, 1)]
    entry = partition.recovered().producers.get(7)
    assert entry is not None
    assert entry.producer_epoch == 1


def test_the_last_batch_of_the_cleaned_part_stays_even_if_empty() -> None:
    """The log must still end where it ended."""
    partition = CompactedPartition()
    partition.write("a")
    partition.write("b", producer_id=7, epoch=0, transactional=True)
    partition.end("abort", 7, 1)
    partition.write("A")
    for now_ms in (0, DAY_MS, 2 * DAY_MS, 3 * DAY_MS):
        partition.clean(now_ms)
    assert partition.batches[-1].header.last_offset == 3
    assert partition.recovered().log_end_offset == partition.log.log_end_offset


def test_only_the_part_below_the_end_is_cleaned() -> None:
    """The active segment is left alone, and what lies in it does not count."""
    partition = CompactedPartition()
    for _ in range(4):
        partition.write("a")
    partition.clean(0, end_offset=2)
    assert offsets(partition) == [1, 2, 3]


def test_new_headers_are_written_and_read_back() -> None:
    """An emptied batch is a valid batch of 61 bytes that keeps producer and offsets."""
    header = make_header(
        producer_id=7, producer_epoch=2, base_sequence=5, count=3, base_offset=9, transactional=True
    )._replace(attributes=0x10 | 0x04 | 0x40)
    empty = emptied_header(header)
    data = bytearray(empty.total_bytes)
    write_header(data, empty)
    read = read_header(data)
    assert (read.base_offset, read.last_offset, read.last_sequence, read.record_count) == (9, 11, 7, 0)
    assert (read.compression, read.is_transactional, read.has_delete_horizon) == ("none", True, False)
    plain = header._replace(attributes=0x10)
    assert rewritten_header(plain, BatchPlan("rewrite", (9, 11))) == plain._replace(record_count=2)


Operation = tuple[str, list[str], int]


def random_operations(seed: int) -> list[Operation]:
    """What, the keys, and which of three transactional producers."""
    note(f"seed {seed}")
    chance = random.Random(seed)
    kinds = ["plain", "idempotent", "data", "data", "data", "commit", "commit", "abort", "abort", "clean"]
    return [
        (chance.choice(kinds), chance.choices("abcdABC", k=chance.randint(1, 3)), chance.randint(1, 3))
        for _ in range(chance.randrange(50))
    ]


def producers_of(log: PartitionLog) -> dict[int, tuple[int, int, int | None]]:
    return {
        entry.producer_id: (entry.producer_epoch, entry.last_sequence, entry.transaction_first_offset)
        for entry in log.active_producers()
    }


def headers(partition: CompactedPartition) -> list[BatchHeader]:
    return [batch.header for batch in partition.batches]


@given(seed=st.integers(0, 2**32), bumps=st.booleans())
@settings(deadline=None)
def test_cleaning_never_changes_what_readers_and_recovery_find(seed: int, bumps: bool) -> None:
    """Any mix of transactions and cleanings: the same committed values, sequences, epochs and end of the log."""
    cleaned, untouched = CompactedPartition(), CompactedPartition()
    epochs = {1: 0, 2: 0, 3: 0}
    now_ms = 0
    for what, keys, producer_id in random_operations(seed):
        for partition in (cleaned, untouched):
            if what == "plain":
                partition.write(*keys)
            elif what == "idempotent":
                partition.write(*keys, producer_id=9, epoch=0)
            elif what == "data":
                partition.write(*keys, producer_id=producer_id, epoch=epochs[producer_id], transactional=True)
            elif what in ("commit", "abort"):
                kind: MarkerKind = "commit" if what == "commit" else "abort"
                partition.end(kind, producer_id, epochs[producer_id] + bumps)
        if what in ("commit", "abort"):
            epochs[producer_id] += bumps
        if what == "clean":
            now_ms += RETENTION_MS // producer_id
            cleaned.clean(now_ms)
        untouched.log.replay_high_watermark(untouched.log.log_end_offset)
        cleaned.log.replay_high_watermark(cleaned.log.log_end_offset)
        assert cleaned.committed() == untouched.committed()
        recovered = cleaned.recovered()
        assert recovered.log_end_offset == untouched.log.log_end_offset
        assert recovered.last_stable_offset == untouched.log.last_stable_offset
        assert producers_of(recovered) == producers_of(untouched.log)
        assert [header.base_offset for header in headers(cleaned)] == sorted(
            {header.base_offset for header in headers(cleaned)}
        )
    for _ in range(3):
        now_ms += RETENTION_MS
        cleaned.clean(now_ms)
    end_offset = cleaned.log.last_stable_offset
    left = [offset for offset in offsets(cleaned) if offset < end_offset]
    markers = [batch.marker.offset for batch in cleaned.batches if batch.marker is not None]
    assert sorted(set(left) - set(markers)) == sorted(untouched.committed().values())
