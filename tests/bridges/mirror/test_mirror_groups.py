"""Groups that move: the consumer at the target goes on with the next record. SEMEL_MIRROR_MOVES=100 for the bar."""

from __future__ import annotations

import json
import os
import random
import threading
from collections import defaultdict
from collections.abc import Callable

import pytest
from confluent_kafka import Consumer
from mirror_scene import RunningMirror, Scene, Writer, clusters, read, records, scene, settings
from session_scene import wait_until

import semel
from semel.bridges.mirror.groups import Translator
from semel.bridges.mirror.progress import CutPart, PartitionState, Run, TopicState
from semel.bridges.mirror.target import read_state
from semel.client.cluster import Cluster
from semel.client.partitions import TopicPartition
from semel.client.settings import parse_config

__all__ = ["clusters", "scene"]

MOVES = int(os.environ.get("SEMEL_MIRROR_MOVES", "5"))

Seen = dict[tuple[str, int], list[tuple[str, int]]]


def consume(bootstrap: str, group: str, topics: list[str], seen: Seen, is_done: Callable[[], bool]) -> None:
    """As a member of the group, from where it stands; positions are committed at the end."""
    consumer = Consumer(
        settings(
            bootstrap,
            group_id=group,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            fetch_wait_max_ms=10,
        )
    )
    consumer.subscribe(topics)
    has_read = False
    while not is_done():
        message = consumer.poll(0.05)
        if message is not None and message.error() is None:
            value = json.loads(message.value() or b"")
            seen[message.topic() or "", message.partition() or 0].append((value["transaction"], value["number"]))
            has_read = True
    if has_read:
        consumer.commit(asynchronous=False)
    consumer.close()


def read_some(bootstrap: str, group: str, scene: Scene, seen: Seen, wanted: int) -> None:
    """Until so many records were seen, those of earlier calls counted."""
    consume(bootstrap, group, list(scene.topics), seen, lambda: count(seen) >= wanted)


def everything(scene: Scene) -> Seen:
    return {
        (topic, number): [(one.transaction, json.loads(one.value or b"")["number"]) for one in found]
        for topic in scene.topics
        for number, found in records(scene.source, topic).items()
        if found
    }


def count(seen: Seen) -> int:
    return sum(len(found) for found in seen.values())


def test_a_group_that_moves_in_mid_stream_repeats_and_misses_nothing(scene: Scene, rng: random.Random) -> None:
    """H2: consumers stop at the source at random moments, while it is written to, and go on at the target."""
    scene.create("orders", 3)
    scene.create("items", 2)
    writing_is_over = threading.Event()

    def write() -> None:
        writer = Writer(scene.source, scene.topics, random.Random(rng.random()))
        while not writing_is_over.is_set():
            writer.write()
            writing_is_over.wait(0.02)
        writer.close()

    seen: dict[str, Seen] = {}
    with RunningMirror(scene.options(groups=f"{scene.prefix}g.*", groups_s=0.05)) as mirror:
        thread = threading.Thread(target=write)
        thread.start()
        try:
            for number in range(MOVES):
                group = f"{scene.prefix}g{number}"
                seen[group] = defaultdict(list)
                stop_after = rng.randint(1, 60)
                consume(
                    scene.source,
                    group,
                    list(scene.topics),
                    seen[group],
                    lambda s=seen[group], n=stop_after: count(s) >= n,
                )
                at = {"name": scene.name, "source": scene.source, "target": scene.target}
                wait_until(lambda g=group, at=at: semel.is_group_mirrored(g, **at), "the positions")
                more = count(seen[group]) + rng.randint(0, 20)
                consume(
                    scene.target, group, list(scene.topics), seen[group], lambda s=seen[group], n=more: count(s) >= n
                )
        finally:
            writing_is_over.set()
            thread.join()
    assert mirror.error is None
    scene.mirror()
    wanted = everything(scene)
    for group, found in seen.items():
        read_some(scene.target, group, scene, found, count(wanted))
        assert dict(found) == wanted, group


