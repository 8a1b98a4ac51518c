"""Sequences, epochs and fences of one partition's producers, and the snapshot that carries them over a restart."""

from __future__ import annotations

import copy
import struct
import tracemalloc
from collections.abc import Callable

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode
from partition_model import at_offset, make_header, make_marker

from semel.core.producer_snapshot import decode_snapshot, encode_snapshot
from semel.core.producer_state import (
    Duplicate,
    LastRecord,
    ProducerBatch,
    ProducerEntry,
    ProducerStates,
)
from semel.core.refusal import Refused
from semel.errors import CorruptRecords

SEQUENCE_MAX = 2**31 - 1


def refused(call: Callable[[], object]) -> ErrorCode:
    with pytest.raises(Refused) as caught:
        call()
    return caught.value.code


def send(states: ProducerStates, *, offset: int, sequence: int, epoch: int = 0, count: int = 1, **more: bool) -> None:
    """Decide and replay one batch of producer 7."""
    header = make_header(producer_id=7, producer_epoch=epoch, base_sequence=sequence, count=count, **more)
    assert states.decide_batch(header, now_ms=0) is None
    states.replay_batch(at_offset(header, offset))


def decide(states: ProducerStates, *, sequence: int, epoch: int = 0, count: int = 1, **more: bool) -> Duplicate | None:
    protocol_2 = more.pop("protocol_2", False)
    header = make_header(producer_id=7, producer_epoch=epoch, base_sequence=sequence, count=count, **more)
    return states.decide_batch(header, now_ms=0, protocol_2=protocol_2)


def end(states: ProducerStates, *, offset: int, epoch: int, coordinator_epoch: int = 0) -> object:
    _, marker = make_marker("commit", 7, epoch, offset, coordinator_epoch=coordinator_epoch)
    return states.replay_marker(marker, offset, 1000)


def test_a_batch_without_producer_id_leaves_no_state() -> None:
    """Producers that did not ask for idempotence cost nothing and are never refused."""
    states = ProducerStates()
    header = make_header()
    assert states.decide_batch(header, now_ms=0) is None
    states.replay_batch(header)
    assert len(states) == 0
    assert states.memory_bytes() == 0


def test_an_unknown_producer_may_begin_with_any_sequence() -> None:
    """Its state may have been expired, or deleted with its records; it could otherwise never write again."""
    assert decide(ProducerStates(), sequence=41) is None


def test_the_last_five_batches_are_answered_as_duplicates_and_older_ones_refused() -> None:
    """Requirement A2: five batches, told by first and last sequence; the sixth back cannot be told from a gap."""
    states = ProducerStates()
    for number in range(6):
        send(states, offset=100 + 3 * number, sequence=3 * number, count=3)
    for number in range(1, 6):
        expected = Duplicate(100 + 3 * number, 102 + 3 * number, 1000)
        assert decide(states, sequence=3 * number, count=3) == expected
    assert refused(lambda: decide(states, sequence=0, count=3)) is ErrorCode.out_of_order_sequence_number


def test_a_repeat_cut_differently_is_not_a_duplicate() -> None:
    """Only the very same batch is safe to answer: another cut of the same records holds others too."""
    states = ProducerStates()
    send(states, offset=0, sequence=0, count=3)
    assert refused(lambda: decide(states, sequence=0, count=2)) is ErrorCode.out_of_order_sequence_number


def test_a_gap_is_refused() -> None:
    """Requirement A3."""
    states = ProducerStates()
    send(states, offset=0, sequence=0)
    assert refused(lambda: decide(states, sequence=2)) is ErrorCode.out_of_order_sequence_number


def test_after_the_largest_sequence_comes_zero() -> None:
    """Sequences wrap at 2**31-1, between batches and inside of one, and duplicates are still found."""
    states = ProducerStates()
    send(states, offset=0, sequence=SEQUENCE_MAX - 1, count=2)
    assert refused(lambda: decide(states, sequence=1)) is ErrorCode.out_of_order_sequence_number
    send(states, offset=2, sequence=0, count=1)
    assert decide(states, sequence=SEQUENCE_MAX - 1, count=2) == Duplicate(0, 1, 1000)

    inside = ProducerStates()
    send(inside, offset=0, sequence=SEQUENCE_MAX, count=3)
    assert decide(inside, sequence=SEQUENCE_MAX, count=3) == Duplicate(0, 2, 1000)
    assert decide(inside, sequence=2) is None


