"""The records of `__transaction_state`: Kafka's own bytes, and damage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.transaction_records import (
    TransactionTombstone,
    decode_transaction,
    encode_key,
    encode_tombstone,
    encode_transaction,
)
from semel.core.transactions import TransactionMetadata, TransactionStatus
from semel.errors import CorruptRecords

EMPTY = TransactionMetadata(
    "id",
    1234567890123,
    previous_producer_id=1234567890123,
    producer_epoch=5,
    timeout_ms=60_000,
    last_update_ms=1700000000000,
)
ONGOING = TransactionMetadata(
    "id",
    7,
    producer_epoch=5,
    timeout_ms=60_000,
    status=TransactionStatus.ONGOING,
    partitions=frozenset({("orders", 0), ("orders", 7)}),
    start_ms=1700000000001,
    last_update_ms=1700000000002,
)
PREPARED = TransactionMetadata(
    "id",
    7,
    previous_producer_id=7,
    next_producer_id=8,
    producer_epoch=32767,
    timeout_ms=60_000,
    status=TransactionStatus.PREPARE_COMMIT,
    partitions=frozenset({("orders", 0), ("orders", 7)}),
    start_ms=1700000000001,
    last_update_ms=1700000000002,
    client_transaction_version=2,
)
# Written by TransactionLog of Apache Kafka 4.3, which lists partitions in the order of a hash; here they are sorted.
HEAD_OF_EMPTY = "0000011f71fb04cb00050000ea6000"
FROM_KAFKA = [
    (0, EMPTY, f"0000{HEAD_OF_EMPTY}ffffffff0000018bcfe56800ffffffffffffffff"),
    (1, EMPTY, f"0001{HEAD_OF_EMPTY}000000018bcfe56800ffffffffffffffff0100080000011f71fb04cb"),
    (2, EMPTY, f"0001{HEAD_OF_EMPTY}000000018bcfe56800ffffffffffffffff0100080000011f71fb04cb"),
    (
        0,
        ONGOING,
        "0000000000000000000700050000ea60010000000100066f7264657273000000020000000000000007"
        "0000018bcfe568020000018bcfe56801",
    ),
    (
        2,
        PREPARED,
        "000100000000000000077fff0000ea600202076f7264657273030000000000000007000000018bcfe568020000018bcfe56801"
        "03000800000000000000070108000000000000000802020002",
    ),
]

names = st.text(max_size=30)
int16 = st.integers(-1, 2**15 - 1)
int64 = st.integers(-1, 2**63 - 1)
partitions = st.frozensets(st.tuples(st.text(min_size=1, max_size=10), st.integers(0, 2**31 - 1)), max_size=8)


@st.composite
def transactions(draw: st.DrawFn) -> TransactionMetadata:
    status = draw(st.sampled_from(TransactionStatus))
    return TransactionMetadata(
        draw(names),
        draw(int64),
        previous_producer_id=draw(int64),
        next_producer_id=draw(int64),
        next_producer_epoch=draw(int16),
        producer_epoch=draw(int16),
        last_producer_epoch=draw(int16),
        timeout_ms=draw(st.integers(0, 2**31 - 1)),
        status=status,
        partitions=frozenset() if status is TransactionStatus.EMPTY else draw(partitions),
        start_ms=draw(int64),
        last_update_ms=draw(int64),
        client_transaction_version=draw(st.integers(0, 2)),
    )


@pytest.mark.parametrize(("transaction_version", "metadata", "content"), FROM_KAFKA)
def test_the_bytes_are_kafkas(transaction_version: int, metadata: TransactionMetadata, content: str) -> None:
    """Other tools read the topic, in both versions of the value."""
    _, value = encode_transaction(metadata, transaction_version=transaction_version)
    assert value.hex() == content


def test_kafkas_order_of_partitions_reads_the_same() -> None:
    """A set has no order: these are the bytes of Kafka as they came."""
    value = (
        "000100000000000000077fff0000ea600202076f7264657273030000000700000000000000018bcfe568020000018bcfe56801"
        "03000800000000000000070108000000000000000802020002"
    )
    assert decode_transaction(encode_key("id"), bytes.fromhex(value)) == PREPARED


def test_the_key_is_kafkas() -> None:
    """Version 0, then the id with its length."""
    assert encode_key("größe-1").hex() == "000000096772c3b6c39f652d31"


@given(transactions(), st.integers(1, 2))
def test_a_record_comes_back_as_it_was(metadata: TransactionMetadata, transaction_version: int) -> None:
    """With tagged fields nothing is lost."""
    assert decode_transaction(*encode_transaction(metadata, transaction_version=transaction_version)) == metadata


@given(transactions())
def test_version_0_keeps_all_that_protocol_1_needs(metadata: TransactionMetadata) -> None:
    """As in Kafka: without tagged fields the previous, next and last identity and the client's version are lost."""
    back = decode_transaction(*encode_transaction(metadata, transaction_version=0))
    assert isinstance(back, TransactionMetadata)
    kept = ("transactional_id", "identity", "timeout_ms", "status", "partitions", "start_ms", "last_update_ms")
    assert [getattr(back, name) for name in kept] == [getattr(metadata, name) for name in kept]
    lost = (back.previous_producer_id, back.next_producer_id, back.last_producer_epoch, back.client_transaction_version)
    assert lost == (-1, -1, -1, 0)


