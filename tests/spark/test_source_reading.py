"""Batch reads of the Spark source, planned and read as Spark does it, on a real broker."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType
from source_world import BROKERS, World, rows_of, schema_of, started, values_of

import semel
from semel.broker.listeners import ListenerSettings
from semel.errors import (
    AuthenticationFailed,
    BrokerUnreachable,
    ConfigError,
    OffsetOutOfRange,
    RequestTimedOut,
    UnknownTopic,
)
from semel.spark.source import SemelSource
from semel.spark.source_offsets import OffsetRange
from semel.spark.source_read import SPARK_SCHEMA, read_range
from semel.spark.source_task import ReadTask
from semel.testing.embedded import EmbeddedBroker

CLEANING = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0.01",
    "internal.segment.bytes": "300",
    "delete.retention.ms": "0",
}


@pytest.fixture(scope="module", params=BROKERS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with started(request.param) as world:
        yield world


# -- columns -----------------------------------------------------------------------------------------------------------


def test_columns_have_the_arrow_types_that_spark_expects(world: World) -> None:
    """Spark refuses batches of any other type, down to the time zone and the names inside of a list."""
    spark = to_arrow_schema(schema_of(world.source("t", includeHeaders="true")), timezone="UTC")
    assert spark.equals(SPARK_SCHEMA)


def test_a_record_of_another_client_arrives_with_all_it_has(world: World) -> None:
    """Key, value, headers, time and place, null where there is nothing; a record without headers has null there."""
    topic = world.topic(partitions=2)
    producer = Producer({"bootstrap.servers": world.bootstrap})
    producer.produce(
        topic, key="k", value="v", partition=1, timestamp=1_700_000_000_123, headers=[("h", b"1"), ("n", None)]
    )
    producer.produce(topic, partition=1, timestamp=1_700_000_000_124)
    producer.flush()
    first, second = world.read(topic, includeHeaders="true")
    assert first == {
        "key": b"k",
        "value": b"v",
        "topic": topic,
        "partition": 1,
        "offset": 0,
        "timestamp": datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC),
        "timestampType": 0,
        "headers": [{"key": "h", "value": b"1"}, {"key": "n", "value": None}],
    }
    assert (second["key"], second["value"], second["headers"]) == (None, None, None)
    assert "headers" not in world.read(topic)[0]


def test_a_schema_of_fewer_columns_reads_only_these(world: World) -> None:
    """What is not asked for is not carried to Spark; what the source does not have is refused."""
    topic = world.topic()
    world.write(topic, "a")
    source = world.source(topic)
    reader = source.reader(StructType().add("offset", "long").add("value", "binary"))
    assert [row for task in reader.partitions() for row in rows_of(reader.read(task))] == [{"offset": 0, "value": b"a"}]
    with pytest.raises(ConfigError, match="The schema has value string, which the source does not give"):
        source.reader(StructType().add("value", "string"))
    with pytest.raises(ConfigError, match="The schema has amount int"):
        source.streamReader(StructType().add("amount", "integer"))


def test_small_batches_are_joined_and_large_ones_cut_before_they_go_to_spark(world: World) -> None:
    """Each record batch costs the JVM some time and memory: neither thousands of them nor giants."""
    topic = world.topic()
    with semel.Producer(world.settings | {"linger.ms": 0}) as producer:
        for number in range(40):
            producer.send_table(topic, pa.table({"value": [f"{number}-{n}" for n in range(25)]}))
            producer.flush()
        producer.send_table(topic, pa.table({"value": [b"x" * 10] * 70_000}))
    task = ReadTask(world.settings, ("offset",))
    sizes = [batch.num_rows for batch in read_range(task, OffsetRange(topic, 0, 0, 71_000))]
    assert sum(sizes) == 71_000
    assert max(sizes) <= 32_768
    assert len(sizes) <= 8


# -- what is visible ---------------------------------------------------------------------------------------------------


def test_only_committed_records_are_read_and_never_past_an_open_transaction(world: World) -> None:
    """The end of a read is the last stable offset: what lies behind it waits, committed or not."""
    topic = world.topic()
    world.write(topic, "plain")
    world.commit(topic, "committed")
    world.abort(topic, "aborted")
    with world.transaction(topic, "open") as producer:
        world.write(topic, "behind")
        assert values_of(world.read(topic)) == ["plain", "committed"]
        uncommitted = world.read(topic, kafka_isolation_level="read_uncommitted")
        assert values_of(uncommitted) == ["plain", "committed", "aborted", "open", "behind"]
        producer.commit()
    world.wait_stable(topic)
    assert values_of(world.read(topic)) == ["plain", "committed", "open", "behind"]


@pytest.mark.parametrize("min_partitions", [1, 2, 5, 40])
def test_a_range_is_read_exactly_across_markers_and_aborted_records(world: World, min_partitions: int) -> None:
    """However the offsets are cut, also where nothing but markers or aborted records is left before a cut."""
    topic = world.topic()
    for number in range(4):
        world.commit(topic, f"c{number}a", f"c{number}b")
        world.abort(topic, f"x{number}")
    rows = world.read(topic, minPartitions=str(min_partitions))
    assert values_of(rows) == [f"c{number}{part}" for number in range(4) for part in "ab"]
    assert [row["offset"] for row in rows] == [5 * number + part for number in range(4) for part in (0, 1)]


def test_gaps_of_compaction_are_passed_at_every_cut() -> None:
    """Compaction leaves offsets without a record, and removes tombstones; every cut still joins up."""
    with semel.Broker(config={"log.cleaner.backoff.ms": 50}) as broker:
        world = World(broker.bootstrap)
        topic = world.topic(config=CLEANING)
        for number in range(30):
            world.write(topic, f"v{number}", key=b"same" if number % 5 else b"other")
        with semel.Producer(world.settings) as producer:
            producer.send(topic, None, key=b"other", partition=0)
        world.write(topic, "last", key=b"last")
        deadline = time.monotonic() + 20
        while len(rows := world.read(topic)) > 8:
            assert time.monotonic() < deadline, "the log is not compacted"
        kept = {row["offset"] for row in rows}
        end = 32
        task = ReadTask(world.settings | {"default.api.timeout.ms": "3000"}, ("offset",))
        for cut in range(end + 1):
            head = [row["offset"] for row in rows_of(read_range(task, OffsetRange(topic, 0, 0, cut)))]
            tail = [row["offset"] for row in rows_of(read_range(task, OffsetRange(topic, 0, cut, end)))]
            assert all(offset < cut for offset in head)
            assert all(offset >= cut for offset in tail)
            # The cleaner may go on meanwhile, and only takes away.
            assert set(head) | set(tail) <= kept
            assert max(kept) in tail or cut == end
        world.close()


def test_an_end_inside_of_an_open_transaction_is_waited_for_and_named(world: World) -> None:
    """An end that a user writes may lie behind the last stable offset: the read waits, then says why."""
    topic = world.topic()
    with world.transaction(topic, "a", "b") as producer:
        options = {"endingOffsets": json.dumps({topic: {"0": 2}}), "kafka_default_api_timeout_ms": "500"}
        with pytest.raises(RequestTimedOut, match="A transaction may still be open"):
            world.read(topic, **options)
        producer.commit()
    world.wait_stable(topic)
    assert values_of(world.read(topic, **options)) == ["a", "b"]


# -- where to begin and end --------------------------------------------------------------------------------------------


def test_offsets_times_and_commits_say_where_to_begin_and_end(world: World) -> None:
    """All ways of Spark's Kafka source, and the offsets of a group."""
    topic = world.topic()
    for number in range(6):
        world.write(topic, f"v{number}", timestamp_ms=1_000 * (number + 1))

    def read(**options: str) -> str:
        return "".join(value[1] for value in values_of(world.read(topic, **options)))

    def at(number: int) -> str:
        return json.dumps({topic: {"0": number}})

    assert read(startingOffsets=at(2), endingOffsets=at(4)) == "23"
    assert read(startingOffsets=at(-2), endingOffsets=at(-1)) == "012345"
    assert read(startingTimestamp="3000", endingTimestamp="5000") == "23"
    assert read(startingOffsetsByTimestamp=at(2_500), endingOffsetsByTimestamp=at(4_001)) == "23"
    assert read(startingTimestamp="3000", endingTimestamp="99000") == "2345"
    assert read(startingTimestamp="99000", startingOffsetsByTimestampStrategy="latest") == ""
    with pytest.raises(ConfigError, match="has no record of 99000 ms or later; nothing was read"):
        read(startingTimestamp="99000")
    assert read(startingOffsets="committed", kafka_group_id="readers") == "012345"
    world.admin.commit_offsets("readers", {(topic, 0): 4})
    assert read(startingOffsets="committed", kafka_group_id="readers") == "45"
    assert read(endingOffsets="committed", group="readers") == "0123"
    assert read(startingOffsets=at(3), endingOffsets="committed", group="readers") == "3"