def test_a_new_epoch_begins_at_sequence_zero() -> None:
    """Any other number means that an earlier batch of the new epoch was lost."""
    states = ProducerStates()
    send(states, offset=0, sequence=0)
    assert refused(lambda: decide(states, sequence=1, epoch=1)) is ErrorCode.out_of_order_sequence_number
    assert decide(states, sequence=0, epoch=1) is None


def test_an_older_epoch_is_fenced_even_when_it_repeats_an_accepted_batch() -> None:
    """Requirement B4: a zombie is told so, and not that its batch is stored."""
    states = ProducerStates()
    send(states, offset=0, sequence=0, epoch=0)
    send(states, offset=1, sequence=0, epoch=1)
    assert refused(lambda: decide(states, sequence=0, epoch=0)) is ErrorCode.invalid_producer_epoch


def test_a_batch_outside_the_open_transaction_is_refused() -> None:
    """It would be hidden or shown with a transaction that it is no part of."""
    states = ProducerStates()
    send(states, offset=0, sequence=0, transactional=True)
    assert refused(lambda: decide(states, sequence=1)) is ErrorCode.invalid_txn_state
    end(states, offset=1, epoch=0)
    assert decide(states, sequence=1) is None


def test_a_marker_of_the_same_epoch_keeps_the_sequences() -> None:
    """Protocol 1: the next transaction goes on counting, and a late repeat is still recognised."""
    states = ProducerStates()
    send(states, offset=0, sequence=0, transactional=True)
    end(states, offset=1, epoch=0)
    assert decide(states, sequence=0, transactional=True) == Duplicate(0, 0, 1000)
    assert decide(states, sequence=1, transactional=True) is None


def test_a_marker_with_a_bumped_epoch_starts_the_sequences_again() -> None:
    """Protocol 2: the old epoch is fenced at once, and the new one must begin at zero."""
    states = ProducerStates()
    send(states, offset=0, sequence=0, transactional=True)
    end(states, offset=1, epoch=1)
    assert refused(lambda: decide(states, sequence=1, transactional=True)) is ErrorCode.invalid_producer_epoch
    assert (
        refused(lambda: decide(states, sequence=1, epoch=1, transactional=True))
        is ErrorCode.out_of_order_sequence_number
    )
    assert decide(states, sequence=0, epoch=1, transactional=True) is None


def test_protocol_2_refuses_a_transaction_that_begins_in_the_middle() -> None:
    """KIP-890: without state, a sequence above zero means that the transaction's first batch is missing."""
    code = refused(lambda: decide(ProducerStates(), sequence=3, transactional=True, protocol_2=True))
    assert code is ErrorCode.out_of_order_sequence_number
    assert decide(ProducerStates(), sequence=3, transactional=True) is None
    assert decide(ProducerStates(), sequence=0, transactional=True, protocol_2=True) is None


def test_a_marker_completes_the_transaction_and_a_repeat_of_it_completes_nothing() -> None:
    """A coordinator that restarts sends its markers again."""
    states = ProducerStates()
    send(states, offset=4, sequence=0, transactional=True)
    _, marker = make_marker("abort", 7, 1, 5)
    completed = states.replay_marker(marker, 5, 2000)
    assert completed is not None
    assert (completed.producer_id, completed.first_offset, completed.last_offset, completed.is_aborted) == (
        7,
        4,
        5,
        True,
    )
    states.decide_marker(7, 1, 0, protocol_2=True)
    assert states.replay_marker(marker, 6, 2000) is None


def test_markers_of_old_epochs_and_old_coordinators_are_refused() -> None:
    """A coordinator that was replaced, or a marker that was overtaken, must not end the present transaction."""
    states = ProducerStates()
    end(states, offset=0, epoch=3, coordinator_epoch=5)
    states.decide_marker(7, 3, 5)
    states.decide_marker(7, 4, 6)
    states.decide_marker(8, 0, 0)
    assert refused(lambda: states.decide_marker(7, 2, 5)) is ErrorCode.invalid_producer_epoch
    assert refused(lambda: states.decide_marker(7, 3, 4)) is ErrorCode.transaction_coordinator_fenced


