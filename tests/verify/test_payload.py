"""Payloads: what goes in comes out, and no other bytes pass for one."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.errors import ConfigError, CorruptRecords
from semel.verify.payload import (
    BYTES_MAX,
    HEAD_BYTES,
    Payload,
    Payloads,
    decode,
    decode_many,
    encode,
    encode_many,
    number_keys,
)

INT32, INT64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
PAYLOADS = st.builds(
    Payload,
    origin=INT32,
    sequence=INT32,
    writer=INT32,
    transaction=INT32,
    value=INT64,
    partition=st.integers(-1, 2**15 - 1),
)
SIZES = st.integers(HEAD_BYTES, 300)


def row(payloads: Payloads, number: int) -> Payload:
    return Payload(*(int(getattr(payloads, name)[number]) for name in Payload._fields))


@given(PAYLOADS, SIZES)
def test_a_payload_comes_out_as_it_went_in(payload: Payload, size: int) -> None:
    """At every size from the least on, over the whole range of its numbers."""
    data = encode(payload, size)
    assert len(data) == size
    assert decode(data) == payload


@given(st.lists(st.tuples(PAYLOADS, SIZES), max_size=20), st.integers(0, 5))
def test_many_of_any_sizes_come_out_in_their_order(given: list[tuple[Payload, int]], skipped: int) -> None:
    """Also out of a slice of a larger array, and with nulls and noise between them."""
    values: list[bytes | None] = []
    for payload, size in given:
        values += [encode(payload, size), None, b"noise", b""]
    decoded = decode_many(pa.array([b"before"] * skipped + values, pa.binary()).slice(skipped))
    assert decoded.is_sound.tolist() == [True, False, False, False] * len(given)
    assert [row(decoded, 4 * number) for number in range(len(given))] == [payload for payload, _ in given]
    assert set(decoded.origin[~decoded.is_sound].tolist()) <= {-1}


@given(st.integers(0, 50), SIZES)
def test_many_of_one_size_are_what_one_at_a_time_would_be(count: int, size: int) -> None:
    """The vectorised form and the single one agree to the byte, with arrays and with one number for all."""
    numbers = np.arange(count)
    array = encode_many(
        count, size=size, origin=3, sequence=numbers, writer=5, transaction=-1, value=numbers * -7, partition=2
    )
    array.validate(full=True)
    assert array.to_pylist() == [encode(Payload(3, n, 5, -1, -7 * n, 2), size) for n in range(count)]
    decoded = decode_many(array)
    assert decoded.is_sound.all()
    assert decoded.sequence.tolist() == list(range(count))


def test_a_changed_or_missing_or_added_byte_is_always_noticed(rng: random.Random) -> None:
    """The checksum is over the whole payload, its filler too."""
    data = encode(Payload(1, 2, 3, 4, 5, 6), 90)
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << rng.randrange(8)
        for wrong in (bytes(changed), data[:place]):
            with pytest.raises(CorruptRecords, match="damaged"):
                decode(wrong)
    with pytest.raises(CorruptRecords):
        decode(data + b"x")
    with pytest.raises(CorruptRecords):
        decode(None)


def test_chosen_rows_keep_their_columns_together() -> None:
    """A mask and row numbers both choose."""
    decoded = decode_many(
        encode_many(4, origin=1, sequence=range(4), writer=2, transaction=0, value=[9, 8, 7, 6], partition=0)
    )
    assert decoded.chosen(decoded.value < 8).sequence.tolist() == [2, 3]
    assert row(decoded.chosen(np.array([1])), 0) == Payload(1, 1, 2, 0, 8, 0)


def test_a_size_that_cannot_be_is_refused() -> None:
    """Below the numbers themselves, or above what brokers take."""
    for size in (HEAD_BYTES - 1, BYTES_MAX + 1):
        with pytest.raises(ConfigError, match=str(size)):
            encode(Payload(0, 0, 0, 0, 0, 0), size)


def test_keys_are_equal_where_the_numbers_are() -> None:
    """Eight bytes each, which any client takes."""
    keys = number_keys(np.array([1, -1, 1, 2**40]))
    keys.validate(full=True)
    assert [int.from_bytes(key, "big", signed=True) for key in keys.to_pylist()] == [1, -1, 1, 2**40]
