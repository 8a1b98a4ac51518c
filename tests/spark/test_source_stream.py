"""Streaming queries of the Spark source, micro-batch by micro-batch as Spark plans and runs them, on a real broker."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, ReadMinRows
from source_world import BROKERS, World, copy_of, started, through_json, values_of

from semel.errors import OffsetOutOfRange, UnknownTopic


@pytest.fixture(scope="module", params=BROKERS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with started(request.param) as world:
        yield world


def test_a_new_query_begins_with_what_is_new_or_where_it_is_told(world: World) -> None:
    """The default is the end of the log, which for a read_committed reader is the last stable offset."""
    topic = world.topic()
    world.write(topic, "a")
    with world.transaction(topic, "b") as producer:
        with world.stream(topic, startingOffsets="latest") as query:
            assert query.start().offsets == {topic: {"0": 1}}
            assert query.step() == []
            producer.commit()
            world.write(topic, "c")
            world.wait_stable(topic)
            assert query.values() == ["b", "c"]
        with world.stream(topic) as query:
            assert query.values() == ["a", "b", "c"]
        with world.stream(topic, startingOffsets=json.dumps({topic: {"0": 1}})) as query:
            assert query.values() == ["b", "c"]


def test_open_transactions_hold_the_stream_back_and_nothing_is_lost_or_dirty(world: World) -> None:
    """Micro-batches end at the last stable offset, however transactions end afterwards."""
    topic = world.topic()
    with world.stream(topic) as query, world.transaction(topic, "x") as doomed:
        world.write(topic, "plain")
        assert query.values() == []
        with world.transaction(topic, "y") as late:
            doomed.abort()
            world.wait_stable(topic, offset=2)
            assert query.values() == ["plain"]
            late.commit()
        world.wait_stable(topic)
        assert query.values() == ["y"]
        assert query.step() == []
        assert query.offsets == {topic: {"0": 5}}


def test_what_random_transactions_commit_arrives_once_whatever_the_limit(world: World, rng: random.Random) -> None:
    """Every committed record once and in its partition's order, no aborted one, over many small micro-batches."""
    topic = world.topic(partitions=3)
    expected: dict[int, list[str]] = {0: [], 1: [], 2: []}
    with world.stream(topic, maxOffsetsPerTrigger="4", minPartitions="5") as query:
        query.start()
        seen: dict[int, list[str]] = {0: [], 1: [], 2: []}
        for number in range(12):
            partition, commits = rng.randrange(3), rng.random() < 0.6
            values = [f"{number}-{part}" for part in range(rng.randrange(1, 5))]
            (world.commit if commits else world.abort)(topic, *values, partition=partition)
            expected[partition] += values if commits else []
            for row in query.step() if rng.random() < 0.5 else ():
                seen[row["partition"]].append(row["value"].decode())
        ends = {"0": 0}
        while query.at != ends:
            ends = query.at
            for row in query.step():
                seen[row["partition"]].append(row["value"].decode())
    assert seen == expected


def test_a_micro_batch_can_be_replayed_from_its_checkpoint(world: World) -> None:
    """The same offsets give the same records, also in a new process and after more was written."""
    topic = world.topic(partitions=2)
    world.commit(topic, "a", "b")
    world.write(topic, "c", partition=1)
    with world.stream(topic) as query:
        query.start()
        start = query.at
        rows = query.step()
        end = query.at
    world.write(topic, "d")
    with world.stream(topic) as restarted:
        assert start is not None
        assert end is not None
        assert restarted.replay(start, end) == rows
        restarted.start(end)
        assert restarted.values() == ["d"]


def test_new_partitions_and_topics_are_read_from_their_first_record(world: World) -> None:
    """Also when their records came before the query saw them."""
    world.write(world.topic(name="new-a"), "a0")
    with world.stream(None, subscribePattern="new-.*", maxOffsetsPerTrigger="100") as query:
        assert query.values() == ["a0"]
        world.admin.create_partitions("new-a", 3)
        world.write("new-a", "a2", partition=2)
        world.write(world.topic(name="new-b"), "b0", "b1")
        assert sorted(query.values()) == ["a2", "b0", "b1"]
        assert query.offsets == {"new-a": {"0": 1, "1": 0, "2": 1}, "new-b": {"0": 2}}
        assert query.step() == []


