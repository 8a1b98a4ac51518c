"""Encoding and writing without Spark, on a real broker of both transaction protocols: retries, twins and zombies."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

import pyarrow as pa
import pytest
from stages import Blobs, encode, write
from topic_contents import contents, values

from semel.client.admin import Admin
from semel.client.producer import Producer
from semel.errors import ConfigError, KafkaError, RecordTooLarge, UnknownTopic
from semel.spark.blobs import unpack_error
from semel.spark.connections import close_connections
from semel.spark.once import check_written
from semel.spark.write import BlobsChanged

PARTITIONS = 2
_names = count()


@pytest.fixture(scope="module")
def bootstrap(bootstrap: str) -> Iterator[str]:
    yield bootstrap
    close_connections()


@pytest.fixture
def topic(bootstrap: str) -> str:
    name = f"out-{next(_names)}"
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics(name, partitions=PARTITIONS)
    return name


@pytest.fixture
def owner(bootstrap: str, topic: str) -> Iterator[Producer]:
    with Producer(bootstrap_servers=bootstrap, transactional_id=topic) as producer:
        yield producer


def some_rows(first: int, last: int) -> pa.Table:
    keys = [b"key-%d" % (number % 7) for number in range(first, last)]
    return pa.table({"key": keys, "value": [b"%07d" % number for number in range(first, last)]})


def many_blobs(bootstrap: str, topic: str, rows: int = 1_500, *, swapped: tuple[int, int] | None = None) -> Blobs:
    """Of two tasks; `swapped` are two rows of the second, counted there, that have changed places."""
    order = list(range(rows - rows // 2))
    if swapped is not None:
        one, other = swapped
        order[one], order[other] = other, one
    blobs = encode(bootstrap, topic, [some_rows(0, rows // 2), some_rows(rows // 2, rows).take(order)], PARTITIONS)
    assert blobs.manifest.blobs > 20, "more than a leader remembers"
    return blobs


def expected_values(rows: int = 1_500) -> list[bytes]:
    return [b"%07d" % number for number in range(rows)]


def test_what_is_encoded_is_written_in_order_within_each_key(bootstrap: str, topic: str, owner: Producer) -> None:
    """E4: everything arrives once, and records of one key keep the order they had in their task."""
    blobs = many_blobs(bootstrap, topic)
    owner.begin()
    stored = check_written(write(bootstrap, owner.share(), blobs), blobs.manifest)
    assert values(bootstrap, topic) == []
    owner.adopt(stored)
    owner.commit()
    seen = contents(bootstrap, topic)
    assert sorted(record.value or b"" for record in seen) == expected_values()
    for key in {record.key for record in seen}:
        of_key = [record.value for record in seen if record.key == key]
        assert of_key == sorted(of_key, key=lambda value: value or b"")


@pytest.mark.parametrize("written", [1, 9, 10_000], ids=["one chunk", "some chunks", "all of it"])
def test_a_second_attempt_goes_on_where_the_first_one_stopped(
    bootstrap: str, topic: str, owner: Producer, written: int
) -> None:
    """E2: an attempt that died anywhere is continued; nothing is stored twice, whatever the leader forgot."""
    blobs = many_blobs(bootstrap, topic)
    owner.begin()
    shared = owner.share()
    first = write(bootstrap, shared, blobs, blobs.batches(0, min(written, blobs.table.num_rows)))
    if written < blobs.table.num_rows:
        assert isinstance(unpack_error(first[0].error), BlobsChanged), "an attempt that saw too little does not pass"
    owner.adopt(check_written(write(bootstrap, shared, blobs, attempt=1), blobs.manifest))
    owner.commit()
    assert values(bootstrap, topic) == expected_values()


def test_a_first_attempt_of_a_repeated_stage_finds_what_is_there(bootstrap: str, topic: str, owner: Producer) -> None:
    """E2: Spark counts attempts from 0 again when it repeats a stage; the leader's refusal shows where to go on."""
    blobs = many_blobs(bootstrap, topic)
    owner.begin()
    shared = owner.share()
    write(bootstrap, shared, blobs)
    owner.adopt(check_written(write(bootstrap, shared, blobs, attempt=0), blobs.manifest))
    owner.commit()
    assert values(bootstrap, topic) == expected_values()


def test_two_attempts_at_the_same_time_write_once(
    bootstrap: str, topic: str, owner: Producer, rng: random.Random
) -> None:
    """E2: with speculation each attempt meets batches that its twin has stored, sometimes long ago."""
    blobs = many_blobs(bootstrap, topic)
    owner.begin()
    shared = owner.share()
    overtaken_at = rng.randrange(10)

    def overtaken() -> Iterator[pa.RecordBatch]:
        """The blobs; at one of them the other attempt does all of the work while this one waits."""
        for number, batch in enumerate(blobs.batches(rows=2)):
            if number == overtaken_at:
                check_written(write(bootstrap, shared, blobs, attempt=1), blobs.manifest)
            yield batch

    rows = write(bootstrap, shared, blobs, overtaken())
    owner.adopt(check_written(rows, blobs.manifest))
    owner.commit()
    assert values(bootstrap, topic) == expected_values()