def test_the_offsets_of_a_transaction_that_is_open_are_waited_for(world: World) -> None:
    """Semel's sink commits its input offsets inside of its transactions: a reader must not begin with older ones."""
    topic, group = world.topic(), "sink"
    world.write(topic, "a", "b", "c")
    options = {"startingOffsets": "committed", "kafka_group_id": group, "kafka_default_api_timeout_ms": "400"}
    with world.transaction(topic) as producer:
        producer.send_offsets({semel.TopicPartition(topic, 0): 2}, group)
        with pytest.raises(semel.SemelError, match="UNSTABLE_OFFSET_COMMIT"):
            world.read(topic, **options)
        producer.commit()
    assert values_of(world.read(topic, **options)) == ["c"]


def test_a_group_without_commits_begins_where_the_user_says(world: World) -> None:
    """At the earliest offset by default; a mistyped group can be made an error."""
    topic = world.topic()
    world.write(topic, "a")
    options = {"startingOffsets": "committed", "kafka_group_id": "nobody"}
    assert values_of(world.read(topic, **options, kafka_auto_offset_reset="earliest")) == ["a"]
    assert values_of(world.read(topic, **options, kafka_auto_offset_reset="latest")) == []
    with pytest.raises(ConfigError, match="Group 'nobody' has committed no offset for topic 'topic-"):
        world.read(topic, **options, kafka_auto_offset_reset="none")


