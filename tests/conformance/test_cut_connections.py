"""The connection is cut before and after every frame of a transaction; the client must say what the log says."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from observer import committed_offsets, records_of, wait_until_settled
from targets import KafkaUnderTest, NewTopic, Target

from semel.client.partitions import TopicPartition
from semel.client.producer import Outcome, Producer
from semel.client.transaction_state import State
from semel.errors import CommitUnknown, SemelError
from semel.testing.proxy import Cut, KafkaProxy

PARTITIONS = 2
OFFSET = 41
# A patient client goes on until it knows. An impatient one gives up at once, and one that is impatient only with its
# commit is left in doubt whenever the commit's answer is lost.
PATIENT: dict[str, object] = {"default.api.timeout.ms": 20_000, "delivery.timeout.ms": 20_000}
IMPATIENT: dict[str, object] = {"default.api.timeout.ms": 1, "delivery.timeout.ms": 200, "request.timeout.ms": 200}
MODES = {"patient": (PATIENT, None), "impatient": (IMPATIENT, None), "impatient commit": (PATIENT, 0)}
RESOLVE_S = 60


def transact(bootstrap: str, topic: str, run: str, settings: dict[str, object], commit_timeout_ms: int | None) -> str:
    """One transaction over two partitions with offsets: "committed", "aborted" or "unknown, then ..."."""
    common: dict[str, object] = {"bootstrap.servers": bootstrap, "transactional.id": run, "retry.backoff.ms": 2}
    try:
        producer = Producer({**common, **settings})
    except SemelError:
        return "aborted"
    try:
        producer.begin()
        for partition in range(PARTITIONS):
            producer.send(topic, run.encode(), partition=partition)
        producer.send_offsets({TopicPartition(topic, 0): OFFSET}, run)
        producer.commit(timeout_ms=commit_timeout_ms)
        return "committed"
    except CommitUnknown:
        return f"unknown, then {resolve(producer).value}"
    except SemelError:
        return "aborted"
    finally:
        producer.cluster.close()


def resolve(producer: Producer) -> Outcome:
    """An impatient client may have to ask more than once; until it is told, it must stay in doubt."""
    deadline = time.monotonic() + RESOLVE_S
    while time.monotonic() < deadline:
        try:
            return producer.resolve()
        except SemelError:
            assert producer.state is State.UNKNOWN
    raise AssertionError("the outcome was never told")


def restart(bootstrap: str, run: str) -> None:
    """What an application does after a failure: a new producer with the same id, which ends whatever was left open."""
    Producer(bootstrap_servers=bootstrap, transactional_id=run).close()


@pytest.mark.parametrize("mode", MODES)
def test_every_cut_ends_in_one_outcome_and_the_log_agrees(
    kafka: KafkaUnderTest, target: Target, new_topic: NewTopic, mode: str
) -> None:
    """B1, B2, D5: committed, aborted or unknown-then-resolved at each cut, all records and offsets or none."""
    topic = new_topic(partitions=PARTITIONS)
    # The first transaction of a broker's life also creates internal topics; the frames are counted after it.
    transact(kafka.bootstrap, topic, f"{topic}-first", PATIENT, None)
    with KafkaProxy(kafka.bootstrap) as proxy:
        assert transact(proxy.bootstrap, topic, f"{topic}-uncut", PATIENT, None) == "committed"
        frames = len(proxy.passages)
    assert frames >= 16, "a transaction takes at least eight requests, answered"

    outcomes: dict[str, str] = {f"{topic}-uncut": "committed"}
    for index in range(frames):
        for cut in Cut:
            run = f"{topic}-{index}-{cut.value}"
            with KafkaProxy(kafka.bootstrap) as proxy:
                proxy.decide = lambda passage, at=index, how=cut: how if passage.index == at else None
                outcomes[run] = transact(proxy.bootstrap, topic, run, *MODES[mode])
            if outcomes[run] == "aborted":
                restart(kafka.bootstrap, run)

    wait_until_settled(kafka.bootstrap, topic, PARTITIONS)
    visible = records_of(kafka.bootstrap, topic, PARTITIONS)
    counts = [Counter(value.decode() for value in visible[partition]) for partition in range(PARTITIONS)]
    for run, outcome in outcomes.items():
        is_committed = outcome.endswith("committed")
        assert [count[run] for count in counts] == [int(is_committed)] * PARTITIONS, (run, outcome)
        offsets = committed_offsets(kafka.bootstrap, run, {topic: 1})
        assert offsets == ({(topic, 0): OFFSET} if is_committed else {}), (run, outcome)

    told = Counter(outcomes.values())
    print(f"{target.name}, {mode}: {frames} frames, {dict(told)}")
    if mode == "patient":
        assert set(told) == {"committed"}, "a client that may retry gets through every cut"
    elif mode == "impatient":
        assert told["aborted"], "no cut kept the impatient client from committing: this test does not cut"
    else:
        assert {"unknown, then committed", "unknown, then aborted"} <= set(told), (
            "no commit was left in doubt both ways"
        )
