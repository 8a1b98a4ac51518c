"""The records of `__consumer_offsets` that classic groups and offsets use, byte for byte as Kafka has them."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.group_records import (
    GroupMetadata,
    GroupRecord,
    LoggedRecord,
    OffsetAndMetadata,
    OffsetRecord,
    StoredMember,
    decode,
    encode,
)
from semel.errors import WireError

NAMES = st.text(max_size=30)
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
MEMBERS = st.builds(
    StoredMember, NAMES, st.none() | NAMES, NAMES, NAMES, st.integers(0, 2**31 - 1), INT32, st.binary(), st.binary()
)
METADATA = st.builds(
    GroupMetadata, NAMES, INT32, st.none() | NAMES, st.none() | NAMES, INT64, st.lists(MEMBERS, max_size=4).map(tuple)
)
OFFSETS = st.builds(OffsetAndMetadata, INT64, INT32, NAMES, INT64)
RECORDS = st.builds(OffsetRecord, NAMES, NAMES, INT32, st.none() | OFFSETS) | st.builds(
    GroupRecord, NAMES, st.none() | METADATA
)


@given(RECORDS)
def test_every_record_comes_back_as_it_was(record: LoggedRecord) -> None:
    """Nothing is lost between a decision and its replay after a restart."""
    assert decode(*encode(record)) == record


def test_an_offset_has_kafkas_bytes() -> None:
    """Key version 1 and value version 3, as Kafka 4 writes them and every tool reads them."""
    key, value = encode(OffsetRecord("g", "orders", 2, OffsetAndMetadata(42, 7, "m", 1000)))
    assert key == bytes.fromhex("0001 0001 67 0006") + b"orders" + bytes.fromhex("00000002")
    assert value == bytes.fromhex("0003 000000000000002a 00000007 0001 6d 00000000000003e8")


def test_an_offset_with_its_own_expiry_is_written_in_version_1() -> None:
    """The only version with an expiry time; it has no leader epoch, which is Kafka's loss as well."""
    value = OffsetAndMetadata(42, 7, "m", 1000, expire_timestamp_ms=2000)
    key, encoded = encode(OffsetRecord("g", "t", 0, value))
    assert encoded == bytes.fromhex("0001 000000000000002a 0001 6d 00000000000003e8 00000000000007d0")
    assert decode(key, encoded) == OffsetRecord("g", "t", 0, OffsetAndMetadata(42, -1, "m", 1000, 2000))


def test_a_group_has_kafkas_bytes() -> None:
    """Key version 2 and value version 3, the highest without tagged fields."""
    member = StoredMember("m", "i", "c", "/h", 60, 10, b"S", b"A")
    key, value = encode(GroupRecord("g", GroupMetadata("consumer", 5, "range", "m", 1000, (member,))))
    assert key == bytes.fromhex("0002 0001 67")
    assert value == (
        bytes.fromhex("0003 0008")
        + b"consumer"
        + bytes.fromhex("00000005 0005")
        + b"range"
        + bytes.fromhex("0001 6d 00000000000003e8 00000001")
        + bytes.fromhex("0001 6d 0001 69 0001 63 0002 2f68 0000003c 0000000a 00000001 53 00000001 41")
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0000 000000000000002a 0001 6d 00000000000003e8", OffsetAndMetadata(42, -1, "m", 1000)),
        ("0002 000000000000002a 0001 6d 00000000000003e8", OffsetAndMetadata(42, -1, "m", 1000)),
        ("0001 000000000000002a 0001 6d 00000000000003e8 ffffffffffffffff", OffsetAndMetadata(42, -1, "m", 1000)),
        ("0004 000000000000002a 00000007 02 6d 00000000000003e8 00", OffsetAndMetadata(42, 7, "m", 1000)),
        (
            f"0004 000000000000002a 00000007 02 6d 00000000000003e8 01 00 10 {'ab' * 16}",
            OffsetAndMetadata(42, 7, "m", 1000),
        ),
    ],
    ids=["version 0", "version 2", "version 1 without expiry", "version 4", "version 4 with topic id"],
)
def test_offsets_of_older_and_newer_kafkas_are_read(value: str, expected: OffsetAndMetadata) -> None:
    """A data directory may hold what another version has written."""
    for key_version in (b"\x00\x00", b"\x00\x01"):
        record = decode(key_version + b"\x00\x01g\x00\x01t\x00\x00\x00\x00", bytes.fromhex(value))
        assert record == OffsetRecord("g", "t", 0, expected)


def test_groups_of_older_and_newer_kafkas_are_read() -> None:
    """Before version 1 the rebalance time-out was the session time-out; version 4 has compact lengths and tags."""
    version_0 = bytes.fromhex(
        "0000 0001 70 00000005 ffff ffff 00000001 0001 6d 0001 63 0001 68 0000000a 00000000 00000000"
    )
    version_4 = bytes.fromhex(
        "0004 02 70 00000005 00 00 0000000000000001 02 02 6d 00 02 63 02 68 0000000f 0000000a 01 01 00 00"
    )
    member = StoredMember("m", None, "c", "h", 10, 10, b"", b"")
    assert decode(b"\x00\x02\x00\x01g", version_0) == GroupRecord("g", GroupMetadata("p", 5, None, None, -1, (member,)))
    slower = StoredMember("m", None, "c", "h", 15, 10, b"", b"")
    assert decode(b"\x00\x02\x00\x01g", version_4) == GroupRecord("g", GroupMetadata("p", 5, None, None, 1, (slower,)))


@pytest.mark.parametrize("kind", [3, 8, 16, 99, -1])
def test_other_kinds_of_keys_are_stepped_over(kind: int) -> None:
    """KIP-848 groups, share groups and what a newer Kafka adds share this topic."""
    assert decode(struct.pack(">h", kind) + b"whatever", b"\x00") is None


@given(RECORDS, st.data())
def test_damaged_bytes_are_told_and_never_guessed(record: LoggedRecord, data: st.DataObject) -> None:
    """A record cut short anywhere raises the one error that recovery knows."""
    key, value = encode(record)
    whole = key if value is None else value
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(WireError, match="__consumer_offsets"):
        decode(cut if value is None else key, None if value is None else cut)