def test_a_group_that_commits_at_the_target_is_left_alone(scene: Scene) -> None:
    """It has moved: what is still committed at the source does not put it back."""
    topic = scene.create("orders", 1)
    with semel.Producer(settings(scene.source)) as producer:
        for number in range(10):
            producer.send(topic, str(number))
    group = scene.prefix + "g"
    with semel.Admin(settings(scene.source)) as source, semel.Admin(settings(scene.target)) as target:
        source.commit_offsets(group, {(topic, 0): 4})
        scene.mirror(groups=group)
        assert target.committed_offsets(group)[TopicPartition(topic, 0)].offset == 4
        target.commit_offsets(group, {(topic, 0): 7})
        source.commit_offsets(group, {(topic, 0): 5})
        scene.mirror(groups=group)
        assert target.committed_offsets(group)[TopicPartition(topic, 0)].offset == 7


def test_positions_from_before_a_restart_are_exact_too(scene: Scene, rng: random.Random) -> None:
    """The cuts of earlier runs are in the offsets topic: every position of the source is exact, whichever it is."""
    topic = scene.create("orders", 1)
    writer = Writer(scene.source, scene.topics, rng)
    for _ in range(3):
        for _ in range(5):
            writer.write()
        scene.mirror()
    writer.close()
    state = _state(scene)
    at_source, at_target = _places(scene.source, topic), _places(scene.target, topic)
    with Cluster(parse_config(settings(scene.target)).client) as cluster:
        translator = Translator(scene.name, cluster)
        for offset in range(state.topics[topic].partitions[0].source + 1):
            next_record = next((at_target[value] for place, value in _sorted(at_source) if place >= offset), None)
            found = translator.translate(TopicPartition(topic, 0), offset, state.topics[topic])
            assert found == (state.topics[topic].partitions[0].target if next_record is None else next_record), offset


def _state(scene: Scene):
    with Cluster(parse_config(settings(scene.target)).client) as cluster:
        state = read_state(cluster, scene.name, is_owner=False)
    assert state is not None
    return state


def _places(bootstrap: str, topic: str) -> dict[bytes, int]:
    return {record.value or b"": offset for offset, record in read(bootstrap, topic)[0]}


def _sorted(places: dict[bytes, int]) -> list[tuple[int, bytes]]:
    return sorted((place, value) for value, place in places.items())


@pytest.mark.parametrize(
    ("offset", "expected"),
    [(0, 10), (3, 10), (4, 11), (5, 12), (8, 12), (9, 13), (10, 14), (12, 14), (13, None)],
)
def test_an_offset_leads_to_the_record_that_would_be_read_next(offset: int, expected: int | None) -> None:
    """Also where markers, aborted records or the edge of a cut lie between; None for what is not mirrored so far."""
    state = PartitionState(source=12, target=14, began=2, expected=15)
    topic = TopicState(None, "t", {0: state})
    translator = Translator("m", None)  # pyright: ignore[reportArgumentType]
    translator.add({TopicPartition("t", 0): CutPart(2, 6, 12, (Run(3, 10, 2),))})
    translator.add({TopicPartition("t", 0): CutPart(6, 12, 14, (Run(8, 12, 2),))})
    translator._read_cuts = lambda *_: list(translator._recent[TopicPartition("t", 0)])  # pyright: ignore
    assert translator.translate(TopicPartition("t", 0), offset, topic) == expected


def test_an_offset_whose_cut_is_no_longer_kept_is_not_guessed() -> None:
    """Retention has taken the first cut: what it held, and what lay before it, could be anywhere."""
    topic = TopicState(None, "t", {0: PartitionState(source=12, target=14, began=2, expected=15)})
    translator = Translator("m", None)  # pyright: ignore[reportArgumentType]
    translator._read_cuts = lambda *_: [CutPart(6, 12, 14, (Run(8, 12, 2),))]  # pyright: ignore
    found = {offset: translator.translate(TopicPartition("t", 0), offset, topic) for offset in (0, 2, 5, 6, 12)}
    assert found == {0: None, 2: None, 5: None, 6: 12, 12: 14}


def test_before_anything_was_mirrored_a_group_begins_where_the_mirror_does() -> None:
    """At the end that the target had."""
    topic = TopicState(None, "t", {0: PartitionState(source=5, target=3, began=5, expected=3)})
    translator = Translator("m", None)  # pyright: ignore[reportArgumentType]
    assert [translator.translate(TopicPartition("t", 0), offset, topic) for offset in (0, 5, 6)] == [3, 3, None]
