"""One transaction, written by several processes under one producer id and epoch."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing

import pyarrow as pa
import pytest
from observer import records_of, values_of, wait_until_settled
from targets import KafkaUnderTest, NewTopic, Target

from semel.client.admin import Admin
from semel.client.producer import Producer
from semel.client.sender import Stored
from semel.client.shared import SharedTransaction, SharedWriter
from semel.errors import KafkaError
from semel.records import encode_table

PROCESSES = 3
PARTITIONS_EACH = 2
PARTITIONS = PROCESSES * PARTITIONS_EACH
ROWS = 5_000


def values_for(partition: int) -> list[bytes]:
    return [b"%d-%d" % (partition, row) for row in range(ROWS)]


def write_part(bootstrap: str, shared: SharedTransaction, topic: str, process: int) -> list[Stored]:
    """What each process does: write its own partitions, several batches each, and report what is stored."""
    with SharedWriter(shared, bootstrap_servers=bootstrap, batch_size=20_000) as writer:
        for partition in range(process * PARTITIONS_EACH, (process + 1) * PARTITIONS_EACH):
            writer.send_table(topic, partition, pa.table({"value": values_for(partition)}))
        return writer.flush()


@pytest.mark.parametrize("ends_in_commit", [True, False], ids=["commit", "abort"])
def test_three_processes_write_one_transaction(
    kafka: KafkaUnderTest, new_topic: NewTopic, ends_in_commit: bool
) -> None:
    """C3, B1: all of what three processes wrote is visible together, or none of it."""
    topic = new_topic(partitions=PARTITIONS)
    spawned = multiprocessing.get_context("spawn")
    with (
        Producer(bootstrap_servers=kafka.bootstrap, transactional_id=topic) as owner,
        ProcessPoolExecutor(PROCESSES, mp_context=spawned) as pool,
    ):
        owner.begin()
        shared = owner.share()
        parts = [pool.submit(write_part, kafka.bootstrap, shared, topic, process) for process in range(PROCESSES)]
        stored = [batch for part in parts for batch in part.result()]
        assert sum(batch.record_count for batch in stored) == PARTITIONS * ROWS
        assert values_of(kafka.bootstrap, topic, PARTITIONS) == []
        owner.adopt(stored)
        if ends_in_commit:
            owner.commit()
        else:
            owner.abort()
    wait_until_settled(kafka.bootstrap, topic, PARTITIONS)
    expected = {partition: values_for(partition) if ends_in_commit else [] for partition in range(PARTITIONS)}
    assert records_of(kafka.bootstrap, topic, PARTITIONS) == expected


def write_late(writer: SharedWriter, topic: str, partition: int) -> None:
    writer.send_table(topic, partition, pa.table({"value": [b"late"]}))
    writer.flush()


@pytest.mark.parametrize("ends_in_commit", [True, False], ids=["after commit", "after abort"])
def test_a_late_writer_is_refused_and_cannot_slip_into_the_next_transaction(
    kafka: KafkaUnderTest, new_topic: NewTopic, ends_in_commit: bool
) -> None:
    """B4: a zombie under the old epoch writes nothing that is ever seen, whichever way its transaction ended."""
    topic = new_topic(partitions=2)
    with Producer(bootstrap_servers=kafka.bootstrap, transactional_id=topic) as owner:
        owner.begin()
        shared = owner.share()
        with closing(SharedWriter(shared, bootstrap_servers=kafka.bootstrap)) as writer:
            writer.send_table(topic, 0, pa.table({"value": [b"in time"]}))
            owner.adopt(writer.flush())
            if ends_in_commit:
                owner.commit()
            else:
                owner.abort()
            wait_until_settled(kafka.bootstrap, topic, 2)
            owner.begin()
            owner.send(topic, b"next", partition=0)
            owner.flush()
            with pytest.raises(KafkaError):
                write_late(writer, topic, 0)
        with closing(SharedWriter(shared, bootstrap_servers=kafka.bootstrap)) as zombie, pytest.raises(KafkaError):
            write_late(zombie, topic, 1)
        owner.commit()
    wait_until_settled(kafka.bootstrap, topic, 2)
    expected = [b"in time", b"next"] if ends_in_commit else [b"next"]
    assert values_of(kafka.bootstrap, topic, 2) == expected


def test_a_second_attempt_repeats_nothing(kafka: KafkaUnderTest, target: Target, new_topic: NewTopic) -> None:
    """A1, A2: a retried task sends the same batches with the same sequences, and each is stored once.

    Within the five batches that a leader remembers a repeat is recognised; a longer one first asks
    where the leader stands, or has noted it where an old leader cannot tell.
    """
    topic = new_topic()
    batches = encode_table(pa.table({"value": values_for(0)}), batch_bytes_max=5_000, default_timestamp_ms=1)
    assert len(batches) > 8
    with Producer(bootstrap_servers=kafka.bootstrap, transactional_id=topic) as owner:
        owner.begin()
        shared = owner.share()
        with SharedWriter(shared, bootstrap_servers=kafka.bootstrap) as first_attempt:
            for batch in batches[:4]:
                first_attempt.send_encoded(topic, 0, batch)
        with SharedWriter(shared, bootstrap_servers=kafka.bootstrap) as second_attempt:
            for batch in batches[:8]:
                second_attempt.send_encoded(topic, 0, batch)
            owner.adopt(second_attempt.flush())
        stored_records = sum(batch.record_count for batch in batches[:8])
        admin = Admin(owner.cluster)
        if not target.is_refused(lambda: admin.describe_producers(topic, 0)):
            (leader_view,) = admin.describe_producers(topic, 0)
            assert (leader_view.producer_id, leader_view.producer_epoch) == shared.identity
            assert leader_view.last_sequence + 1 == stored_records
        with SharedWriter(shared, bootstrap_servers=kafka.bootstrap) as third_attempt:
            position = 0
            for batch in batches:
                if position >= stored_records:
                    first = position if position == stored_records else None
                    third_attempt.send_encoded(topic, 0, batch, first_sequence=first)
                position += batch.record_count
        owner.commit()
    assert records_of(kafka.bootstrap, topic, 1) == {0: values_for(0)}
