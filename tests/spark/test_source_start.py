"""Where a streaming query of the Spark source begins: decided once, also across restarts, on topics that change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from uuid import UUID

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from source_world import BROKERS, Query, World, copy_of, rows_of, started, through_json, values_of

import semel
from semel.errors import ConfigError, OffsetOutOfRange, UnknownTopic
from semel.spark.source_note import begin_of_batch, extend_note, replaced_topics
from semel.spark.source_offsets import Note, split_note, to_checkpoint

ORDERS = semel.TopicPartition("orders", 0)


@pytest.fixture(scope="module", params=BROKERS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with started(request.param) as world:
        yield world


def plan_first(query: Query) -> dict:
    """The first micro-batch as Spark plans it, up to its entry in the offset log."""
    return through_json(query.reader.latestOffset(query.reader.initialOffset(), ReadAllAvailable()))


def run_first(query: Query, end: dict) -> list[str]:
    """The first micro-batch as Spark runs it, now or after a restart: it asks for the initial offset again."""
    return values_of(query.replay(through_json(query.reader.initialOffset()), end))


def test_the_default_start_is_one_decision_on_a_busy_topic(world: World) -> None:
    """Records come between Spark's questions. The first batch has what came after the first one, also in replays."""
    topic = world.topic(partitions=2)
    world.write(topic, "history")
    with world.stream(topic, startingOffsets="latest") as query:
        first = query.reader.initialOffset()
        world.write(topic, "a")
        world.write(topic, "b", partition=1)
        assert query.reader.initialOffset() == first
        end = plan_first(query)
        world.write(topic, "c")
        assert run_first(query, end) == ["a", "b"]
    for loss in ("true", "false"):
        with world.stream(topic, startingOffsets="latest", failOnDataLoss=loss) as restarted:
            assert run_first(restarted, end) == ["a", "b"], "neither less nor the history"
            assert restarted.start(end).values() == ["c"]


def test_the_note_does_not_change_while_the_topic_does_not(world: World) -> None:
    """Spark takes any change of the text for new records, and would run empty micro-batches for ever."""
    topic = world.topic(partitions=2)
    world.write(topic, "a")
    with world.stream(topic) as query:
        query.step()
        text = json.dumps(query.at)
    with world.stream(topic) as restarted:
        restarted.start(json.loads(text)).step()
        assert json.dumps(restarted.at) == text


def test_a_first_batch_from_a_group_is_replayed_whatever_the_group_has_done_since(world: World) -> None:
    """The group may have moved on, as it does when the sink commits the offsets of this very batch, or be gone."""
    topic, group = world.topic(), "start-of-a-group"
    world.write(topic, *"abcd")
    settings = {"startingOffsets": "committed", "kafka.group.id": group}
    commit_offset(world, topic, group, 2)
    with world.stream(topic, **settings) as query:
        end = plan_first(query)
    commit_offset(world, topic, group, 4)
    with world.stream(topic, **settings) as restarted:
        assert run_first(restarted, end) == ["c", "d"]
    world.admin.delete_groups(group)
    with world.stream(topic, **settings | {"kafka.auto.offset.reset": "none"}) as restarted:
        assert run_first(restarted, end) == ["c", "d"]


def commit_offset(world: World, topic: str, group: str, offset: int) -> None:
    with semel.Producer(world.settings | {"transactional.id": f"commit-{group}"}) as producer:
        producer.begin()
        producer.send_offsets({semel.TopicPartition(topic, 0): offset}, group)
        producer.commit()


def test_options_that_no_longer_fit_do_not_stop_the_replay_of_a_first_batch(world: World) -> None:
    """The offsets were for one partition, and now there are two: an error for a new query only."""
    topic = world.topic()
    world.write(topic, *"abc")
    offsets = json.dumps({topic: {"0": 1}})
    with world.stream(topic, startingOffsets=offsets) as query:
        end = plan_first(query)
    world.admin.create_partitions(topic, 2)
    world.write(topic, "new", partition=1)
    with world.stream(topic, startingOffsets=offsets) as restarted:
        assert run_first(restarted, end) == ["b", "c"]
        assert restarted.start(end).values() == ["new"]
    with world.stream(topic, startingOffsets=offsets) as other, pytest.raises(ConfigError, match="has no entry for"):
        plan_first(other)