def test_topics_are_chosen_by_name_by_pattern_and_by_partition(world: World) -> None:
    """A pattern must match the whole name and leaves internal topics out."""
    for name in ("fruit-apple", "fruit-pear", "unfruit-x"):
        world.write(world.topic(name=name, partitions=2), name, partition=1)
    assert sorted(values_of(world.read("fruit-apple, unfruit-x"))) == ["fruit-apple", "unfruit-x"]
    assert sorted(values_of(world.read(None, subscribePattern="fruit-.*"))) == ["fruit-apple", "fruit-pear"]
    assert world.read(None, subscribePattern="nothing-.*") == []
    assert world.read(None, assign='{"fruit-pear":[0]}') == []
    assert values_of(world.read(None, assign='{"fruit-pear":[1]}')) == ["fruit-pear"]


def test_an_empty_topic_is_an_empty_table(world: World) -> None:
    """Spark makes up one partition where a source has none."""
    source = world.source(world.topic())
    reader = source.reader(schema_of(source))
    assert reader.partitions() == []


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"startingOffsets": '{"TOPIC":{"0":0}}'}, ConfigError, "has no entry for topic 'TOPIC' partition 1"),
        (
            {"endingOffsets": '{"TOPIC":{"0":0,"1":0,"2":0}}'},
            ConfigError,
            "has an entry for topic 'TOPIC' partition 2, which is not read or not there",
        ),
        (
            {"startingOffsets": '{"TOPIC":{"0":0,"1":50}}'},
            OffsetOutOfRange,
            "startingOffsets is 50 for topic 'TOPIC' partition 1, which ends at 1; nothing was read",
        ),
        ({"endingOffsets": '{"TOPIC":{"0":0,"1":9}}'}, OffsetOutOfRange, "endingOffsets is 9"),
    ],
)
def test_offsets_that_do_not_fit_the_topic_are_refused(
    world: World, options: dict[str, str], kind: type[Exception], message: str
) -> None:
    """When the query is planned, with the partition that is wrong."""
    topic = world.topic(partitions=2)
    world.write(topic, "a", partition=1)
    with pytest.raises(kind, match=message.replace("TOPIC", topic)):
        world.read(topic, **{name: value.replace("TOPIC", topic) for name, value in options.items()})


def test_a_topic_or_partition_that_is_not_there_is_named(world: World) -> None:
    """A reader never creates topics."""
    with pytest.raises(UnknownTopic, match="The cluster has no topic 'nowhere'"):
        world.read("nowhere")
    topic = world.topic()
    with pytest.raises(UnknownTopic, match=f"topic '{topic}' partition 7, which option assign names"):
        world.read(None, assign=json.dumps({topic: [0, 7]}))


def test_a_broker_that_is_not_there_and_a_wrong_password_are_told_apart() -> None:
    """Neither is retried for a minute when the user asks for less, and no message shows the password."""
    unreachable = SemelSource(
        {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "t", "kafka.default.api.timeout.ms": "300"}
    )
    with pytest.raises(BrokerUnreachable):
        unreachable.reader(schema_of(unreachable)).partitions()
    listener = ListenerSettings(security_protocol="SASL_PLAINTEXT", sasl_mechanisms=("PLAIN",))
    with EmbeddedBroker(listeners=[listener], plain_users={"ada": "right"}) as broker:
        options = {
            "kafka.bootstrap.servers": broker.bootstrap,
            "subscribe": "t",
            "kafka.security.protocol": "SASL_PLAINTEXT",
            "kafka.sasl.mechanism": "PLAIN",
            "kafka.sasl.username": "ada",
            "kafka.sasl.password": "wrong-secret",
        }
        source = SemelSource(options)
        with pytest.raises(AuthenticationFailed) as caught:
            source.reader(schema_of(source)).partitions()
        assert "wrong-secret" not in str(caught.value)


