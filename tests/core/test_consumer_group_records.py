"""KIP-848 records of `__consumer_offsets`: bytes as Apache Kafka 4.3 writes them, and back."""

from __future__ import annotations

from contextlib import suppress
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.consumer_group_records import (
    ConsumerGroupRecord,
    CurrentAssignment,
    CurrentAssignmentRecord,
    GroupEpochRecord,
    MemberMetadata,
    MemberMetadataRecord,
    MemberState,
    PartitionMetadataRecord,
    ResolvedRegex,
    ResolvedRegexRecord,
    TargetEpochRecord,
    TargetMemberRecord,
    decode,
    encode,
)
from semel.errors import WireError

T1, T2 = UUID("01020304-0506-0708-090a-0b0c0d0e0f10"), UUID("11121314-1516-1718-191a-1b1c1d1e1f20")

# Printed by Apache Kafka 4.3's own serializer for the same values.
KAFKA: list[tuple[ConsumerGroupRecord, str, str | None]] = [
    (GroupEpochRecord("g", 7, -2), "0003000167", "000000000007010008fffffffffffffffe"),
    (GroupEpochRecord("g", 7, 0), "0003000167", "00000000000700"),
    (GroupEpochRecord("g", None), "0003000167", None),
    (TargetEpochRecord("g", 9), "0006000167", "00000000000900"),
    (
        TargetMemberRecord("g", "m", {T2: frozenset([1]), T1: frozenset([5, 0])}),
        "000700016700016d",
        "0000030102030405060708090a0b0c0d0e0f10030000000000000005001112131415161718191a1b1c1d1e1f2002000000010000",
    ),
    (
        MemberMetadataRecord(
            "g", "m", MemberMetadata("i", None, "c", "/127.0.0.1", ("a", "b"), "x.*", 300_000, "range")
        ),
        "000500016700016d",
        "000002690002630b2f3132372e302e302e31030261026204782e2a000493e00672616e676501000100",
    ),
    (
        MemberMetadataRecord("g", "m", MemberMetadata(client_id="c", client_host="h")),
        "000500016700016d",
        "00000000026302680101ffffffff0001000100",
    ),
    (
        CurrentAssignmentRecord(
            "g",
            "m",
            CurrentAssignment(9, 8, MemberState.UNRELEASED_PARTITIONS, {T1: frozenset([0, 5])}, {T2: frozenset([1])}),
        ),
        "000800016700016d",
        "0000000000090000000802020102030405060708090a0b0c0d0e0f1003000000000000000500"
        "021112131415161718191a1b1c1d1e1f2002000000010000",
    ),
    (CurrentAssignmentRecord("g", "m", None), "000800016700016d", None),
    (
        ResolvedRegexRecord("g", "x.*", ResolvedRegex(("xa", "xb"), 3, 4)),
        "00100001670003782e2a",
        "0000030378610378620000000000000003000000000000000400",
    ),
]


@pytest.mark.parametrize(("record", "key", "value"), KAFKA, ids=lambda part: type(part).__name__)
def test_records_have_the_bytes_that_kafka_writes(record: ConsumerGroupRecord, key: str, value: str | None) -> None:
    """Other tools read `__consumer_offsets`, so each record has Kafka's bytes, and they are read back."""
    expected = bytes.fromhex(key), None if value is None else bytes.fromhex(value)
    assert encode(record) == expected
    assert decode(*expected) == record


