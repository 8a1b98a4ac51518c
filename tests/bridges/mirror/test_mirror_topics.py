"""Topics that grow, change, vanish and come again; records that retention takes; loops; failover and the way back."""

from __future__ import annotations

import json
import random

import pytest
from mirror_scene import RunningMirror, Scene, Writer, clusters, create, partition_count, read, records, scene, settings
from session_scene import wait_until

import semel
from semel.bridges.mirror.options import ORIGIN_HEADER, make_options

__all__ = ["clusters", "scene"]


def send(bootstrap: str, topic: str, *values: str, partition: int = 0) -> None:
    with semel.Producer(settings(bootstrap, transactional_id=f"send-{topic}")) as producer, producer.transaction():
        for value in values:
            producer.send(topic, json.dumps({"transaction": value}), partition=partition)


def values(bootstrap: str, topic: str, partition: int = 0) -> list[str]:
    return [record.transaction for record in records(bootstrap, topic)[partition]]


def configs(bootstrap: str, topic: str) -> dict[str, str | None]:
    with semel.Admin(settings(bootstrap)) as admin:
        entries = admin.describe_configs("topic", topic)
    return {name: entry.value for name, entry in entries.items() if entry.source == "topic"}


def test_topics_are_created_with_partitions_and_configs_and_followed(scene: Scene) -> None:
    """New topics, new partitions and changed configs come over while the mirror runs."""
    topic = scene.create(
        "orders", 2, cleanup_policy="compact", retention_ms="77000", message_timestamp_type="CreateTime"
    )
    with RunningMirror(scene.options(follow_s=0.1)) as mirror, semel.Admin(settings(scene.source)) as admin:
        wait_until(lambda: configs(scene.target, topic).get("retention.ms") == "77000", "the configs")
        assert configs(scene.target, topic) == {"cleanup.policy": "compact", "retention.ms": "77000"}
        admin.alter_configs("topic", topic, {"retention.ms": "88000", "cleanup.policy": None})
        wait_until(lambda: configs(scene.target, topic) == {"retention.ms": "88000"}, "the changed configs")
        admin.create_partitions(topic, 3)
        scene.topics[topic] = 3
        other = scene.create("items", 1)
        send(scene.source, topic, "into the new partition", partition=2)
        send(scene.source, other, "into the new topic")
        wait_until(
            lambda: other in _topics(scene.target) and len(records(scene.target, other)[0]) == 1, "the new topic"
        )
        wait_until(lambda: partition_count(scene.target, topic) == 3, "the new partition")
        wait_until(lambda: len(records(scene.target, topic)[2]) == 1, "the record in it")
    assert mirror.error is None
    scene.assert_equal()


def _topics(bootstrap: str) -> list[str]:
    with semel.Admin(settings(bootstrap)) as admin:
        return admin.list_topics()


def test_a_transaction_into_a_partition_that_was_just_added_is_whole(scene: Scene, rng: random.Random) -> None:
    """The mirror does not know the partition yet when it reads the transaction's records elsewhere."""
    topic = scene.create("orders", 1)
    with RunningMirror(scene.options(follow_s=60.0)) as mirror, semel.Admin(settings(scene.source)) as admin:
        for count in range(2, 5):
            admin.create_partitions(topic, count)
            scene.topics[topic] = count
            writer = Writer(scene.source, scene.topics, rng)
            for _ in range(3):
                writer.write()
            writer.close()
    assert mirror.error is None
    scene.mirror()
    scene.assert_equal()
    scene.assert_whole()


def test_topics_are_renamed_by_rule(scene: Scene) -> None:
    """`rename` makes the target's name; what it was is not there."""
    topic = scene.create("orders")
    send(scene.source, topic, "one")
    scene.mirror(rename="west.{topic}")
    assert values(scene.target, f"west.{topic}") == ["one"]
    assert topic not in _topics(scene.target)