# -- losses ------------------------------------------------------------------------------------------------------------


def test_records_that_are_gone_fail_the_task_or_are_passed_over_with_a_warning(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Retention took them between the plan and the task: an error says which, unless the user accepts it."""
    topic = world.topic()
    world.write(topic, *"abcdef")
    world.admin.delete_records({(topic, 0): 4})
    wanted = OffsetRange(topic, 0, 1, 6)
    with pytest.raises(OffsetOutOfRange, match=r"are gone before they were read, offsets 1 to 4: the log begins at 4"):
        rows_of(read_range(ReadTask(world.settings, ("value",)), wanted))
    tolerant = ReadTask(world.settings, ("value",), fail_on_data_loss=False)
    assert values_of(rows_of(read_range(tolerant, wanted))) == ["e", "f"]
    assert "offsets 1 to 4: the log begins at 4 now" in caplog.text
    assert rows_of(read_range(tolerant, OffsetRange(topic, 0, 1, 3))) == []
    assert rows_of(read_range(tolerant, OffsetRange(topic, 0, 7, 9))) == []
    assert "the log ends at 6, it was cut off, or the topic was created again" in caplog.text


def test_a_topic_that_is_gone_fails_the_task_or_ends_it_with_a_warning(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """A deleted topic is looked for until default.api.timeout.ms, since it may only be moving."""
    settings = world.settings | {"default.api.timeout.ms": "300"}
    wanted = OffsetRange("gone", 0, 1, 6)
    with pytest.raises(UnknownTopic, match="offsets 1 to 6: the topic is gone"):
        rows_of(read_range(ReadTask(settings, ("value",)), wanted))
    assert rows_of(read_range(ReadTask(settings, ("value",), fail_on_data_loss=False), wanted)) == []
    assert "offsets 1 to 6: the topic is gone" in caplog.text


def test_records_that_go_while_a_task_reads_are_noticed() -> None:
    """Retention runs beside the reader: what was handed out stays, and the gap is named exactly."""
    with EmbeddedBroker() as broker:
        world = World(broker.bootstrap)
        topic = world.topic()
        with semel.Producer(world.settings) as producer:
            for number in range(60):
                producer.send_table(topic, pa.table({"value": [f"{number:>4}" * 250] * 100}))
                producer.flush()
        settings = world.settings | {"max.partition.fetch.bytes": "200000"}
        batches = read_range(ReadTask(settings, ("offset",)), OffsetRange(topic, 0, 0, 6_000))
        seen = next(batches).column("offset").to_pylist()
        world.admin.delete_records({(topic, 0): 5_990})
        with pytest.raises(OffsetOutOfRange, match=r"offsets \d+ to 5990: the log begins at 5990 now"):
            seen.extend(row["offset"] for batch in batches for row in batch.to_pylist())
        assert seen == list(range(len(seen)))
        world.close()


# -- cost --------------------------------------------------------------------------------------------------------------

_READ_IN_A_NEW_PROCESS = """
import sys
from semel.spark.source_offsets import OffsetRange
from semel.spark.source_read import SPARK_SCHEMA, ReadTask, read_range
task = ReadTask({"bootstrap.servers": sys.argv[1]}, tuple(SPARK_SCHEMA.names))
print(sum(batch.num_rows for batch in read_range(task, OffsetRange(sys.argv[2], 0, 0, int(sys.argv[3])))))
print(sorted({"pandas", "pyspark"} & set(sys.modules)))
"""


def test_reading_loads_neither_pandas_nor_pyspark(world: World) -> None:
    """Python workers of Spark begin by importing, and pyarrow brings pandas along wherever Python values come in."""
    topic = world.topic()
    with semel.Producer(world.settings) as producer:
        producer.send_table(topic, pa.table({"value": [f"{number:08}" for number in range(1000)]}))
        producer.flush()
        producer.send_table(topic, pa.table({"value": [f"{number}" for number in range(1000)]}))
    world.write(topic, "h", headers=[("h", b"1")])
    world.abort(topic, "x")
    command = [sys.executable, "-c", _READ_IN_A_NEW_PROCESS, world.bootstrap, topic, "2003"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["2001", "[]"]