def test_protocol_2_refuses_a_late_marker_with_the_open_transactions_epoch() -> None:
    """The marker of transaction n has the epoch of the records of n+1; repeated late, it would end n+1."""
    states = ProducerStates()
    send(states, offset=0, sequence=0, epoch=1, transactional=True)
    assert refused(lambda: states.decide_marker(7, 1, 0, protocol_2=True)) is ErrorCode.invalid_producer_epoch
    states.decide_marker(7, 2, 0, protocol_2=True)
    states.decide_marker(7, 1, 0)


def test_batches_of_the_coordinator_are_checked_by_epoch_only() -> None:
    """Transactional offset commits carry no sequence; two in a row are no duplicates."""
    states = ProducerStates()
    header = make_header(producer_id=7, producer_epoch=1, base_sequence=-1, transactional=True)
    for offset in (0, 1):
        assert states.decide_batch(header, now_ms=0, from_client=False) is None
        states.replay_batch(at_offset(header, offset))
    old = make_header(producer_id=7, producer_epoch=0, base_sequence=-1, transactional=True)
    assert refused(lambda: states.decide_batch(old, now_ms=0, from_client=False)) is ErrorCode.invalid_producer_epoch


def test_an_emptied_marker_still_fences() -> None:
    """Compaction keeps a producer's last control batch, without its marker, for its epoch alone."""
    states = ProducerStates()
    header, _ = make_marker("commit", 7, 4, 9)
    states.replay_emptied_marker(header)
    assert refused(lambda: decide(states, sequence=0, epoch=3)) is ErrorCode.invalid_producer_epoch
    states.replay_emptied_marker(make_header(control=True))
    assert [entry.producer_id for entry in states] == [7]


def test_idle_producers_expire_but_never_one_with_an_open_transaction() -> None:
    """Requirement A7: an open transaction must find its end, however long that takes."""
    states = ProducerStates()
    states.replay_batch(make_header(producer_id=1, producer_epoch=0, base_sequence=0, timestamp_ms=1000))
    states.replay_batch(
        make_header(producer_id=2, producer_epoch=0, base_sequence=0, timestamp_ms=1000, transactional=True)
    )
    assert states.expired(1999, 1000) == ()
    assert states.expired(500, 1000) == ()
    assert states.expired(2000, 1000) == (1,)
    states.replay_expiry((1, 99))
    assert [entry.producer_id for entry in states] == [2]


def test_a_producer_that_sends_old_timestamps_is_not_idle() -> None:
    """A backfill with last year's event times would lose its protection against repeats in the middle of writing."""
    states = ProducerStates()
    states.replay_batch(make_header(producer_id=1, producer_epoch=0, base_sequence=0, timestamp_ms=5), now_ms=9_000)
    assert states.expired(9_999, 1_000) == ()
    assert states.expired(10_000, 1_000) == (1,)
    restarted = ProducerStates()
    restarted.replay_entries(decode_snapshot(encode_snapshot(states)), now_ms=50_000)
    assert restarted.expired(50_999, 1_000) == ()


def test_beyond_the_cap_the_least_recently_used_without_transaction_go() -> None:
    """Requirement A7: memory has a bound, and whoever is in the middle of something is spared."""
    states = ProducerStates(producers_max=3)
    sequences = dict.fromkeys(range(1, 6), 0)

    def use(producer_id: int, *, transactional: bool = False) -> list[int]:
        states.replay_batch(
            make_header(
                producer_id=producer_id,
                producer_epoch=0,
                base_sequence=sequences[producer_id],
                transactional=transactional,
            )
        )
        sequences[producer_id] += 1
        return [entry.producer_id for entry in states]

    use(1, transactional=True)
    use(2)
    use(3)
    assert use(2) == [1, 3, 2]
    assert use(4) == [1, 2, 4]
    assert use(5) == [1, 4, 5]
    assert states.evicted_count == 2


def test_the_cap_gives_way_when_all_have_open_transactions() -> None:
    """Forgetting an open transaction would show its records as committed."""
    states = ProducerStates(producers_max=1)
    for producer_id in (1, 2, 3):
        states.replay_batch(make_header(producer_id=producer_id, producer_epoch=0, base_sequence=0, transactional=True))
    assert len(states) == 3
    states.replay_batch(make_header(producer_id=4, producer_epoch=0, base_sequence=0))
    assert len(states) == 4


