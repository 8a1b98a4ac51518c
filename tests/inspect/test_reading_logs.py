"""Batches, records and lag as they are read from a broker, against what was written to it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from inspect_scene import Scene, scene

from semel.client.partitions import TopicPartition
from semel.client.producer import Producer
from semel.inspect.excerpts import read_excerpt
from semel.inspect.following import TailedMarker, TailedRecord, tail
from semel.inspect.groups import group_report
from semel.inspect.lag import TrueLag
from semel.inspect.ledgers import read_ledger
from semel.inspect.provenance import find_provenance
from semel.inspect.transaction_log import recent_transitions
from semel.inspect.transactions import held_partitions
from semel.spark.ledger import Entry, query_key


@pytest.fixture(scope="module", params=[1, 2])
def place(request: pytest.FixtureRequest) -> Iterator[Scene]:
    with scene(request.param) as opened:
        yield opened


@contextmanager
def written_randomly(place: Scene, topic: str, rng: random.Random) -> Iterator[dict[bytes, str]]:
    """Records of three transactional producers and a plain one: by its value, what became of each."""
    place.admin.create_topics(topic)
    with ExitStack() as stack:
        writers = [stack.enter_context(place.producer(f"{topic}-{number}")) for number in range(3)]
        plain = stack.enter_context(place.producer())
        fates: dict[bytes, str] = {}
        pending: dict[Producer, list[bytes]] = {}
        for number in range(40):
            value = b"%d" % number
            writer = rng.choice([*writers, plain])
            if writer in pending and rng.random() < 0.4:
                fate = rng.choice(["committed", "aborted"])
                writer.commit() if fate == "committed" else writer.abort()
                fates.update(dict.fromkeys(pending.pop(writer), fate))
                continue
            if writer is not plain and writer not in pending:
                writer.begin()
                pending[writer] = []
            if writer is not plain:
                pending[writer].append(value)
            fates[value] = "plain" if writer is plain else "open"
            writer.send(topic, value)
            writer.flush()
        yield fates


def test_each_record_is_told_as_what_it_is(place: Scene, rng: random.Random) -> None:
    """J1: committed, aborted, open or plain; who sees it; the same from any offset on, and by following the topic."""
    with written_randomly(place, "random", rng) as fates:
        check_statuses(place, fates, rng)


def check_statuses(place: Scene, fates: dict[bytes, str], rng: random.Random) -> None:
    named = TopicPartition("random", 0)
    whole = read_excerpt(place.cluster, named, 0, batches_max=1_000)
    records = list(whole.records(0))
    assert {one.record.value: one.batch.status for one in records} == fates
    assert whole.is_decided
    for one in records:
        is_seen = one.batch.status in ("plain", "committed") and one.record.offset < whole.last_stable_offset
        assert one.visible_to == ("everyone" if is_seen else "read_uncommitted")
        assert (one.ended_by is None) == (one.batch.status in ("plain", "open"))
    for _ in range(10):
        start = rng.randrange(whole.high_watermark)
        part = read_excerpt(place.cluster, named, start, batches_max=3)
        told = {one.record.offset: one.batch.status for one in part.records(start)}
        assert told.items() <= {one.record.offset: one.batch.status for one in records}.items()

    followed = list(tail(place.cluster, {named: 0}))

    statuses = {one.record.offset: one.status for one in followed if isinstance(one, TailedRecord)}
    for one in followed:
        if isinstance(one, TailedMarker):
            state = "committed" if one.marker.kind == "commit" else "aborted"
            statuses.update({offset: state for first, last in one.decided for offset in range(first, last + 1)})
    assert statuses == {one.record.offset: one.batch.status for one in records}
    committed = [
        one.record.value
        for one in tail(place.cluster, {named: 0}, committed_only=True)
        if isinstance(one, TailedRecord)
    ]
    assert committed == [one.record.value for one in records if one.visible_to == "everyone"]


def test_true_lag_counts_what_is_still_to_be_read(place: Scene, rng: random.Random) -> None:
    """J1: from any committed offset, by the records that a reader of committed records gets from there on."""
    with written_randomly(place, "lagging", rng):
        check_lag(place, rng)


def check_lag(place: Scene, rng: random.Random) -> None:
    named = TopicPartition("lagging", 0)
    whole = read_excerpt(place.cluster, named, 0, batches_max=1_000)
    for start in rng.sample(range(whole.high_watermark + 1), 8):
        place.admin.commit_offsets("slow", {named: start})
        records = list(whole.records(start))

        lag = group_report(place.cluster, "slow").total

        assert lag.naive == whole.high_watermark - start
        assert lag.readable == sum(one.visible_to == "everyone" for one in records)
        assert lag.open == sum(one.batch.status == "open" for one in records)
        assert lag.aborted == sum(one.batch.status == "aborted" for one in records)
        assert lag.readable + lag.waiting + lag.open + lag.aborted == len(records)
        assert lag.is_exact


def test_a_limit_ends_the_reading_of_a_long_log(place: Scene) -> None:
    """The work is bounded: what was not read is told, and brackets the true lag."""
    place.admin.create_topics("long")
    with place.producer() as producer:
        for _ in range(10):
            producer.send("long", b"x" * 10_000)
            producer.flush()
    place.admin.commit_offsets("far-behind", {("long", 0): 0})

    short = group_report(place.cluster, "far-behind", bytes_max=25_000).total
    nothing = group_report(place.cluster, "far-behind", bytes_max=0).total

    assert 0 < short.readable < 10
    assert short.at_most == 10
    assert nothing == TrueLag(10, unread_offsets=10)


def test_a_group_that_is_past_the_end_is_explained(place: Scene) -> None:
    """A topic that was created again has no such offset; there is no number that would be right."""
    place.admin.create_topics("made-again")
    place.admin.commit_offsets("ahead", {("made-again", 0): 50})
    report = group_report(place.cluster, "ahead")
    assert report.uncounted == 1
    [partition] = report.partitions
    assert partition.lag is None
    assert "created again" in (partition.trouble or "")


def test_a_pending_offset_of_an_open_transaction_is_told(place: Scene) -> None:
    """C2: the committed offset may still move."""
    place.admin.create_topics("pending")
    place.admin.commit_offsets("in-transaction", {("pending", 0): 0})
    with place.producer("pending-writer") as producer:
        producer.begin()
        producer.send_offsets({TopicPartition("pending", 0): 0}, "in-transaction")
        assert group_report(place.cluster, "in-transaction").is_pending
        [held] = held_partitions(place.cluster, ["__consumer_offsets"])
        assert held.holder is not None
        assert (held.holder.standing, held.holder.transactional_id) == ("alive", "pending-writer")
        producer.abort()
    assert not group_report(place.cluster, "in-transaction").is_pending


def test_what_an_id_did_lately_is_in_its_order(place: Scene) -> None:
    """J1: from the coordinator's log."""
    place.admin.create_topics("lately")
    with place.producer("lately-writer") as producer:
        with producer.transaction():
            producer.send("lately", b"x")
        producer.begin()
        producer.send("lately", b"y")
        producer.flush()
        producer.abort()
    states = [change.state for change in recent_transitions(place.cluster, "lately-writer")]
    assert states[0] == "Empty"
    ends = [state for state in states if state.startswith("Complete")]
    assert ends == ["CompleteCommit", "CompleteAbort"]


