"""Moving a running pipeline to a session: from an at-least-once consumer, all at once or one instance at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import confluent_kafka
import pytest
from session_scene import BROKER_CONFIG, GROUP_PROTOCOLS, Pipeline, copy_all, copy_turn, wait_until

from semel.testing.embedded import EmbeddedBroker


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(config=BROKER_CONFIG, fsync="never") as broker:
        yield broker


class OldMember:
    """A pipeline as it was before: plain consumer and producer, offsets committed after the output is flushed.

    It is careful as far as one can be without transactions: what it has written it commits before it gives a partition
    up. (Only a crash between the two repeats records, which is why one moves.)
    """

    def __init__(self, pipeline: Pipeline) -> None:
        config = {
            "bootstrap.servers": pipeline.bootstrap,
            "group.id": pipeline.group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
        if pipeline.protocol == "consumer":
            config["group.protocol"] = "consumer"
        else:
            config |= {"partition.assignment.strategy": pipeline.protocol, "session.timeout.ms": 6_000}
        self._consumer = confluent_kafka.Consumer(config)
        self._producer = confluent_kafka.Producer({"bootstrap.servers": pipeline.bootstrap})
        self._target = pipeline.target
        self._consumer.subscribe([pipeline.source])

    def turn(self) -> int:
        """Some records; how many."""
        messages = [one for one in self._consumer.consume(50, 0.1) if one.error() is None]
        for message in messages:
            self._producer.produce(self._target, message.value(), message.key())
        assert self._producer.flush(10) == 0
        if messages:
            self._consumer.commit(asynchronous=False)
        return len(messages)

    @property
    def share(self) -> int:
        return len(self._consumer.assignment())

    def close(self) -> None:
        self._consumer.close()


@pytest.mark.parametrize("protocol", GROUP_PROTOCOLS)
def test_a_session_of_the_same_group_goes_on_where_the_old_consumer_stopped(
    broker: EmbeddedBroker, protocol: str
) -> None:
    """C5: stop the old one, start the session: nothing lost, nothing repeated; and back again."""
    pipeline = Pipeline(broker.bootstrap, protocol)
    pipeline.write(range(100))
    old = OldMember(pipeline)
    done = 0

    def has_all() -> bool:
        nonlocal done
        done += old.turn()
        return done == 100

    wait_until(has_all, "the old pipeline")
    old.close()
    pipeline.write(range(100, 200))
    with pipeline.session() as session:
        copy_all(session, pipeline, 100)
    assert pipeline.counts() == Counter(range(200))
    pipeline.write(range(200, 250))
    old, done = OldMember(pipeline), 50
    wait_until(has_all, "the old pipeline once more")
    old.close()
    assert pipeline.counts() == Counter(range(250))


@pytest.mark.parametrize("protocol", GROUP_PROTOCOLS)
def test_instances_are_replaced_one_at_a_time(broker: EmbeddedBroker, protocol: str) -> None:
    """C5: old and new share the group for a while, with the same assignor; every record is processed once."""
    pipeline = Pipeline(broker.bootstrap, protocol, partitions=4)
    old = OldMember(pipeline)
    pipeline.write(range(100))
    wait_until(lambda: old.turn() >= 0 and old.share == 4, "the old one alone")
    with pipeline.session() as session:

        def is_shared() -> bool:
            old.turn()
            copy_turn(session, pipeline, 50)
            return (old.share, len(session.partitions)) == (2, 2)

        wait_until(is_shared, "two partitions for each")
        pipeline.write(range(100, 200))
        wait_until(lambda: is_shared() and len(pipeline.counts()) == 200, "both at work")
        old.close()
        pipeline.write(range(200, 300))
        wait_until(lambda: copy_turn(session, pipeline, 50) >= 0 and len(pipeline.counts()) == 300, "the new one alone")
    assert pipeline.counts() == Counter(range(300))


def test_another_release_of_a_session_takes_over_the_id_and_the_positions(broker: EmbeddedBroker) -> None:
    """C5: what one leaves open is ended by the next of the same instance, and its records are processed again."""
    pipeline = Pipeline(broker.bootstrap)
    pipeline.write(range(20))
    old = pipeline.session("0", transaction_timeout_ms=2_500)
    old.__enter__()
    abandoned = old.transaction(10_000)
    abandoned.__enter__()
    abandoned.send_table(pipeline.target, abandoned.table)
    old._membership.close(leave=False)  # pyright: ignore
    with pipeline.session("0") as new:
        copy_all(new, pipeline, 20)
    assert pipeline.counts() == Counter(range(20))
    old._producer.cluster.close()  # pyright: ignore
    old._fetcher.close()  # pyright: ignore