@given(names)
def test_a_tombstone_comes_back(name: str) -> None:
    """A null value is the id's end."""
    assert decode_transaction(*encode_tombstone(name)) == TransactionTombstone(name)


def test_a_key_of_another_kind_is_stepped_over() -> None:
    """A newer Kafka may put other records into the topic."""
    assert decode_transaction(b"\x00\x01" + encode_key("id")[2:], None) is None


def test_unknown_tagged_fields_are_stepped_over() -> None:
    """KIP-482: newer releases add fields without a new version; on the record and within its partitions."""
    key, value = encode_transaction(PREPARED, transaction_version=2)
    own = "03000800000000000000070108000000000000000802020002"
    content = value.hex().replace(own, "04" + own[2:] + "0902abcd").replace("000000070000", "00000007010901ee00")
    assert decode_transaction(key, bytes.fromhex(content)) == PREPARED


def test_a_value_of_a_newer_version_is_not_forgotten_in_silence() -> None:
    """To step over it would be to forget a transaction."""
    key, value = encode_transaction(PREPARED, transaction_version=2)
    with pytest.raises(CorruptRecords, match="version 2 for 'id'"):
        decode_transaction(key, b"\x00\x02" + value[2:])


@pytest.mark.parametrize("transaction_version", [0, 2])
def test_every_cut_of_a_record_is_found(transaction_version: int) -> None:
    """No shorter value passes for a whole one."""
    key, value = encode_transaction(PREPARED, transaction_version=transaction_version)
    for size in range(len(value)):
        with pytest.raises(CorruptRecords, match="Restore the data directory"):
            decode_transaction(key, value[:size])
    for size in range(len(key)):
        with pytest.raises(CorruptRecords):
            decode_transaction(key[:size], value)


@given(st.binary(max_size=80), st.binary(max_size=80), st.sampled_from([b"", b"\x00\x00", b"\x00\x01"]))
def test_noise_is_refused_or_read_but_never_crashes(key: bytes, value: bytes, version: bytes) -> None:
    """Damage has one exception, whatever the bytes."""
    try:
        record = decode_transaction(b"\x00\x00" + key, version + value)
    except CorruptRecords:
        return
    assert isinstance(record, TransactionMetadata)


def test_a_status_that_does_not_exist_is_damage() -> None:
    """Eight states are known."""
    key, value = encode_transaction(EMPTY, transaction_version=2)
    with pytest.raises(CorruptRecords, match="status 9"):
        decode_transaction(key, value[:16] + b"\x09" + value[17:])


def test_where_a_commit_ended_survives_the_log_from_version_1_on() -> None:
    """Recovery tells by it whose records lie open; a value of version 0 has no room for it."""
    decided = TransactionMetadata(
        "id",
        7,
        status=TransactionStatus.PREPARE_COMMIT,
        partitions=frozenset({("b", 0), ("a", 1)}),
        end_offsets=(12, 2**40),
    )
    for version, expected in ((0, ()), (1, (12, 2**40)), (2, (12, 2**40))):
        read = decode_transaction(*encode_transaction(decided, transaction_version=version))
        assert isinstance(read, TransactionMetadata)
        assert read.end_offsets == expected
