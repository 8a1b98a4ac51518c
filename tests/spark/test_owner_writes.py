"""What the driver writes over two connections, on a real broker of both transaction protocols."""

from __future__ import annotations

import random
import threading
from itertools import count
from typing import Any

import pyarrow as pa
import pytest
from topic_contents import contents, values

from semel.client.admin import Admin
from semel.client.config import ProducerConfig
from semel.client.partitions import TopicPartition
from semel.client.routing import encode_rows
from semel.client.shared import SharedWriter
from semel.errors import ConnectionLost, TransactionAborted, UnknownTopic
from semel.spark import owner
from semel.spark.blobs import Piece
from semel.spark.ledger import Entry
from semel.spark.options import make_options
from semel.spark.owner import PipelineFenced, PipelineOwner

PARTITIONS = 3
_names = count()


@pytest.fixture
def topic(bootstrap: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(owner, "MUCH_BYTES", 1)
    name = f"out-{next(_names)}"
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics(name, partitions=PARTITIONS)
    return name


def take_over(bootstrap: str, topic: str, **settings: object) -> PipelineOwner:
    options = make_options(name=topic, bootstrap=bootstrap, topic=topic, settings=settings, more_settings={})
    return PipelineOwner(options, topic)


def expected() -> list[bytes]:
    return [b"%05d" % number for number in range(1_500)]


def pieces(topic: str) -> list[Piece]:
    """Many small batches, those of each partition in the order of their numbers."""
    config = ProducerConfig(batch_bytes=300)
    by_partition = [
        [
            Piece(TopicPartition(topic, partition), batch)
            for batch in encode_rows(pa.table({"value": expected()[partition::PARTITIONS]}), config, now_ms=0)
        ]
        for partition in range(PARTITIONS)
    ]
    chance = random.Random(7)
    mixed: list[Piece] = []
    while any(by_partition):
        mixed.append(chance.choice([left for left in by_partition if left]).pop(0))
    return mixed


def commit(pipeline: PipelineOwner, stored: list[Any], batch: int = 0) -> None:
    pipeline.settle(stored, Entry(query="q", batch=batch), {})


def test_both_connections_write_all_of_it_once_and_in_order(bootstrap: str, topic: str) -> None:
    """E2, E3: two transactions one after the other, each partition over one connection."""
    pipeline = take_over(bootstrap, topic)
    for batch in range(2):
        pipeline.begin()
        stored = pipeline.write(pieces(topic))
        assert sum(part.record_count for part in stored) == 1_500
        commit(pipeline, stored, batch)
    pipeline.close()
    for partition in range(PARTITIONS):
        seen = [record.value for record in contents(bootstrap, topic) if record.partition == partition]
        assert seen == expected()[partition::PARTITIONS] * 2


@pytest.mark.parametrize("is_first_half", [True, False])
def test_a_failure_on_either_connection_fails_the_write_and_nothing_is_seen(
    bootstrap: str, topic: str, is_first_half: bool
) -> None:
    """E2: the other connection has come to its end by then, so that the abort finds nothing on its way."""
    pipeline = take_over(bootstrap, topic, **{"delivery.timeout.ms": 2_000, "request.timeout.ms": 1_000})
    good = pieces(topic)
    bad = [piece._replace(partition=TopicPartition("no-such-topic", 0)) for piece in good]
    # The larger half goes first.
    mixed = [*bad, *good[:10]] if is_first_half else [*good, *bad[:2]]
    pipeline.begin()
    with pytest.raises(UnknownTopic):
        pipeline.write(mixed)
    assert not any("ThreadPool" in thread.name for thread in threading.enumerate())
    pipeline.abort()
    pipeline.begin()
    commit(pipeline, pipeline.write(pieces(topic)))
    pipeline.close()
    assert values(bootstrap, topic) == expected()


def test_the_second_connection_may_be_lost_and_comes_again(
    bootstrap: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E2: an attempt that lost it is aborted, and the next one is whole."""
    pipeline = take_over(bootstrap, topic)
    flush, lost = SharedWriter.flush, [ConnectionLost("cut by the test")]

    def flush_or_lose(self: SharedWriter) -> list[Any]:
        if lost:
            raise lost.pop()
        return flush(self)

    monkeypatch.setattr(SharedWriter, "flush", flush_or_lose)
    pipeline.begin()
    with pytest.raises(ConnectionLost):
        pipeline.write(pieces(topic))
    pipeline.begin()
    commit(pipeline, pipeline.write(pieces(topic)))
    pipeline.close()
    assert values(bootstrap, topic) == expected()


def test_who_was_taken_over_is_told_so_on_both_connections(bootstrap: str, topic: str) -> None:
    """E2: a driver that wakes up behind a newer one stops with one sentence."""
    older = take_over(bootstrap, topic)
    older.begin()
    newer = take_over(bootstrap, topic)
    newer.begin()
    commit(newer, newer.write(pieces(topic)))
    with pytest.raises((TransactionAborted, PipelineFenced)):
        older.write(pieces(topic))
    with pytest.raises(PipelineFenced, match="Another run of pipeline"):
        older.abort()
    older.close()
    newer.close()
    assert values(bootstrap, topic) == expected()
