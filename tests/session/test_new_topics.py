"""Partitions and topics that appear while a session runs or is away: nothing written to them is skipped."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from uuid import uuid4

import pytest
from session_scene import BROKER_CONFIG, GROUP_PROTOCOLS, Pipeline, copy_all, copy_turn, wait_until

from semel.client.admin import Admin
from semel.client.group_offsets import fetch_group_offsets
from semel.client.membership import Membership
from semel.client.partitions import TopicPartition
from semel.client.position_notes import PositionNote, read_note
from semel.client.producer import Outcome, Producer
from semel.errors import UnknownTopic
from semel.session.runner import run
from semel.session.session import Session
from semel.testing.embedded import EmbeddedBroker


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(config=BROKER_CONFIG, fsync="never") as broker:
        yield broker


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often: the tests are about what is done when something has changed."""
    monkeypatch.setattr("semel.session.inputs._LOOK_AT_TOPICS_S", 0.2)
    monkeypatch.setitem(Membership.__init__.__kwdefaults__ or {}, "look_at_topics_s", 0.2)


def begin_at_the_end(session: Session, pipeline: Pipeline, partitions: int = 2) -> None:
    wait_until(lambda: copy_turn(session, pipeline, 50) == 0 and len(pipeline.committed()) == partitions, "a position")


def grow(pipeline: Pipeline, count: int) -> None:
    with Admin({"bootstrap.servers": pipeline.bootstrap}) as admin:
        admin.create_partitions(pipeline.source, count)


def recreate(pipeline: Pipeline, partitions: int | None = None) -> None:
    with Admin({"bootstrap.servers": pipeline.bootstrap}) as admin:
        admin.delete_topics(pipeline.source)
        wait_until(lambda: pipeline.source not in admin.list_topics(), "the deletion")
        admin.create_topics(pipeline.source, partitions=partitions or pipeline.partitions)


