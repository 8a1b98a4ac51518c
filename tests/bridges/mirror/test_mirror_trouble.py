"""Transactions that hang, clusters that do not answer, a full target, and a mirror that cuts in the wrong place."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Iterator

import pytest
from mirror_scene import BROKER_CONFIG, RunningMirror, Scene, Writer, records, settings, torn
from session_scene import wait_until

import semel
from semel.bridges.mirror import run as mirror_run
from semel.bridges.mirror.cuts import CutFinder
from semel.broker.faults import Cut, Error
from semel.client.partitions import TopicPartition
from semel.testing.embedded import EmbeddedBroker
from semel.wire import Api, ErrorCode


@pytest.fixture(scope="module")
def brokers() -> Iterator[tuple[EmbeddedBroker, EmbeddedBroker]]:
    with EmbeddedBroker(config=BROKER_CONFIG) as source, EmbeddedBroker(config=BROKER_CONFIG) as target:
        yield source, target


@pytest.fixture
def scene(brokers: tuple[EmbeddedBroker, EmbeddedBroker]) -> Scene:
    return Scene(brokers[0].bootstrap, brokers[1].bootstrap)


def ends_of_one_batch(finder: CutFinder, _: int | None = None) -> dict[TopicPartition, int]:
    """Where a mirror cuts that takes what a fetch brought of a partition, as far as it is decided there."""
    for partition, log in finder._logs.items():
        end = min([part.first for part in log.open_parts.values()], default=log.position)
        if end > log.cut:
            return {partition: end}
    return {}


def test_a_mirror_that_cuts_at_its_batches_tears_transactions(
    scene: Scene, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge can fail: the same mirror, cutting at its batches, is exactly once too, and tears transactions."""
    monkeypatch.setattr(CutFinder, "find_ends", ends_of_one_batch)
    scene.create("orders", 3)
    scene.create("items", 3)
    writer = Writer(scene.source, scene.topics, rng)
    for _ in range(20):
        writer.write(abort=False)
    writer.close()
    scene.mirror()
    scene.assert_equal()
    assert torn(scene.target, scene.topics)


