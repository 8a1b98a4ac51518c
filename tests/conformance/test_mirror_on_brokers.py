"""A mirror on every kind of broker, as source and as target at once: topics go over under another name."""

from __future__ import annotations

import random

import pytest
from mirror_scene import RunningMirror, Writer, read, records, settings, torn
from targets import KafkaUnderTest, NewTopic, Target

import semel
from semel.client.partitions import TopicPartition


@pytest.mark.parametrize("protocol", [1, 2])
def test_a_mirror_keeps_transactions_whole_and_offsets_exact(
    kafka: KafkaUnderTest, target: Target, new_topic: NewTopic, rng: random.Random, protocol: int
) -> None:
    """H2: records, whole transactions while they come, and the position of a group, in the middle of the stream."""
    topics = {new_topic(3): 3, new_topic(2): 2}
    name = f"conformance-{next(iter(topics))}"
    options = {
        "name": name,
        "source": kafka.bootstrap,
        "target": kafka.bootstrap,
        "topics": list(topics),
        "rename": f"{name}.{{topic}}",
        "groups": name,
        "end_on_sigterm": False,
    }
    # librdkafka's transactions share an epoch; where the broker speaks protocol 1, Semel's have one each all the same.
    writer = Writer(kafka.bootstrap, topics, rng, protocol=protocol)
    for _ in range(10):
        writer.write()
    with RunningMirror(options) as mirror:
        for _ in range(15):
            writer.write()
    writer.close()
    assert mirror.error is None
    topic = next(iter(topics))
    [(place, wanted), *_] = read(kafka.bootstrap, topic)[0][2:] or [(0, None)]
    with semel.Admin(settings(kafka.bootstrap)) as admin:
        admin.commit_offsets(name, {(topic, 0): place})
        semel.mirror(**options, idle_ms=1000)
        # The group's name is the same on both sides of one cluster, and its topics are not.
        moved = admin.committed_offsets(name)[TopicPartition(f"{name}.{topic}", 0)].offset
    for one in topics:
        assert records(kafka.bootstrap, f"{name}.{one}") == records(kafka.bootstrap, one)
    assert torn(kafka.bootstrap, {f"{name}.{one}": count for one, count in topics.items()}) == set()
    if wanted is not None:
        copied = dict(read(kafka.bootstrap, f"{name}.{topic}")[0])
        assert copied[moved].value == wanted.value
