"""Visibility by batch against visibility by record."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, note
from hypothesis import strategies as st
from partition_log import PartitionLog, random_log

from semel.client.fetched import Window, decode_opened, open_records
from semel.client.visibility import AbortedTransaction, Visibility
from semel.records import BatchHeader, encode_control_batch, read_header
from semel.records.reference import Record, encode_batch


def read_all(log: PartitionLog, chance: random.Random, start: int, *, read_committed: bool) -> list[tuple[int, bytes]]:
    """Read to the end in responses of random size, as a fetcher does."""
    position, found = start, []
    stop = log.last_stable_offset if read_committed else log.end_offset
    while position < stop:
        data, aborted = log.serve(position, chance.choice([1, 100, 500, 5_000]), read_committed=read_committed)
        window = Window(position, read_committed=read_committed, last_stable_offset=log.last_stable_offset)
        opened = open_records(data, window, aborted)
        assert opened.next_offset > position, "no progress"
        table = decode_opened(opened, check_crc=True).table
        found += zip(table["offset"].to_pylist(), table["value"].to_pylist(), strict=True)
        position = opened.next_offset
    return found


@given(seed=st.integers(0, 2**32), read_committed=st.booleans(), start_fraction=st.floats(0, 1))
def test_whatever_the_interleaving_batches_show_what_the_records_say(
    seed: int, read_committed: bool, start_fraction: float
) -> None:
    """Random transactions, any start, any cut of the responses: the same records as the per-record model, in order."""
    note(f"seed {seed}")
    chance = random.Random(seed)
    log = random_log(chance, steps=chance.randrange(40))
    start = int(start_fraction * log.end_offset)

    found = read_all(log, chance, start, read_committed=read_committed)

    assert found == log.visible(start, log.end_offset, read_committed=read_committed)


def transactional(producer_id: int, base_offset: int, count: int = 1) -> BatchHeader:
    records = [Record(base_offset + number, 0, None, b"") for number in range(count)]
    return read_header(encode_batch(records, base_offset=base_offset, producer_id=producer_id, transactional=True))


def marker(producer_id: int, offset: int) -> BatchHeader:
    batch = encode_control_batch(
        "abort", producer_id=producer_id, producer_epoch=0, coordinator_epoch=0, timestamp_ms=0, base_offset=offset
    )
    return read_header(batch)


def test_after_its_abort_marker_the_same_producer_is_visible_again() -> None:
    """An aborted transaction ends at its marker and hides nothing of the next one."""
    visibility = Visibility([AbortedTransaction(7, 0)])

    assert not visibility.admits(transactional(7, 0), lambda: None)
    assert not visibility.admits(marker(7, 1), lambda: "abort")
    assert visibility.admits(transactional(7, 2), lambda: None)


def test_the_list_of_aborted_transactions_may_come_in_any_order() -> None:
    """Brokers list by the end of the transactions; an earlier begin further down must not be overlooked."""
    visibility = Visibility([AbortedTransaction(2, 5), AbortedTransaction(1, 0)])

    assert [
        visibility.admits(transactional(1, 0), lambda: None),
        visibility.admits(transactional(2, 5), lambda: None),
    ] == [
        False,
        False,
    ]


def test_records_outside_of_transactions_are_visible_within_an_aborted_one() -> None:
    """Only transactional batches are hidden, even if the id is the same."""
    visibility = Visibility([AbortedTransaction(7, 0)])
    plain = read_header(encode_batch([Record(1, 0, None, b"")], base_offset=1, producer_id=7))

    assert visibility.admits(plain, lambda: None)


def test_markers_are_unpacked_only_where_an_abort_is_awaited() -> None:
    """A log of many small committed transactions is read without unpacking a marker."""
    visibility = Visibility([])

    assert not visibility.admits(marker(7, 1), lambda: pytest.fail("nobody needs this marker"))
