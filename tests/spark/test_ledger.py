"""The ledger on a real broker of both transaction protocols: what it says after commits, aborts and crashes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count

import pytest
from topic_contents import group_offsets

from semel.client.admin import Admin
from semel.client.partitions import TopicPartition
from semel.client.producer import Producer
from semel.client.progress_topic import PARTITIONS
from semel.errors import ConfigError, Fenced, KafkaError, TransactionAborted
from semel.spark.ledger import Entry, Ledger
from semel.spark.options import SinkOptions, make_options
from semel.spark.owner import PipelineOwner

_names = count()


@pytest.fixture
def options(bootstrap: str) -> SinkOptions:
    name = f"pipeline-{next(_names)}"
    return make_options(
        name=name, bootstrap=bootstrap, topic="out", settings=None, more_settings={}, ledger=f"ledger-of-{name}"
    )


Own = Callable[[SinkOptions], PipelineOwner]


@pytest.fixture
def own() -> Iterator[Own]:
    """Takes a pipeline over; connections are closed at the end, as a process does that dies."""
    with ExitStack() as opened:

        def take_over(options: SinkOptions) -> PipelineOwner:
            owner = PipelineOwner(options, options.name)
            opened.callback(owner.close)
            return owner

        yield take_over


def commit(owner: PipelineOwner, batch: int) -> None:
    owner.begin()
    owner.settle([], Entry(query="q", batch=batch), {})


def last_batch(options: SinkOptions) -> int | None:
    """What a new run of the pipeline finds."""
    owner = PipelineOwner(options, options.name)
    owner.close()
    return None if owner.committed is None else owner.committed.batch


def test_a_new_run_finds_the_last_batch_that_was_committed(options: SinkOptions, own: Own) -> None:
    """E2: commits count, aborts and what a crash left open do not."""
    owner = own(options)
    assert owner.committed is None
    commit(owner, 0)
    commit(owner, 1)
    assert owner.committed is not None
    assert owner.committed.batch == 1
    owner.begin()
    owner.abort()
    assert last_batch(options) == 1


def test_a_batch_without_its_commit_does_not_count(
    options: SinkOptions, monkeypatch: pytest.MonkeyPatch, own: Own
) -> None:
    """E2: a driver that died after the ledger's record and before EndTxn has written nothing."""
    owner = own(options)
    commit(owner, 0)
    monkeypatch.setattr(owner, "_commit", lambda: None)  # the driver dies just before
    commit(owner, 1)
    owner.close()
    assert last_batch(options) == 0


def test_another_pipelines_open_transaction_does_not_hide_what_was_committed(
    bootstrap: str, options: SinkOptions, own: Own
) -> None:
    """E2: the last stable offset may be held back for minutes; the markers of our own producer decide behind it."""
    owner = own(options)
    commit(owner, 0)
    ledger = Ledger(owner.cluster, options.ledger)
    with Producer(bootstrap_servers=bootstrap, transactional_id=f"stranger-of-{options.name}") as stranger:
        stranger.begin()
        stranger.send(options.ledger, b"{}", key=b"stranger", partition=ledger.place(options.name).partition)
        stranger.flush()
        commit(owner, 1)
        owner.begin()
        owner.abort()
        assert last_batch(options) == 1
        stranger.abort()
    assert last_batch(options) == 1


def test_pipelines_share_a_ledger_and_do_not_see_each_other(bootstrap: str, own: Own) -> None:
    """E2: one ledger serves all, also those whose names fall into one partition."""
    for number in range(2 * PARTITIONS):
        made = make_options(
            name=f"sharing-{number}", bootstrap=bootstrap, topic="out", settings=None, more_settings={}, ledger="shared"
        )
        owner = own(made)
        assert owner.committed is None
        commit(owner, number)
        owner.close()
        assert last_batch(made) == number


def test_the_older_of_two_runs_stops_with_one_sentence(options: SinkOptions, own: Own) -> None:
    """E2: a zombie driver learns that it is one, at whichever step, and disturbs its successor in none."""
    older = own(options)
    commit(older, 0)
    older.begin()
    newer = own(options)
    newer.begin()
    with pytest.raises(KafkaError):
        older.settle([], Entry(query="q", batch=1), {})
    with pytest.raises(Fenced, match=r"Another run of pipeline '.*' has taken over"):
        older.abort()
    newer.settle([], Entry(query="q", batch=1), {})
    assert last_batch(options) == 1


def test_a_transaction_that_took_too_long_is_told_and_the_next_one_works(bootstrap: str, own: Own) -> None:
    """E2: the coordinator aborts by time-out; the driver goes on under a new epoch."""
    made = make_options(
        name="slow", bootstrap=bootstrap, topic="out", settings=None, more_settings={"transaction_timeout_ms": 100}
    )
    owner = own(made)
    owner.begin()
    owner.cluster.sleep(1.5)
    try:
        owner.settle([], Entry(query="q", batch=0), {})
    except TransactionAborted:
        owner.abort()
    commit(owner, 1)
    assert last_batch(made) == 1


def test_input_offsets_are_committed_with_the_batch_or_not_at_all(
    bootstrap: str, options: SinkOptions, own: Own
) -> None:
    """E5: lag is seen under the pipeline's name."""
    topic = f"input-of-{options.name}"
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics(topic, partitions=2)
    owner = own(options)
    owner.begin()
    owner.settle([], Entry(query="q", batch=0), {TopicPartition(topic, 0): 5, TopicPartition(topic, 1): 7})
    owner.begin()
    owner.abort()
    assert group_offsets(bootstrap, options.name, topic, 2) == {0: 5, 1: 7}


def test_pipelines_that_start_together_create_one_ledger(
    options: SinkOptions, own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E2: whoever comes second finds it there."""
    commit(own(options), 0)
    monkeypatch.setattr("semel.client.cluster.Cluster.list_topics", lambda self: {})  # what it saw a moment ago
    assert last_batch(options) == 0


def test_a_topic_that_would_forget_is_refused(bootstrap: str, options: SinkOptions, own: Own) -> None:
    """E2: a ledger with retention loses what was committed, one with few partitions has no place for it."""
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics(options.ledger, partitions=PARTITIONS)
        with pytest.raises(ConfigError, match=r"cleanup\.policy=delete and would forget"):
            own(options)
        admin.create_topics("few", partitions=1, config={"cleanup.policy": "compact"})
    small = make_options(name="few", bootstrap=bootstrap, topic="out", settings=None, more_settings={}, ledger="few")
    with pytest.raises(ConfigError, match="has 1 partitions and needs 16"):
        own(small)