names = st.text(max_size=12)
assignments = st.dictionaries(st.uuids(), st.frozensets(st.integers(0, 2**31 - 1), min_size=1, max_size=4), max_size=3)
int32s, int64s = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
records = st.one_of(
    st.builds(GroupEpochRecord, names, int32s, int64s),
    st.builds(GroupEpochRecord, names, st.none()),
    st.builds(PartitionMetadataRecord, names, st.just(False)),
    st.builds(
        MemberMetadataRecord,
        names,
        names,
        st.none()
        | st.builds(
            MemberMetadata,
            st.none() | names,
            st.none() | names,
            names,
            names,
            st.lists(names, max_size=3).map(tuple),
            names,
            int32s,
            st.none() | names,
        ),
    ),
    st.builds(TargetEpochRecord, names, st.none() | int32s),
    st.builds(TargetMemberRecord, names, names, st.none() | assignments),
    st.builds(
        CurrentAssignmentRecord,
        names,
        names,
        st.none()
        | st.builds(CurrentAssignment, int32s, int32s, st.sampled_from(MemberState), assignments, assignments),
    ),
    st.builds(
        ResolvedRegexRecord,
        names,
        names,
        st.none() | st.builds(ResolvedRegex, st.lists(names, max_size=3).map(tuple), int64s, int64s),
    ),
)


@given(records)
def test_every_record_comes_back_as_it_was(record: ConsumerGroupRecord) -> None:
    """Recovery reads what was logged."""
    assert decode(*encode(record)) == record


@given(records, st.data())
def test_damaged_bytes_are_told_and_never_crash(record: ConsumerGroupRecord, data: st.DataObject) -> None:
    """A cut value raises WireError, whose message says what to do; other damage may give another record."""
    key, value = encode(record)
    if value is not None:
        cut = data.draw(st.integers(0, len(value) - 1))
        with pytest.raises(WireError, match="Restore the data directory"):
            decode(key, value[:cut])
    with suppress(WireError):
        assert decode(key, data.draw(st.binary(max_size=40))) is not None


def test_partition_metadata_of_older_brokers_is_stepped_over() -> None:
    """Kafka before 4.1 wrote kind 4; only that it is there matters, and only its tombstone is written."""
    assert decode(bytes.fromhex("0004000167"), bytes.fromhex("00000100")) == PartitionMetadataRecord("g", present=True)
    assert encode(PartitionMetadataRecord("g", present=False)) == (bytes.fromhex("0004000167"), None)
    with pytest.raises(ValueError, match="no longer written"):
        encode(PartitionMetadataRecord("g", present=True))


def test_tagged_fields_of_a_newer_kafka_are_stepped_over() -> None:
    """Kafka 4.3 stamps the target's epoch with a time, and partitions with epochs (KIP-1251): both are left aside."""
    stamped = bytes.fromhex("0000000000090100080000011f71fb04cb")
    assert decode(bytes.fromhex("0006000167"), stamped) == TargetEpochRecord("g", 9)
    with_epochs = bytes.fromhex("000000000009000000080002" + T1.hex + "020000000101000502000000090100")
    decoded = decode(bytes.fromhex("000800016700016d"), with_epochs)
    assert decoded == CurrentAssignmentRecord(
        "g", "m", CurrentAssignment(9, 8, MemberState.STABLE, {T1: frozenset([1])}, {})
    )


def test_a_state_of_a_newer_kafka_is_read_as_unknown() -> None:
    """Such a member is later made to begin anew, instead of stopping the broker's start."""
    decoded = decode(bytes.fromhex("000800016700016d"), bytes.fromhex("0000000000090000000809010100"))
    assert isinstance(decoded, CurrentAssignmentRecord)
    assert decoded.current is not None
    assert decoded.current.state is MemberState.UNKNOWN


@pytest.mark.parametrize("kind", [0, 1, 2, 9, 15, 17, 99])
def test_kinds_of_others_are_none_of_our_business(kind: int) -> None:
    """Offsets, classic groups, share and streams groups live in the same topic."""
    assert decode(kind.to_bytes(2) + b"\x00\x01g", b"\x00\x00") is None


def test_a_value_of_an_unknown_version_is_refused() -> None:
    """Guessing at another layout could lose members silently."""
    with pytest.raises(WireError, match="unknown version 1"):
        decode(bytes.fromhex("0006000167"), bytes.fromhex("00010000000900"))
