"""Offsets, transactions and retention of one partition, against a model that works everything out from scratch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode
from partition_model import PartitionModel, at_offset, make_header, make_marker

from semel.core.partition_log import AbortedTransaction, Append, Duplicate, PartitionLog
from semel.core.producer_state import ProducerEntry
from semel.core.refusal import Refused
from semel.errors import CorruptRecords
from semel.records.control import MarkerKind
from semel.records.layout import BatchHeader


def outcome(call: Callable[[], object]) -> object:
    try:
        return call()
    except Refused as refusal:
        return refusal.code


def append(log: PartitionLog, header: BatchHeader, *, from_client: bool = True) -> Append:
    decision = log.decide_append(header, now_ms=0, from_client=from_client)
    assert isinstance(decision, Append)
    log.replay_append(at_offset(header, decision.base_offset))
    return decision


def transactional(producer_id: int, sequence: int, *, epoch: int = 0, count: int = 1) -> BatchHeader:
    return make_header(
        producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence, count=count, transactional=True
    )


def end(log: PartitionLog, kind: MarkerKind, producer_id: int, *, epoch: int = 0) -> AbortedTransaction | None:
    offset = log.decide_marker(kind, producer_id, epoch, 0).base_offset
    return log.replay_append(*make_marker(kind, producer_id, epoch, offset))


# What, which producer, epoch above the current, sequence beside the expected, count, transactional
Step = tuple[str, int, int, int, int, bool]
ACTIONS = ["send"] * 6 + ["commit", "abort", "watermark", "watermark", "repeat", "repeat", "start"]


def random_steps(seed: int) -> list[Step]:
    note(f"seed {seed}")
    chance = random.Random(seed)
    usual = [0] * 12
    return [
        (
            chance.choice(ACTIONS),
            chance.randint(1, 3),
            chance.choice([*usual, 1, 1, -1]),
            chance.choice([*usual, 1, -1]),
            chance.randint(1, 3),
            chance.random() < 0.8,
        )
        for _ in range(chance.randrange(45))
    ]


SEEDS = st.integers(0, 2**32)


class Pair:
    """The log and its model, given the same steps; every decision and every answer must agree."""

    def __init__(self) -> None:
        self.log = PartitionLog()
        self.model = PartitionModel()
        # Producer 3 begins close to the largest sequence, so that it wraps.
        self.next_sequence = {1: 0, 2: 0, 3: 2**31 - 3}
        self.epoch = {1: 0, 2: 0, 3: 0}
        self.sent: list[BatchHeader] = []

    def run(self, step: Step) -> None:
        what, producer_id, epoch_step, sequence_step, count, is_transactional = step
        if what in ("commit", "abort"):
            self.end(what, producer_id, max(0, self.epoch[producer_id] + epoch_step), sequence_step)
        elif what == "watermark":
            self.log.replay_high_watermark(self.model.high_watermark + count * 3)
            self.model.high_watermark = min(self.model.high_watermark + count * 3, self.model.log_end_offset)
        elif what == "start":
            self.delete(self.model.log_start_offset + count)
        elif what == "repeat" and self.sent:
            self.offer(self.sent[-min(len(self.sent), count * 3)])
        elif what == "send":
            epoch = max(0, self.epoch[producer_id] + epoch_step)
            sequence = self.next_sequence[producer_id] if epoch <= self.epoch[producer_id] else 0
            header = make_header(
                producer_id=producer_id,
                producer_epoch=epoch,
                base_sequence=max(0, sequence + sequence_step) % 2**31,
                count=count,
                transactional=is_transactional,
                timestamp_ms=len(self.model.stored),
            )
            self.offer(header)
        self.compare()

    def offer(self, header: BatchHeader) -> None:
        before = copy.deepcopy(vars(self.log))
        expected = self.model.decide_append(header)
        decision = outcome(lambda: self.log.decide_append(header, now_ms=0))
        note(f"{header.producer_id} epoch {header.producer_epoch} sequence {header.base_sequence}: {decision}")
        assert decision == expected
        assert_same_state(vars(self.log), before)
        if isinstance(decision, Append):
            self.store(at_offset(header, decision.base_offset))

    def store(self, header: BatchHeader) -> None:
        assert self.log.replay_append(header) is None
        self.model.stored.append((header, None))
        self.sent.append(header._replace(base_offset=0))
        self.epoch[header.producer_id] = header.producer_epoch
        self.next_sequence[header.producer_id] = (header.base_sequence + header.record_count) % 2**31

    def end(self, kind: str, producer_id: int, epoch: int, coordinator_epoch: int) -> None:
        coordinator_epoch = max(0, coordinator_epoch)
        marker_kind: MarkerKind = "commit" if kind == "commit" else "abort"
        before = copy.deepcopy(vars(self.log))
        decision = outcome(lambda: self.log.decide_marker(marker_kind, producer_id, epoch, coordinator_epoch))
        assert decision == self.model.decide_marker(producer_id, epoch, coordinator_epoch)
        assert_same_state(vars(self.log), before)
        if not isinstance(decision, Append):
            return
        header, marker = make_marker(
            marker_kind, producer_id, epoch, decision.base_offset, coordinator_epoch=coordinator_epoch
        )
        entry = self.log.replay_append(header, marker)
        self.model.stored.append((header, marker))
        expected = [found for found in self.model.aborted(0, 2**40) if found.last_offset == marker.offset]
        assert entry == (expected[0] if expected else None)
        if epoch != self.epoch[producer_id] or not any(h.producer_id == producer_id for h in self.sent):
            self.next_sequence[producer_id] = 0
        self.epoch[producer_id] = epoch

    def delete(self, offset: int) -> None:
        decision = outcome(lambda: self.log.decide_delete_records(offset))
        if offset > self.model.high_watermark:
            assert decision is ErrorCode.offset_out_of_range
            return
        assert decision == offset
        self.log.replay_log_start(offset)
        self.model.log_start_offset = offset

    def compare(self) -> None:
        log, model = self.log, self.model
        assert (log.log_start_offset, log.high_watermark) == (model.log_start_offset, model.high_watermark)
        assert log.log_end_offset == model.log_end_offset
        assert log.last_stable_offset == model.last_stable_offset
        assert list(log.all_aborted()) == sorted(model.aborted(0, 2**40), key=lambda entry: entry.last_offset)
        for from_offset in range(0, log.log_end_offset + 1, 3):
            for to_offset in (from_offset + 2, from_offset + 7, log.log_end_offset):
                assert log.aborted_transactions(from_offset, to_offset) == model.aborted(from_offset, to_offset)
        for producer_id in (1, 2, 3):
            assert log.producer_checks_for_transaction(producer_id) == model.open_since(producer_id)
        opened = [(entry.producer_id, entry.transaction_first_offset) for entry in log.open_transactions()]
        expected = [(found, first) for found, first, marker in model.transactions() if marker is None]
        assert opened == sorted(expected, key=lambda pair: pair[1])


def assert_same_state(state: dict[str, object], before: dict[str, object]) -> None:
    def flat(values: dict[str, object]) -> dict[str, object]:
        return {
            name: vars(value) if name in ("producers", "leader_epochs") else value for name, value in values.items()
        }

    assert flat(state) == flat(before)


@given(seed=SEEDS)
@settings(deadline=None)
def test_whatever_happens_the_log_answers_as_the_model_does(seed: int) -> None:
    """Appends, repeats, markers, watermarks and deletions in any order: decisions, LSO and aborted lists agree."""
    pair = Pair()
    for step in random_steps(seed):
        pair.run(step)


@given(seed=SEEDS, cut=st.floats(0, 1), again=st.integers(0, 9))
@settings(deadline=None)
def test_a_snapshot_and_the_rest_of_the_log_give_what_the_whole_log_gives(seed: int, cut: float, again: int) -> None:
    """Requirement A4: after a crash the producers, open transactions and aborted list are as they were."""
    pair = Pair()
    for step in random_steps(seed):
        if step[0] != "start":
            pair.run(step)
    stored = pair.model.stored
    taken_at = round(cut * len(stored))
    whole, earlier = PartitionLog(), PartitionLog()
    for number, (header, marker) in enumerate(stored):
        whole.replay_append(header, marker)
        if number < taken_at:
            earlier.replay_append(header, marker)
    recovered = PartitionLog()
    recovered.load_snapshot(earlier.encode_snapshot(), earlier.log_end_offset)
    recovered.load_aborted(whole.all_aborted())
    # Some batches before the snapshot are read again: they must change nothing.
    for header, marker in stored[max(0, taken_at - again) :]:
        recovered.replay_append(header, marker)
    for log in (whole, recovered):
        log.replay_high_watermark(log.log_end_offset)
    assert recovered.log_end_offset == whole.log_end_offset
    assert recovered.last_stable_offset == whole.last_stable_offset
    assert recovered.all_aborted() == whole.all_aborted()
    assert [shortened(entry) for entry in recovered.active_producers()] == [
        shortened(entry) for entry in whole.active_producers()
    ]
    assert [entry.producer_id for entry in recovered.open_transactions()] == [
        entry.producer_id for entry in whole.open_transactions()
    ]
    assert recovered.encode_snapshot() == whole.encode_snapshot()


def shortened(entry: ProducerEntry) -> ProducerEntry:
    """What a snapshot keeps: the last batch, with the timestamp of the last entry."""
    last = tuple(batch._replace(timestamp_ms=0) for batch in entry.batches[-1:])
    return replace(entry, batches=last)


def test_the_coordinators_own_batches_need_no_sequence() -> None:
    """Transactional offset commits are written by the broker itself."""
    log = PartitionLog()
    header = make_header(producer_id=7, producer_epoch=0, base_sequence=-1, transactional=True)
    append(log, header, from_client=False)
    append(log, header, from_client=False)
    assert log.producer_checks_for_transaction(7) == 0
    assert log.producer_checks_for_transaction(7, 0) == 0
    assert log.producer_checks_for_transaction(7, 1) is None


def test_a_repeat_after_the_log_went_on_gets_its_first_offset() -> None:
    """Requirement A1."""
    log = PartitionLog()
    first = make_header(producer_id=7, producer_epoch=0, base_sequence=0, count=2)
    append(log, first)
    append(log, make_header(count=5))
    assert log.decide_append(first, now_ms=0) == Duplicate(0, 1, 1000)


def test_the_last_stable_offset_waits_for_the_marker_to_be_below_the_high_watermark() -> None:
    """A marker that is not durable yet may vanish in a crash, and with it the outcome that a reader has seen."""
    log = PartitionLog()
    append(log, make_header(count=2))
    append(log, transactional(7, 0, count=3))
    log.replay_high_watermark(5)
    assert log.last_stable_offset == 2
    end(log, "commit", 7)
    assert log.last_stable_offset == 2
    log.replay_high_watermark(6)
    assert log.last_stable_offset == 6


def test_the_high_watermark_never_runs_back_nor_past_the_end() -> None:
    """Readers would otherwise lose records that they have seen, or be shown what is not there."""
    log = PartitionLog()
    append(log, make_header(count=4))
    log.replay_high_watermark(3)
    log.replay_high_watermark(1)
    assert log.high_watermark == 3
    log.replay_high_watermark(99)
    assert log.high_watermark == 4


def test_records_are_deleted_up_to_the_high_watermark_and_no_further() -> None:
    """-1 stands for the high watermark; what is already deleted stays so."""
    log = PartitionLog()
    append(log, make_header(count=10))
    log.replay_high_watermark(6)
    assert log.decide_delete_records(-1) == 6
    assert log.decide_delete_records(4) == 4
    log.replay_log_start(log.decide_delete_records(4))
    assert log.decide_delete_records(2) == 4
    for offset in (7, -2):
        assert outcome(lambda at=offset: log.decide_delete_records(at)) is ErrorCode.offset_out_of_range


def test_deleting_the_start_of_an_open_transaction_leaves_it_open() -> None:
    """Its later records still wait for the outcome; the last stable offset never lies below the log start."""
    log = PartitionLog()
    append(log, transactional(7, 0, count=4))
    append(log, make_header(count=2))
    log.replay_high_watermark(6)
    log.replay_log_start(3)
    assert log.last_stable_offset == 3
    assert end(log, "abort", 7) == AbortedTransaction(7, 0, 6, 7)
    log.replay_high_watermark(7)
    assert log.last_stable_offset == 7
    log.replay_log_start(7)
    assert log.all_aborted() == ()


def test_recovery_may_begin_in_the_middle_of_a_batch() -> None:
    """DeleteRecords cuts anywhere, and the batch around the log start is still on disk."""
    log = PartitionLog(5)
    log.replay_append(make_header(base_offset=0, count=3))
    log.replay_append(at_offset(transactional(7, 0, count=4), 3))
    log.replay_append(make_header(base_offset=20))
    assert log.log_end_offset == 21
    log.replay_high_watermark(21)
    assert log.last_stable_offset == 5
    with pytest.raises(ValueError, match="cannot follow"):
        log.replay_append(make_header(base_offset=19, count=5))


def test_a_damaged_snapshot_leaves_the_log_as_it_was() -> None:
    """Recovery tries an older one next."""
    log = PartitionLog(3)
    with pytest.raises(CorruptRecords):
        log.load_snapshot(b"\0\1nonsense", 9)
    assert log.log_end_offset == 3
    log.replay_append(make_header(base_offset=3))
    with pytest.raises(ValueError, match="cannot be loaded"):
        log.load_snapshot(PartitionLog().encode_snapshot(), 9)


def test_aborted_transactions_are_found_though_their_markers_lie_beyond_the_range() -> None:
    """Clients need every transaction that overlaps, by first offset, also where one that began later ended first."""
    log = PartitionLog()
    append(log, transactional(1, 0))
    append(log, transactional(2, 0))
    append(log, transactional(3, 0))
    for producer_id in (3, 2, 1):
        end(log, "abort", producer_id)
    assert [entry.producer_id for entry in log.aborted_transactions(0, 2)] == [1, 2]
    assert [entry.producer_id for entry in log.aborted_transactions(4, 6)] == [1, 2]
    assert [entry.last_stable_offset for entry in log.all_aborted()] == [0, 0, 6]


def test_batches_that_the_snapshot_covers_change_nothing() -> None:
    """Recovery reads from the start of a segment: an abort before the snapshot must not be listed twice."""
    log = PartitionLog()
    append(log, transactional(7, 0))
    end(log, "abort", 7)
    recovered = PartitionLog()
    recovered.load_snapshot(log.encode_snapshot(), 2)
    recovered.load_aborted(log.all_aborted())
    recovered.replay_append(at_offset(transactional(7, 0), 0))
    recovered.replay_append(*make_marker("abort", 7, 0, 1))
    assert recovered.all_aborted() == log.all_aborted()
    assert recovered.log_end_offset == 2


def test_forgotten_aborts_leave_the_index() -> None:
    """On a compacted topic the log start never moves, so the list would otherwise grow for ever."""
    log = PartitionLog()
    for sequence in range(3):
        append(log, transactional(7, sequence))
        end(log, "abort", 7)
    log.replay_forgotten_aborts(log.aborted_transactions(2, 4))
    assert [entry.first_offset for entry in log.all_aborted()] == [0, 4]