def test_a_topic_added_to_the_query_is_no_loss_wherever_it_begins(world: World) -> None:
    """A restart with more topics reads the new one from what it still has; a partition that came and lost is a loss."""
    old, added = world.topic(), world.topic()
    world.write(added, "a", "b", "c")
    world.admin.delete_records({(added, 0): 1})
    with world.stream(f"{old},{added}") as query:
        assert query.start({old: {"0": 0}}).values() == ["b", "c"]
    world.admin.create_partitions(added, 2)
    world.write(added, "x", "y", partition=1)
    world.admin.delete_records({(added, 1): 1})
    with world.stream(added) as query, pytest.raises(OffsetOutOfRange, match="offsets 0 to 1: the partition is new"):
        query.start({added: {"0": 3}}).step()
    with world.stream(added, failOnDataLoss="false") as query:
        assert query.start({added: {"0": 3}}).values() == ["y"]


def test_limits_bound_a_micro_batch_and_everything_is_everything(world: World) -> None:
    """maxOffsetsPerTrigger is passed on by Spark, and a trigger that asks for all gets all."""
    topic = world.topic(partitions=2)
    world.write(topic, *"abcdefgh")
    world.write(topic, "z", partition=1)
    with world.stream(topic, maxOffsetsPerTrigger="5") as query:
        assert query.reader.getDefaultReadLimit() == ReadMaxRows(5)
        assert query.values() == ["a", "b", "c", "d", "z"]
        assert query.reader.reportLatestOffset() == {topic: {"0": 8, "1": 1}}
        assert query.values(ReadAllAvailable()) == ["e", "f", "g", "h"]
    with world.stream(topic, maxRecordsPerPartition="3") as query:
        assert query.reader.getDefaultReadLimit() == ReadAllAvailable()
        assert len(query.step()) == 9
        assert query.task_count == 4


def test_a_small_batch_waits_for_more_or_for_the_delay(world: World) -> None:
    """minOffsetsPerTrigger holds back, maxTriggerDelay lets go; the first batch goes at once, as in Spark's source."""
    topic, now = world.topic(), [1000.0]
    world.write(topic, "a")
    options = {"minOffsetsPerTrigger": "3", "maxTriggerDelay": "10s", "maxOffsetsPerTrigger": "3"}
    with world.stream(topic, **options) as query:
        query.reader._clock = lambda: now[0]
        assert query.values() == ["a"]
        world.write(topic, "b")
        now[0] += 9
        assert query.step() == []
        now[0] += 1
        assert query.values() == ["b"]
        world.write(topic, *"cdef")
        assert query.values() == ["c", "d", "e"]
        assert query.step() == []
    with world.stream(topic, minOffsetsPerTrigger="3") as query:
        assert query.reader.getDefaultReadLimit() == ReadMinRows(3)


def test_available_now_ends_at_the_offsets_of_its_beginning(world: World) -> None:
    """In several micro-batches if limits say so, minimum or not, and deaf to what is written meanwhile."""
    topic = world.topic(partitions=2)
    world.write(topic, *"abcde")
    options = {"maxOffsetsPerTrigger": "3", "minOffsetsPerTrigger": "3", "maxTriggerDelay": "1h"}
    with world.stream(topic, **options) as query:
        query.start()
        query.reader.prepareForTriggerAvailableNow()
        assert query.values() == ["a", "b", "c"]
        world.write(topic, "late")
        world.admin.create_partitions(topic, 3)
        world.write(topic, "late", partition=2)
        assert query.values() == ["d", "e"]
        done = query.at
        assert query.step() == []
        assert query.at == done
        assert query.offsets == {topic: {"0": 5, "1": 0}}
    with world.stream(topic) as query:
        query.start(done)
        query.reader.prepareForTriggerAvailableNow()
        assert query.values() == ["late", "late"]
        assert query.step() == []