def test_a_record_is_traced_to_its_spark_batch(place: Scene) -> None:
    """J1: by the producer id and epoch in the ledger; an aborted entry does not count, and is told as what it is."""
    place.admin.create_topics("semel-ledger", "out")
    with place.producer("semel-pipeline") as producer:
        for batch in range(2):
            producer.begin()
            producer.send("out", b"%d" % batch)
            producer.flush()
            identity = producer.identity
            entry = Entry("q1", batch, outputs=["out"], pipeline="enrich", records=1, at_ms=batch + 1,
                          producer_id=identity.producer_id, producer_epoch=identity.producer_epoch)  # fmt: skip
            for key in ("enrich", query_key("q1")):
                producer.send("semel-ledger", entry.encode(), key=key)
            producer.flush()
            producer.commit() if batch == 0 else producer.abort()
    with place.producer() as noise:
        noise.send("semel-ledger", b"not JSON", key=b"\xff")

    entries = [one for one in read_ledger(place.cluster, "enrich") if not one.is_by_query]

    assert [(one.entry.batch, one.status) for one in entries] == [(0, "committed"), (1, "aborted")]
    [record] = read_excerpt(place.cluster, TopicPartition("out", 0), 0, end=1, batches_max=1).records(0)
    origin = find_provenance(place.cluster, record.batch.producer_id, record.batch.producer_epoch)
    assert origin.transactional_id == "semel-pipeline"
    assert origin.spark is not None
    if producer.transaction_protocol == 2:
        assert (origin.spark.pipeline, origin.spark.entry.batch) == ("enrich", 0)