def test_a_first_batch_without_a_note_can_be_replayed(world: World) -> None:
    """An older Semel, or Spark's Kafka source, left a first micro-batch that failed. What to do is in the error."""
    topic = world.topic()
    world.write(topic, *"abcd")
    end = {topic: {"0": 3}}
    with (
        world.stream(topic, startingOffsets="latest") as query,
        pytest.raises(OffsetOutOfRange, match=r"ends at offset 3, but not where it began, and startingOffsets says 4"),
    ):
        run_first(query, end)
    with world.stream(topic, startingOffsets=json.dumps({topic: {"0": 2}})) as query:
        assert run_first(query, end) == ["c"]
    with world.stream(topic, startingOffsets="latest", failOnDataLoss="false") as query:
        assert run_first(query, end) == [], "not the whole history"
        assert query.start(end).values() == ["d"]
    with world.stream(topic) as query:
        assert run_first(query, end) == ["a", "b", "c"]


def test_a_topic_created_again_while_the_query_was_down_is_a_loss(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Its offsets fit, only the id tells. With failOnDataLoss=false the new topic is read from its first record."""
    topic = world.topic()
    world.write(topic, "a")
    with world.stream(topic) as query:
        assert query.values() == ["a"]
        at = query.at
    world.admin.delete_topics(topic)
    world.topic(name=topic)
    world.write(topic, *"xyz")
    with world.stream(topic) as query, pytest.raises(OffsetOutOfRange, match="the topic was deleted and created again"):
        query.start(at).step()
    with world.stream(topic, failOnDataLoss="false") as query:
        assert query.start(at).values() == ["x", "y", "z"]
        assert "the topic was deleted and created again" in caplog.text
        end = query.at
        assert query.step() == []
        assert query.at == end
    world.write(topic, "later")
    with world.stream(topic) as query:
        assert at is not None
        assert end is not None
        assert values_of(query.replay(at, end)) == ["x", "y", "z"], "the replay knows where it began"
        assert query.start(end).values() == ["later"]


def test_a_batch_whose_topic_was_created_again_is_not_replayed_from_the_new_one(world: World) -> None:
    """Spark replays a planned micro-batch without asking where the topic ends."""
    topic = world.topic()
    world.write(topic, "a")
    with world.stream(topic) as query:
        query.step()
        start = query.at
        world.write(topic, "b")
        query.step()
        end = query.at
    world.admin.delete_topics(topic)
    world.topic(name=topic)
    world.write(topic, *"xyz")
    assert start is not None
    assert end is not None
    with world.stream(topic) as query, pytest.raises(OffsetOutOfRange, match="the topic was deleted and created again"):
        query.replay(start, end)
    with world.stream(topic, failOnDataLoss="false") as query:
        assert query.replay(start, end) == []
        assert query.start(end).values() == ["x", "y", "z"]


def test_a_topic_created_again_while_a_batch_is_read_gives_it_no_records(world: World) -> None:
    """Its offsets fit, so tasks took the new topic's records for the old one's, and they were read again later."""
    topic = world.topic()
    world.write(topic, *"abc")
    with world.stream(topic) as query, world.stream(topic, failOnDataLoss="false") as careless:
        start = query.start().at
        assert start is not None
        end = through_json(query.reader.latestOffset(start, query.reader.getDefaultReadLimit()))
        tasks, careless_tasks = (one.reader.partitions(start, end) for one in (query, careless))
        world.admin.delete_topics(topic)
        world.topic(name=topic)
        world.write(topic, *"vwxyz")
        for task in tasks:
            with pytest.raises(OffsetOutOfRange, match="the topic was deleted and created again meanwhile"):
                rows_of(query.reader.read(copy_of(task)))
        assert [row for task in careless_tasks for row in rows_of(careless.reader.read(copy_of(task)))] == []
        assert careless.start(end).values() == [*"vwxyz"]


def test_a_checkpoint_of_another_cluster_is_refused(world: World) -> None:
    """A topic of the same name there holds other records, even if the offsets fit."""
    topic = world.topic()
    world.write(topic, "a", "b")
    with world.stream(topic) as query:
        query.step()
        at = query.at
    with started("embedded") as elsewhere:
        elsewhere.topic(name=topic)
        elsewhere.write(topic, *"xyz")
        with elsewhere.stream(topic) as query, pytest.raises(OffsetOutOfRange, match="the checkpoint is of cluster"):
            query.start(at).step()
        with elsewhere.stream(topic, failOnDataLoss="false") as query:
            assert query.start(at).values() == ["x", "y", "z"]


def test_a_log_that_was_cut_off_is_not_read_again(world: World) -> None:
    """The topic is the same one by its id: what is left of it was read before."""
    topic = world.topic()
    world.write(topic, "a", "b")
    with world.stream(topic) as query:
        query.step()
        _, note = split_note(query.at or {})
    ahead = to_checkpoint({semel.TopicPartition(topic, 0): 9}, note)
    with world.stream(topic) as query, pytest.raises(OffsetOutOfRange, match="at offset 9: the log ends at 2"):
        query.start(ahead).step()
    with world.stream(topic, failOnDataLoss="false") as query:
        assert query.start(ahead).step() == []
        world.write(topic, "c")
        assert query.values() == ["c"]


def test_a_new_partition_begins_in_a_replay_where_it_began(world: World) -> None:
    """Also if its first records are gone by then: that is a loss, and not silent."""
    topic = world.topic()
    world.write(topic, "a")
    with world.stream(topic) as query:
        query.step()
        start = query.at
        world.admin.create_partitions(topic, 2)
        world.write(topic, "x", "y", partition=1)
        query.step()
        end = query.at
    assert start is not None
    assert end is not None
    with world.stream(topic) as query:
        assert values_of(query.replay(start, end)) == ["x", "y"]
        world.admin.delete_records({(topic, 1): 1})
        with pytest.raises(OffsetOutOfRange, match="offsets 0 to 1: the log begins at 1 now"):
            query.replay(start, end)


def test_available_now_with_the_default_start_reads_what_the_next_run_does_not(world: World) -> None:
    """Spark fixes the end before it asks for the start, and a partition may appear between the two."""
    topic = world.topic()
    world.write(topic, "history")
    with world.stream(topic, startingOffsets="latest") as query:
        query.reader.prepareForTriggerAvailableNow()
        world.write(topic, "between")
        world.admin.create_partitions(topic, 2)
        query.start()
        assert query.step() == []
        at = query.at
    world.write(topic, "next")
    with world.stream(topic, startingOffsets="latest") as query:
        query.start(at).reader.prepareForTriggerAvailableNow()
        assert query.values() == ["next"]


def test_a_mistyped_topic_stops_a_new_query_even_if_losses_are_accepted(world: World) -> None:
    """It would wait for ever. A first batch whose topic was deleted since is another thing: it can be passed over."""
    kept, doomed = world.topic(), world.topic()
    world.write(kept, "a")
    world.write(doomed, "x")
    with (
        world.stream("nowhere", startingOffsets="latest", failOnDataLoss="false") as query,
        pytest.raises(UnknownTopic, match="'nowhere'"),
    ):
        plan_first(query)
    with world.stream(f"{kept},{doomed}", failOnDataLoss="false") as query:
        end = plan_first(query)
    world.admin.delete_topics(doomed)
    with world.stream(f"{kept},{doomed}", failOnDataLoss="false") as restarted:
        assert run_first(restarted, end) == ["a"]
        world.write(kept, "b")
        assert restarted.start(end).values() == ["b"]


def test_a_planner_that_could_not_begin_can_still_be_pickled(world: World) -> None:
    """Its error goes to Spark, and every exception survives that."""
    with world.stream("nowhere", kafka_default_api_timeout_ms="2000") as query:
        query.reader.initialOffset()
        assert isinstance(copy_of(query.reader._initial_error), semel.SemelError)


def test_brokers_without_topic_ids_never_make_a_query_begin_again() -> None:
    """Before Kafka 2.8 nothing proves that a topic is another one; a batch then begins where the last one ended."""
    note = extend_note(None, "c", {"orders": None}, {ORDERS: 3})
    assert note == Note("c", {ORDERS: 3}, {})
    assert begin_of_batch({ORDERS: 7}, note, note) == {ORDERS: 7}
    assert replaced_topics({ORDERS: 7}, note, "c", {"orders": UUID(int=1)}) == frozenset()
    upgraded = extend_note(note, "c", {"orders": UUID(int=1)}, {})
    assert begin_of_batch({ORDERS: 7}, note, upgraded) == {ORDERS: 7}
    unknown = Note(None, {}, {})
    assert begin_of_batch({ORDERS: 7}, unknown, note) == {ORDERS: 7}
    assert begin_of_batch({ORDERS: 7}, None, upgraded) == {ORDERS: 7}