@pytest.mark.parametrize("go_on", [False, True])
def test_a_topic_that_is_made_again_stops_the_mirror_or_is_mirrored_behind_the_old_one(
    scene: Scene, go_on: bool
) -> None:
    """Its offsets mean nothing in the new one, which has another id."""
    topic = scene.create("orders")
    send(scene.source, topic, "old 1", "old 2")
    scene.mirror()
    with semel.Admin(settings(scene.source)) as admin:
        admin.delete_topics(topic)
        admin.create_topics(topic, partitions=2)
    send(scene.source, topic, *(f"new {number}" for number in range(5)))
    if not go_on:
        with pytest.raises(semel.TopicRecreated, match="deleted and created again at the source"):
            scene.mirror()
        return
    scene.mirror(recreated="go-on")
    assert values(scene.target, topic) == ["old 1", "old 2", *(f"new {number}" for number in range(5))]


def test_a_topic_that_is_made_again_while_the_mirror_runs_is_not_taken_for_the_old_one(scene: Scene) -> None:
    """Its new records lie at offsets that were read before."""
    topic, other = scene.create("orders"), scene.create("items")
    send(scene.source, topic, "old")
    with RunningMirror(scene.options(recreated="go-on", follow_s=0.2)) as mirror:
        wait_until(lambda: values(scene.target, topic) == ["old"], "the first record")
        with semel.Admin(settings(scene.source)) as admin:
            admin.delete_topics(topic)
            admin.create_topics(topic)
        send(scene.source, topic, "new 1", "new 2")
        send(scene.source, other, "other")
        wait_until(lambda: values(scene.target, topic) == ["old", "new 1", "new 2"], "the new topic")
        wait_until(lambda: values(scene.target, other) == ["other"], "the other topic")
    assert mirror.error is None


def test_a_deleted_topic_leaves_the_others_alone(scene: Scene) -> None:
    """What was mirrored of it stays."""
    topic, other = scene.create("orders"), scene.create("items")
    send(scene.source, topic, "kept")
    with RunningMirror(scene.options(follow_s=0.2)) as mirror:
        wait_until(lambda: values(scene.target, topic) == ["kept"], "the first record")
        with semel.Admin(settings(scene.source)) as admin:
            admin.delete_topics(topic)
        send(scene.source, other, "other")
        wait_until(lambda: values(scene.target, other) == ["other"], "the other topic")
    assert mirror.error is None
    assert values(scene.target, topic) == ["kept"]


@pytest.mark.parametrize("go_on", [False, True])
def test_records_that_were_deleted_before_they_were_mirrored_are_no_silent_loss(scene: Scene, go_on: bool) -> None:
    """The mirror stops with the offset, or counts them and goes on, as it was told."""
    topic = scene.create("orders")
    send(scene.source, topic, "mirrored")
    scene.mirror()
    send(scene.source, topic, "lost 1", "lost 2")
    send(scene.source, topic, "kept")
    with semel.Admin(settings(scene.source)) as admin:
        admin.delete_records({(topic, 0): 4})
    if not go_on:
        with pytest.raises(semel.OffsetOutOfRange) as caught:
            scene.mirror()
        assert 'lost="go-on"' in "".join(caught.value.__notes__)
        return
    report = scene.mirror(lost="go-on")
    assert report.lost == 2
    assert values(scene.target, topic) == ["mirrored", "kept"]


def test_a_target_that_lost_its_topic_is_refused(scene: Scene) -> None:
    """Going on would leave out everything that it had."""
    topic = scene.create("orders")
    send(scene.source, topic, "one")
    scene.mirror()
    with semel.Admin(settings(scene.target)) as admin:
        admin.delete_topics(topic)
    with pytest.raises(semel.OffsetOutOfRange, match="was deleted, created again or restored"):
        scene.mirror()


def test_records_do_not_go_in_circles(scene: Scene) -> None:
    """Two mirrors in opposite directions over the same topic: each record is in each cluster once."""
    topic = scene.create("orders")
    create(scene.target, topic, 2)
    back = {"name": f"{scene.name}-back", "source": scene.target, "target": scene.source}
    with RunningMirror(scene.options()) as there, RunningMirror(scene.options(**back)) as here:
        send(scene.source, topic, "from the source")
        send(scene.target, topic, "from the target")
        for cluster in (scene.source, scene.target):
            wait_until(lambda at=cluster: len(values(at, topic)) == 2, "both records")
    scene.mirror()
    scene.mirror(**back)
    assert there.error is None
    assert here.error is None
    for cluster in (scene.source, scene.target):
        assert sorted(values(cluster, topic)) == ["from the source", "from the target"]
        for _, record in read(cluster, topic)[0]:
            assert len([header for header in record.headers if header[0] == ORIGIN_HEADER]) <= 1