# -- new partitions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", GROUP_PROTOCOLS)
def test_new_partitions_are_found_as_soon_as_metadata_max_age_says(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """Although a session by itself looks less often than that."""
    monkeypatch.setattr("semel.session.inputs._LOOK_AT_TOPICS_S", 3_600.0)
    monkeypatch.setitem(Membership.__init__.__kwdefaults__ or {}, "look_at_topics_s", 3_600.0)
    pipeline = Pipeline(broker.bootstrap, protocol)
    with pipeline.session(metadata_max_age_ms=300, auto_offset_reset="latest") as session:
        begin_at_the_end(session, pipeline)
        grow(pipeline, 3)
        pipeline.write([7], partition=2)
        copy_all(session, pipeline, 1)
    assert pipeline.counts() == Counter([7])


@pytest.mark.parametrize("protocol", GROUP_PROTOCOLS)
def test_a_new_partition_is_read_from_its_beginning_though_the_session_began_at_the_end(
    broker: EmbeddedBroker, protocol: str
) -> None:
    """What is written before the group notices the partition was lost."""
    pipeline = Pipeline(broker.bootstrap, protocol)
    pipeline.write(range(10))
    with pipeline.session(auto_offset_reset="latest") as session:
        begin_at_the_end(session, pipeline)
        grow(pipeline, 3)
        pipeline.write(range(10, 15), partition=2)
        copy_all(session, pipeline, 5)
    assert pipeline.counts() == Counter(range(10, 15))


def test_a_partition_that_appears_while_nobody_is_there_is_read_from_its_beginning(broker: EmbeddedBroker) -> None:
    """The committed offsets tell that the group had begun before."""
    pipeline = Pipeline(broker.bootstrap)
    pipeline.write(range(10))
    with pipeline.session(auto_offset_reset="latest") as session:
        begin_at_the_end(session, pipeline)
    grow(pipeline, 3)
    pipeline.write(range(10, 15), partition=2)
    pipeline.write(range(15, 20))
    with pipeline.session(auto_offset_reset="latest") as session:
        copy_all(session, pipeline, 10)
    assert pipeline.counts() == Counter(range(10, 20))


def test_members_that_begin_together_begin_at_the_end_of_all_partitions(broker: EmbeddedBroker) -> None:
    """That one member has committed first does not make the other's partitions new."""
    pipeline = Pipeline(broker.bootstrap)
    pipeline.write(range(10))
    with pipeline.session(auto_offset_reset="latest") as first:
        begin_at_the_end(first, pipeline)
    partition = TopicPartition(pipeline.source, 1)
    with Admin({"bootstrap.servers": pipeline.bootstrap}) as admin:
        admin.delete_offsets(pipeline.group, [partition])
    assert pipeline.committed().keys() == {0}
    with pipeline.session(auto_offset_reset="latest") as second:
        begin_at_the_end(second, pipeline)
        pipeline.write(range(10, 14))
        copy_all(second, pipeline, 4)
    assert pipeline.counts() == Counter(range(10, 14))


# -- topics that were deleted and created again ------------------------------------------------------------------------


@pytest.mark.parametrize("reset", [None, "earliest", "latest"])
@pytest.mark.parametrize("written", [4, 10, 30])
def test_a_running_session_reads_a_topic_that_was_created_again_from_its_beginning(
    broker: EmbeddedBroker, written: int, reset: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """With fewer records than the old one had, as many, and more, in which it would have gone on in the middle."""
    pipeline = Pipeline(broker.bootstrap, partitions=1)
    pipeline.write(range(10))
    caplog.set_level(logging.WARNING, "semel.session")
    with pipeline.session(auto_offset_reset=reset) as session:
        if reset == "latest":
            begin_at_the_end(session, pipeline, 1)
        else:
            copy_all(session, pipeline, 10)
        recreate(pipeline)
        pipeline.write(range(100, 100 + written))
        copy_all(session, pipeline, written)
    assert Counter(number for number in pipeline.counts().elements() if number >= 100) == Counter(
        range(100, 100 + written)
    )
    assert "was deleted and created again" in caplog.text


@pytest.mark.parametrize("protocol", GROUP_PROTOCOLS)
def test_a_topic_that_was_created_again_with_fewer_partitions_is_read_from_its_beginning(
    broker: EmbeddedBroker, protocol: str
) -> None:
    """The session holds partitions that are no more, until its group has noticed."""
    pipeline = Pipeline(broker.bootstrap, protocol, partitions=4)
    pipeline.write(range(20))
    with pipeline.session() as session:
        copy_all(session, pipeline, 20)
        recreate(pipeline, 2)
        pipeline.partitions = 2
        pipeline.write(range(100, 120))
        copy_all(session, pipeline, 20)
    assert pipeline.counts() == Counter([*range(20), *range(100, 120)])


@pytest.mark.parametrize("reset", ["earliest", "latest"])
def test_a_session_that_was_away_reads_a_topic_that_was_created_again_from_its_beginning(
    broker: EmbeddedBroker, reset: str
) -> None:
    """The id beside the committed offset tells, if the broker has kept the offset."""
    pipeline = Pipeline(broker.bootstrap, partitions=1)
    pipeline.write(range(10))
    with pipeline.session() as session:
        copy_all(session, pipeline, 10)
    recreate(pipeline)
    pipeline.write(range(100, 130))
    _commit_as_if_before(pipeline)
    with pipeline.session(auto_offset_reset=reset) as session:
        copy_all(session, pipeline, 30)
    assert pipeline.counts() == Counter([*range(10), *range(100, 130)])


def _commit_as_if_before(pipeline: Pipeline) -> None:
    """A broker may drop the offsets of a topic with it. Put one back, as a slow commit would."""
    partition = TopicPartition(pipeline.source, 0)
    with Producer(bootstrap_servers=pipeline.bootstrap, transactional_id=f"late-{pipeline.group}") as producer:
        producer.begin()
        producer.send_offsets({partition: 10}, pipeline.group, notes={partition: PositionNote(uuid4(), 1).text})
        producer.commit()


def test_records_of_a_topic_that_is_created_again_while_they_are_processed_are_not_committed(
    broker: EmbeddedBroker,
) -> None:
    """Otherwise an offset of the old topic would be the group's position in the new one."""
    pipeline = Pipeline(broker.bootstrap, partitions=1)
    pipeline.write(range(10))
    with pipeline.session() as session:
        copy_all(session, pipeline, 10)
        pipeline.write(range(10, 20))
        with session.transaction(10_000) as transaction:
            assert transaction.table.num_rows == 10
            recreate(pipeline)
            pipeline.write(range(100, 140))
        # Its records were read before: whether they count is a matter of time, not of correctness.
        assert transaction.outcome in (Outcome.COMMITTED, Outcome.ABORTED)
        copy_all(session, pipeline, 40)
    assert Counter(n for n in pipeline.counts().elements() if n >= 100) == Counter(range(100, 140))


def test_a_committed_offset_says_of_which_topic_it_is(broker: EmbeddedBroker) -> None:
    """In the metadata beside it, where other clients leave it alone."""
    pipeline = Pipeline(broker.bootstrap, partitions=1)
    pipeline.write(range(3))
    with pipeline.session() as session:
        copy_all(session, pipeline, 3)
        partition = TopicPartition(pipeline.source, 0)
        found = fetch_group_offsets(session.cluster, pipeline.group, [partition])
        note = read_note(found.notes[partition])
        assert note is not None
        assert note.topic_id is not None
        assert note.topic_id == session.cluster.topic_id(pipeline.source)


# -- topics that do not exist ------------------------------------------------------------------------------------------


def test_a_session_without_its_topic_says_so(broker: EmbeddedBroker) -> None:
    """K3: it waited for ever, and `idle_ms` had no effect."""
    pipeline = Pipeline(broker.bootstrap)
    with pytest.raises(UnknownTopic, match="no topic 'no-such-topic'"), pipeline.session(topics=["no-such-topic"]):
        pass
    with pytest.raises(UnknownTopic, match="no topic 'no-such-topic'"):
        run(
            lambda table: table,
            to=pipeline.target,
            idle_ms=100,
            bootstrap=pipeline.bootstrap,
            group=pipeline.group,
            topics=[pipeline.source, "no-such-topic"],
            name=pipeline.group,
        )
