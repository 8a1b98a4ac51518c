"""What hangs, what only waits, and what cannot be told; and the end of what hangs, on both protocols."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from inspect_scene import Scene, scene

from semel.client.admin import ProducerState, TransactionDescription
from semel.client.partitions import TopicPartition
from semel.errors import InvalidState
from semel.inspect.excerpts import read_excerpt
from semel.inspect.hanging import judge
from semel.inspect.transactions import (
    NotHanging,
    end_hanging,
    find_open,
    held_partitions,
    known_transactions,
    open_transactions,
)

HERE = TopicPartition("orders", 0)
STATE = ProducerState(7, 3, 0, 0, 0, 4)


def described(state: str, *partitions: TopicPartition, epoch: int = 3) -> TransactionDescription:
    return TransactionDescription("writer", state, 60_000, 1, 7, epoch, partitions)


@pytest.fixture(scope="module", params=[1, 2])
def place(request: pytest.FixtureRequest) -> Iterator[Scene]:
    with scene(request.param) as opened:
        yield opened


def test_what_ended_between_two_looks_is_not_told() -> None:
    """Its marker came, or the next transaction of the same producer has begun."""
    for after in ({}, {7: ProducerState(7, 3, 0, 0, 0, None)}, {7: ProducerState(7, 3, 0, 0, 0, 9)}):
        assert judge(HERE, STATE, {}, after) is None


@pytest.mark.parametrize(
    ("coordinator", "standing"),
    [
        (described("Ongoing", HERE), "alive"),
        (described("PrepareAbort", HERE), "alive"),
        (described("CompleteCommit"), "hanging"),
        (described("Empty"), "hanging"),
        (described("Ongoing", TopicPartition("orders", 1)), "hanging"),
        (described("CompleteAbort", epoch=4), "hanging"),
    ],
)
def test_a_transaction_hangs_if_its_coordinator_does_not_list_the_partition(
    coordinator: TransactionDescription, standing: str
) -> None:
    """Whatever state it is in. A partition that still lacks its marker is listed."""
    found = judge(HERE, STATE, {7: coordinator}, {7: STATE})
    assert found is not None
    assert found.standing == standing
    assert ("epoch 4 by now" in found.explanation) == (coordinator.producer_epoch == 4)


def test_a_producer_that_no_coordinator_lists_is_not_called_hanging() -> None:
    """The user may only lack the right to see it, and to end it would lose half of a transaction."""
    found = judge(HERE, STATE, {}, {7: STATE})
    assert found is not None
    assert found.standing == "unknown"
    assert "DESCRIBE" in found.explanation


def test_a_hanging_transaction_holds_readers_until_it_is_ended(place: Scene) -> None:
    """B8: found among the held partitions, ended, and its record is an aborted one."""
    place.admin.create_topics("late")
    producer = place.hang("late", "late-writer")
    [held] = held_partitions(place.cluster, ["late"])
    assert (held.last_stable_offset, held.high_watermark) == (2, 3)
    assert held.holder is not None
    assert (held.holder.standing, held.holder.transactional_id) == ("hanging", "late-writer")

    end_hanging(place.cluster, "late", 0, producer.identity.producer_id, start_offset=2)

    assert held_partitions(place.cluster, ["late"]) == []
    excerpt = read_excerpt(place.cluster, TopicPartition("late", 0), 0, batches_max=10)
    assert [one.batch.status for one in excerpt.batches] == ["committed", "marker", "aborted", "marker"]
    assert excerpt.last_stable_offset == 4


def test_a_transaction_that_does_not_hang_is_left_alone(place: Scene) -> None:
    """It is listed with its age and partitions, holds its readers, and is not ended without force."""
    place.admin.create_topics("alive")
    with place.producer("alive-writer") as producer:
        producer.begin()
        producer.send("alive", b"x")
        producer.flush()
        [known] = [
            one
            for one in known_transactions(place.cluster, states=["Ongoing"])
            if one.description.transactional_id == "alive-writer"
        ]
        assert known.age_ms is not None
        assert known.description.partitions == (("alive", 0),)
        [held] = held_partitions(place.cluster, ["alive"])
        assert held.holder is not None
        assert held.holder.standing == "alive"
        with pytest.raises(NotHanging, match="does not hang"):
            end_hanging(place.cluster, "alive", 0, producer.identity.producer_id, start_offset=0)
        with pytest.raises(NotHanging, match="not the one that was meant"):
            end_hanging(place.cluster, "alive", 0, producer.identity.producer_id, start_offset=1, force=True)
        assert open_transactions(place.cluster, [("alive", 0)]) == [held.holder]
        producer.commit()
    with pytest.raises(InvalidState, match="no open transaction"):
        find_open(place.cluster, "alive", 0, producer.identity.producer_id)