def test_source_and_target_in_one_cluster_need_another_name(scene: Scene) -> None:
    """Without one a topic would be copied into itself for ever."""
    scene.create("orders")
    with pytest.raises(semel.ConfigError, match="copied into themselves"):
        scene.mirror(target=scene.source)


def test_another_source_under_the_same_name_is_refused_and_fences_nobody(scene: Scene) -> None:
    """Positions of one cluster mean nothing in another."""
    topic = scene.create("orders")
    create(scene.target, topic, 2)
    with RunningMirror(scene.options()) as mirror:
        with pytest.raises(semel.ConfigError, match="where its positions mean nothing"):
            scene.mirror(source=scene.target, rename="x.{topic}")
        send(scene.source, topic, "one")
        wait_until(lambda: values(scene.target, topic) == ["one"], "the record")
    assert mirror.error is None


def test_after_a_failover_the_other_direction_begins_where_the_first_one_ended(scene: Scene) -> None:
    """What clients write at the target after the failover comes back, once; what had come from the source does not."""
    topic = scene.create("orders")
    send(scene.source, topic, *(f"before {number}" for number in range(20)))
    scene.mirror()
    send(scene.target, topic, "after 1", "after 2")  # the clients have moved
    back = {"name": f"{scene.name}-back", "source": scene.target, "target": scene.source}
    report = scene.mirror(**back)
    assert (report.records, report.loops) == (2, 0)  # it did not even read what had come from the source
    send(scene.source, topic, "home again")
    scene.mirror()
    for cluster in (scene.source, scene.target):
        assert values(cluster, topic) == [
            *(f"before {number}" for number in range(20)),
            "after 1",
            "after 2",
            "home again",
        ]


def test_the_way_back_also_brings_what_was_written_at_the_target_while_it_was_mirrored_to(scene: Scene) -> None:
    """Somebody else's record lies between two cuts: the way back begins there, and leaves out what was mirrored."""
    topic = scene.create("orders")
    send(scene.source, topic, "one")
    scene.mirror()
    send(scene.target, topic, "native")
    send(scene.source, topic, "two")
    scene.mirror()
    report = scene.mirror(name=f"{scene.name}-back", source=scene.target, target=scene.source)
    assert (report.records, report.loops) == (1, 1)
    assert values(scene.source, topic) == ["one", "two", "native"]


def test_what_was_not_kept_in_memory_is_read_again(scene: Scene, rng: random.Random) -> None:
    """With room for nothing at all, every batch is read a second time, and the result is the same."""
    scene.create("orders", 3)
    writer = Writer(scene.source, scene.topics, rng)
    for _ in range(20):
        writer.write()
    writer.close()
    scene.mirror(buffer_bytes=1)
    scene.assert_equal()
    scene.assert_whole()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"name": "a/b"}, "cannot name a mirror"),
        ({"rename": "west"}, "must have"),
        ({"lost": "maybe"}, "lost='maybe' is not supported"),
        ({"topics": "("}, "is no regular expression"),
        ({"topics": ""}, "names nothing"),
        ({"retry_s": -1}, "must be positive"),
        ({"source": {"bootstrap.servers": "a:1", "transactional.id": "x"}}, "transactional.id cannot be set here"),
    ],
)
def test_wrong_options_are_refused(option: dict[str, object], words: str) -> None:
    """Before anything is read."""
    given = {"name": "m", "source": {"bootstrap.servers": "a:1"}, "target": {"bootstrap.servers": "b:1"}, "topics": "t"}
    with pytest.raises(semel.ConfigError, match=words):
        make_options(**{**given, **option})  # pyright: ignore[reportArgumentType]


def test_a_topic_keeps_its_name_at_the_target_when_the_rule_changes(scene: Scene) -> None:
    """Its positions belong to the topic that it was mirrored to; new topics follow the new rule."""
    topic = scene.create("orders")
    send(scene.source, topic, "one")
    scene.mirror(rename="west.{topic}")
    send(scene.source, topic, "two")
    other = scene.create("items")
    scene.mirror(rename="east.{topic}")
    assert values(scene.target, f"west.{topic}") == ["one", "two"]
    found = _topics(scene.target)
    assert f"east.{topic}" not in found
    assert f"east.{other}" in found