def test_the_memory_figure_is_within_a_third_of_what_is_allocated() -> None:
    """Requirement A7: the metric must be fit for capacity planning."""
    states = ProducerStates()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for producer_id in range(1000, 3000):
        for number in range(4):
            states.replay_batch(
                make_header(
                    producer_id=producer_id,
                    producer_epoch=0,
                    base_sequence=1000 + number,
                    base_offset=10**9 + producer_id * 4 + number,
                    timestamp_ms=1_700_000_000_000 + producer_id,
                )
            )
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.67 < states.memory_bytes() / (after - before) < 1.5


def test_what_is_handed_out_is_a_copy() -> None:
    """Nobody changes the state but replay."""
    states = ProducerStates()
    send(states, offset=0, sequence=0)
    for entry in (states.get(7), *states):
        assert entry is not None
        entry.producer_epoch = 99
    assert decide(states, sequence=1) is None


def test_last_records_name_the_batch_that_compaction_must_keep() -> None:
    """The last data batch, or none after an epoch bump, where the marker alone carries the epoch."""
    states = ProducerStates()
    send(states, offset=4, sequence=0, count=3)
    assert states.last_records() == {7: LastRecord(6, 0)}
    end(states, offset=7, epoch=1)
    assert states.last_records() == {7: LastRecord(None, 1)}


def test_the_snapshot_has_kafkas_layout() -> None:
    """Byte for byte: version, CRC-32C, count, then 46 bytes for each producer."""
    batch = ProducerBatch(last_sequence=11, last_offset=22, offset_delta=3, timestamp_ms=44)
    data = encode_snapshot([ProducerEntry(1, 2, 5, 44, 19, (batch,)), ProducerEntry(3, 4, -1, 55)])
    body = (
        struct.pack(">i", 2)
        + struct.pack(">qhiqiqiq", 1, 2, 11, 22, 3, 44, 5, 19)
        + struct.pack(">qhiqiqiq", 3, 4, -1, -1, 0, 55, -1, -1)
    )
    assert data == struct.pack(">hI", 1, crc32c(body)) + body
    assert decode_snapshot(data) == (ProducerEntry(1, 2, 5, 44, 19, (batch,)), ProducerEntry(3, 4, -1, 55))


@given(position=st.integers(0, 97), change=st.integers(1, 255), cut=st.integers(0, 97))
def test_a_damaged_snapshot_is_recognised(position: int, change: int, cut: int) -> None:
    """Any byte changed, or any part missing: recovery must fall back to an older one, never believe it."""
    data = encode_snapshot([ProducerEntry(1, 2, 5, 44, 19), ProducerEntry(3, 4)])
    assert len(data) == 2 + 4 + 4 + 2 * 46
    damaged = bytearray(data)
    damaged[position] ^= change
    for broken in (bytes(damaged), data[:cut], data + b"\0"):
        with pytest.raises(CorruptRecords, match="snapshot is damaged"):
            decode_snapshot(broken)


@pytest.mark.parametrize("count", [-1, 1, 3])
def test_a_snapshot_that_lies_about_its_count_is_recognised(count: int) -> None:
    """Even under a good checksum, such as another tool's bug would write."""
    body = struct.pack(">i", count) + encode_snapshot([ProducerEntry(1, 2), ProducerEntry(3, 4)])[10:]
    with pytest.raises(CorruptRecords, match=f"claims {count} producers"):
        decode_snapshot(struct.pack(">hI", 1, crc32c(body)) + body)


def test_deciding_changes_nothing() -> None:
    """If the append fails, all must be as if the request had never come."""
    states = ProducerStates()
    send(states, offset=0, sequence=0, transactional=True)
    before = copy.deepcopy(vars(states))
    decide(states, sequence=0)
    decide(states, sequence=1, transactional=True)
    refused(lambda: decide(states, sequence=9, transactional=True))
    refused(lambda: decide(states, sequence=1))
    decide(states, sequence=0, epoch=1, transactional=True)
    states.decide_marker(7, 0, 0)
    states.decide_marker(7, 1, 1)
    states.expired(10**15, 0)
    states.get(8)
    states.decide_batch(make_header(producer_id=8, producer_epoch=0, base_sequence=0), now_ms=0)
    assert vars(states) == before