def test_a_checkpoint_ahead_of_the_last_stable_offset_waits(world: World) -> None:
    """One of a read_uncommitted reader, such as Spark's own source by default: no loss, and nothing is read twice."""
    topic = world.topic()
    with world.transaction(topic, "a", "b") as producer, world.stream(topic) as query:
        query.start({topic: {"0": 2}})
        assert query.step() == []
        assert query.offsets == {topic: {"0": 2}}
        world.write(topic, "c")
        producer.commit()
        world.wait_stable(topic)
        assert query.values() == ["c"]


def test_a_log_that_is_shorter_than_the_checkpoint_is_a_loss(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """The topic was deleted and created again while the query was down: an error, or what there is with a warning."""
    topic = world.topic()
    world.write(topic, "a", "b")
    with world.stream(topic) as query, pytest.raises(OffsetOutOfRange, match="at offset 9: the log ends at 2"):
        query.start({topic: {"0": 9}}).step()
    with world.stream(topic, failOnDataLoss="false") as query:
        assert query.start({topic: {"0": 9}}).values() == ["a", "b"]
        assert (
            "at offset 9: the log ends at 2, it was cut off, or the topic was deleted and created again" in caplog.text
        )
        world.write(topic, "c")
        assert query.values() == ["c"]


def test_records_lost_while_the_query_was_down_are_named(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Retention was quicker than the query: the task fails, or goes on with what is left."""
    topic = world.topic()
    world.write(topic, *"abcd")
    world.admin.delete_records({(topic, 0): 3})
    with world.stream(topic) as query, pytest.raises(OffsetOutOfRange, match="offsets 1 to 3: the log begins at 3"):
        query.start({topic: {"0": 1}}).step()
    with world.stream(topic, failOnDataLoss="false") as query:
        assert query.start({topic: {"0": 1}}).values() == ["d"]
        assert "offsets 1 to 3: the log begins at 3 now" in caplog.text


def test_a_topic_deleted_under_the_query_is_a_loss(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """An error by default; with failOnDataLoss=false the other topics go on."""
    doomed, kept = world.topic(), world.topic()
    world.write(doomed, "a")
    with world.stream(f"{doomed},{kept}", failOnDataLoss="false") as query, world.stream(doomed) as strict:
        assert query.values() == strict.values() == ["a"]
        world.admin.delete_topics(doomed)
        world.write(kept, "b")
        assert query.values() == ["b"]
        assert query.offsets == {kept: {"0": 1}}
        world.write(kept, "c")
        began = time.monotonic()
        assert query.values() == ["c"]
        assert time.monotonic() - began < 2, "what is gone is looked for only once"
        assert "from offset 1 on: the partition is no longer there" in caplog.text
        with pytest.raises(UnknownTopic, match="The cluster has no topic"):
            strict.step()


def test_a_topic_made_anew_under_the_query_is_a_loss_even_if_it_has_grown_longer(world: World) -> None:
    """Only the topic's id tells, since the offsets fit."""
    topic = world.topic()
    world.write(topic, "a")
    with world.stream(topic) as query:
        assert query.values() == ["a"]
        world.admin.delete_topics(topic)
        world.topic(name=topic)
        world.write(topic, *"xyz")
        with pytest.raises(OffsetOutOfRange, match="the topic was deleted and created again"):
            query.step()


def test_assigned_partitions_stay_the_only_ones(world: World) -> None:
    """New partitions of the topic are not taken up."""
    topic = world.topic(partitions=2)
    world.write(topic, "no")
    with world.stream(None, assign=json.dumps({topic: [1]})) as query:
        world.write(topic, "yes", partition=1)
        assert query.values() == ["yes"]
        world.admin.create_partitions(topic, 3)
        world.write(topic, "no", partition=2)
        assert query.step() == []


def test_a_reader_and_its_partitions_can_be_pickled_before_and_after_planning(world: World) -> None:
    """Spark sends the reader to the tasks before it has planned anything, and the partitions after."""
    topic = world.topic()
    world.write(topic, "a")
    with world.stream(topic) as query:
        other = copy_of(query.reader)
        query.start()
        start = through_json(query.at or {})
        end = query.reader.latestOffset(start, ReadAllAvailable())
        [task] = query.reader.partitions(start, end)
        assert values_of([row for batch in other.read(copy_of(task)) for row in batch.to_pylist()]) == ["a"]
        assert f"topic='{topic}', partition=0, start=0, end=1" in repr(task)