@pytest.mark.parametrize("written", [6, 10_000], ids=["some of it", "all of it"])
def test_the_same_data_made_twice_is_as_good_as_the_first(
    bootstrap: str, topic: str, owner: Producer, written: int
) -> None:
    """E2: of a slow task and its twin, both may leave their data; as long as it is the same, either is written."""
    blobs, twin = many_blobs(bootstrap, topic), many_blobs(bootstrap, topic)
    owner.begin()
    shared = owner.share()
    write(bootstrap, shared, blobs, blobs.batches(0, min(written, blobs.table.num_rows)))
    owner.adopt(check_written(write(bootstrap, shared, blobs, twin.batches(), attempt=1), blobs.manifest))
    owner.commit()
    assert values(bootstrap, topic) == expected_values()


def test_blobs_that_were_made_anew_are_never_mixed_with_the_first_ones(
    bootstrap: str, topic: str, owner: Producer, rng: random.Random
) -> None:
    """E2: a lost and repeated map stage may order rows otherwise; no attempt writes such blobs in this transaction."""
    of_one_key = range(rng.randrange(7), 750, 7)
    one, other = rng.sample(of_one_key, 2)
    blobs, again = many_blobs(bootstrap, topic), many_blobs(bootstrap, topic, swapped=(one, other))
    owner.begin()
    shared = owner.share()
    write(bootstrap, shared, blobs, blobs.batches(0, 6))
    (row,) = write(bootstrap, shared, blobs, again.batches(), attempt=1)
    assert isinstance(unpack_error(row.error), BlobsChanged)
    with pytest.raises(BlobsChanged, match="made the data"):
        check_written([row], blobs.manifest)
    owner.abort()
    assert values(bootstrap, topic) == []


def test_a_late_attempt_writes_nothing_into_the_next_transaction(bootstrap: str, topic: str, owner: Producer) -> None:
    """E2: a zombie task wakes up after an abort while the same blobs are being written under the next epoch."""
    blobs = many_blobs(bootstrap, topic)
    owner.begin()
    zombie = owner.share()
    write(bootstrap, zombie, blobs, blobs.batches(0, 6))
    owner.abort()
    owner.begin()
    shared = owner.share()
    write(bootstrap, shared, blobs, blobs.batches(0, 12))
    (row,) = write(bootstrap, zombie, blobs)
    assert isinstance(unpack_error(row.error), KafkaError)
    owner.adopt(check_written(write(bootstrap, shared, blobs, attempt=1), blobs.manifest))
    owner.commit()
    assert values(bootstrap, topic) == expected_values()


def test_an_attempt_that_is_late_for_the_commit_changes_nothing(bootstrap: str, topic: str, owner: Producer) -> None:
    """E2: a twin still runs when its transaction is committed, and the next one is as good as the first."""
    blobs = many_blobs(bootstrap, topic)
    owner.begin()
    shared = owner.share()
    owner.adopt(check_written(write(bootstrap, shared, blobs), blobs.manifest))
    owner.commit()
    write(bootstrap, shared, blobs)
    assert values(bootstrap, topic) == expected_values()
    owner.begin()
    owner.adopt(check_written(write(bootstrap, owner.share(), blobs), blobs.manifest))
    owner.commit()
    assert values(bootstrap, topic) == sorted(2 * expected_values())


def test_what_is_missing_in_the_tasks_reports_stops_the_commit(bootstrap: str, topic: str, owner: Producer) -> None:
    """E2: the counts of all tasks must add up to the manifest."""
    blobs = many_blobs(bootstrap, topic)
    owner.begin()
    rows = write(bootstrap, owner.share(), blobs)
    with pytest.raises(BlobsChanged, match="of 1500 records were written"):
        check_written(rows[1:], blobs.manifest)


def test_rows_say_their_topic_partition_and_headers(bootstrap: str, topic: str, owner: Producer) -> None:
    """E4: several output topics, chosen partitions, headers, rows without key and tombstones."""
    table = pa.table(
        {
            "topic": [topic, topic],
            "partition": pa.array([1, None], pa.int32()),
            "key": pa.array([None, b"k"], pa.binary()),
            "value": pa.array([b"v", None], pa.binary()),
            "headers": pa.array(
                [[{"key": "h", "value": b"1"}], None],
                pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
            ),
        }
    )
    blobs = encode(bootstrap, None, [table], 0, compression_type="zstd")
    owner.begin()
    owner.adopt(check_written(write(bootstrap, owner.share(), blobs), blobs.manifest))
    owner.commit()
    seen = {(record.key, record.value): record for record in contents(bootstrap, topic)}
    assert seen[(None, b"v")].partition == 1
    assert seen[(None, b"v")].headers == (("h", b"1"),)
    assert set(seen) == {(None, b"v"), (b"k", None)}


def test_errors_in_rows_reach_the_driver_as_what_they_are(bootstrap: str, topic: str) -> None:
    """E2: a task's error is a value, not a stack trace in a text, and Spark does not repeat the task for it."""
    missing = pa.table({"topic": ["not-there"], "value": [b"v"]})
    with pytest.raises(UnknownTopic, match="not-there"):
        encode(bootstrap, None, [missing], 0)
    with pytest.raises(ConfigError, match="Partition 7 was asked for"):
        encode(bootstrap, topic, [pa.table({"value": [b"v"], "partition": pa.array([7], pa.int32())})], PARTITIONS)
    with pytest.raises(RecordTooLarge, match=r"max\.request\.size"):
        encode(bootstrap, topic, [pa.table({"value": [b"v" * 2_000_000]})], PARTITIONS)