def test_a_transaction_that_hangs_is_named_and_stops_only_what_it_has_touched(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Partition 0 waits for it; partition 1 and the other topic go on. When it ends, everything comes over."""
    monkeypatch.setattr(mirror_run, "_HANGS_S", 0.5)
    monkeypatch.setattr(mirror_run, "_TELL_S", 0.1)
    topic, other = scene.create("orders", 2), scene.create("items", 1)
    hanging = semel.Producer(settings(scene.source, transactional_id=f"{scene.prefix}hangs", linger_ms=0))
    hanging.begin()
    hanging.send(topic, json.dumps({"transaction": "hangs"}), partition=0)
    hanging.flush()
    with caplog.at_level(logging.WARNING), RunningMirror(scene.options()) as mirror:
        with semel.Producer(settings(scene.source, transactional_id=f"{scene.prefix}good")) as producer:
            for number, (name, partition) in enumerate([(topic, 1), (other, 0), (topic, 0)]):
                with producer.transaction():
                    producer.send(name, json.dumps({"transaction": f"good {number}"}), partition=partition)
        wait_until(lambda: len(records(scene.target, topic)[1]) == 1, "partition 1")
        wait_until(lambda: len(records(scene.target, other)[0]) == 1, "the other topic")
        wait_until(lambda: f"{scene.prefix}hangs" in caplog.text, "its name")
        assert records(scene.target, topic)[0] == []
        oldest = mirror.progress[-1].waiting[0]
        assert oldest.partitions == (TopicPartition(topic, 0),)
        assert mirror.progress[-1].lag[TopicPartition(topic, 0)] > 0
        hanging.commit()
        wait_until(lambda: len(records(scene.target, topic)[0]) == 2, "partition 0")
        wait_until(lambda: not mirror.progress[-1].waiting, "the end of the wait")
    hanging.close()
    assert mirror.error is None
    scene.assert_equal()


def test_a_source_that_is_unreachable_for_longer_than_any_call_waits_is_waited_for(
    brokers: tuple[EmbeddedBroker, EmbeddedBroker], rng: random.Random
) -> None:
    """Calls give up after a second here; the mirror tries again, as long as `retry_s` allows, and loses nothing."""
    with EmbeddedBroker(config=BROKER_CONFIG) as source:
        scene = Scene(source.bootstrap, brokers[1].bootstrap)
        scene.create("orders", 2)
        writer = Writer(scene.source, scene.topics, rng)
        writer.write(abort=False)
        impatient = settings(scene.source, default_api_timeout_ms=1000, request_timeout_ms=1000)
        with RunningMirror(scene.options(source=impatient)) as mirror:
            writer.write()
            source.stop()
            is_over = threading.Event()
            is_over.wait(4)
            source.start()
            writer.write(abort=False)
            wait_until(lambda: bool(mirror.progress) and sum(mirror.progress[-1].lag.values()) == 0, "no lag")
        assert mirror.error is None
        writer.close()
        scene.mirror()
        scene.assert_equal()
        scene.assert_whole()


def test_a_mirror_gives_up_in_one_sentence(brokers: tuple[EmbeddedBroker, EmbeddedBroker]) -> None:
    """After `retry_s`, with what that means."""
    scene = Scene("127.0.0.1:1", brokers[1].bootstrap)
    with pytest.raises(semel.SemelError) as caught:
        scene.mirror(source=settings("127.0.0.1:1", default_api_timeout_ms=300), retry_s=0.5)
    assert "Progress is at the target together with the records" in "".join(caught.value.__notes__)


def test_a_target_that_is_full_is_waited_for(
    scene: Scene, brokers: tuple[EmbeddedBroker, EmbeddedBroker], rng: random.Random
) -> None:
    """It refuses what is written with a storage error for some time; then everything is there once."""
    scene.create("orders", 2)
    writer = Writer(scene.source, scene.topics, rng)
    for _ in range(5):
        writer.write(abort=False)
    writer.close()
    full = brokers[1].faults.inject(Api.PRODUCE, Error(ErrorCode.kafka_storage_error), times=5)
    scene.mirror()
    assert full.served == 5
    scene.assert_equal()
    scene.assert_whole()


def test_an_answer_to_the_commit_that_is_lost_repeats_nothing(
    scene: Scene, brokers: tuple[EmbeddedBroker, EmbeddedBroker], rng: random.Random
) -> None:
    """Whether the cut was committed is looked up, never guessed."""
    scene.create("orders", 2)
    writer = Writer(scene.source, scene.topics, rng)
    for carried_out in (True, False):
        writer.write(abort=False)
        brokers[1].faults.inject(Api.END_TXN, Cut(carried_out=carried_out))
        scene.mirror()
    writer.close()
    scene.assert_equal()
    scene.assert_whole()


def test_a_cut_that_fails_every_time_ends_the_mirror(
    scene: Scene, brokers: tuple[EmbeddedBroker, EmbeddedBroker], rng: random.Random
) -> None:
    """Such as one that takes longer than its transaction may: reading it once more does not count as a success."""
    scene.create("orders", 2)
    writer = Writer(scene.source, scene.topics, rng)
    writer.write(abort=False)
    writer.close()
    fails = brokers[1].faults.inject(Api.PRODUCE, Error(ErrorCode.kafka_storage_error), times=10_000, skip=1)
    with pytest.raises(semel.SemelError) as caught:
        scene.mirror(retry_s=2.0, target=settings(scene.target, delivery_timeout_ms=200, request_timeout_ms=200))
    brokers[1].faults.clear()
    assert "Tried for retry_s=2 s" in "".join(caught.value.__notes__)
    assert fails.served > 2
    scene.mirror()
    scene.assert_equal()
