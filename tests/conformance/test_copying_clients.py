"""Other clients copy a topic in transactions, as two members of a group, and every message arrives exactly once.

Each client runs unmodified in processes of its own and does what its documentation says: poll, begin, produce, send the
offsets to the transaction, then commit, or for a third of the transactions abort and go back. The second member joins
while transactions run. The judge is another reader. `SEMEL_COPIED_MESSAGES` sets the number of messages.
"""

from __future__ import annotations

import os
import random
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from confluent_kafka import Producer
from member_processes import Client, Member, go_program, java_program, python_program
from observer import committed_offsets, records_of, wait_until_settled
from targets import KafkaUnderTest, NewTopic, Target

from semel.client.admin import Admin

PARTITIONS = 4
KEYS = 997
TRANSACTION_RECORDS = 750
ABORT_ONE_IN = 3
COPY_TIMEOUT_S = 300.0
TRICKLE_RECORDS = 2 * TRANSACTION_RECORDS
TRICKLE_S = 0.1

CLIENTS = [
    *(Client("confluent", one, python_program("copiers/confluent_copier.py")) for one in ("eager", "consumer")),
    Client("kafka-python", "eager", python_program("copiers/kafka_python_copier.py")),
    Client("aiokafka", "eager", python_program("copiers/aiokafka_copier.py")),
    *(Client("java", one, java_program("Copier.java")) for one in ("cooperative", "consumer")),
    *(Client("franz-go", one, go_program("copier"), needs="go") for one in ("cooperative", "consumer")),
]
ENDED = {"Empty", "CompleteCommit", "CompleteAbort"}


class Source:
    """The topic that is copied: message n has the value n and one of a thousand keys."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.topic = topic
        self.written = 0
        self._producer = Producer(
            {"bootstrap.servers": bootstrap, "enable.idempotence": True, "partitioner": "murmur2_random"}
        )

    def write(self, count: int) -> None:
        for number in range(self.written, self.written + count):
            self._producer.produce(self.topic, str(number), f"key-{number % KEYS}")
            if not number % 10_000:
                self._producer.poll(0)
        assert self._producer.flush(60) == 0
        self.written += count


def message_count(target: Target) -> int:
    default = 100_000 if target.name.startswith("embedded") else 10_000
    return int(os.environ.get("SEMEL_COPIED_MESSAGES", default))


@pytest.mark.parametrize("client", CLIENTS, ids=str)
def test_a_topic_is_copied_exactly_once_through_aborts_and_a_rebalance(
    client: Client,
    target: Target,
    kafka: KafkaUnderTest,
    new_topic: NewTopic,
    rng: random.Random,
    tmp_path: Path,
) -> None:
    """Two members, transactions of 750, a third aborted, a member joins in the middle: nothing lost, nothing twice."""
    count = message_count(target)
    source = Source(kafka.bootstrap, new_topic(partitions=PARTITIONS))
    copy = new_topic(partitions=PARTITIONS)
    group = f"copy-{uuid.uuid4().hex[:8]}"
    settings = {
        "bootstrap": kafka.bootstrap,
        "source": source.topic,
        "target": copy,
        "group": group,
        "protocol": client.protocol,
        "transaction_records": TRANSACTION_RECORDS,
        "abort_one_in": ABORT_ONE_IN,
        "session_timeout_ms": 10_000,
    }

    def member(name: str) -> Member:
        own = {"transactional_id": f"{group}-{name}", "seed": rng.random()}
        return Member(name, client, tmp_path, {**settings, **own})

    with member("first") as first, member("second") as second:
        source.write(count // 4)
        first.join()
        first.wait_until(lambda: first.count("committed") > 0, "copying")
        second.join()
        _write_until_both_share(source, count, first, second)
        source.write(count - source.written)
        _wait_copied(kafka.bootstrap, source.topic, group, count, (first, second))
        for one in (first, second):
            one.leave()
        _assert_real_work(first, second)
    aborted = first.count("aborted") + second.count("aborted")
    _assert_exactly_once(kafka.bootstrap, copy, count)
    _assert_aborted_records_lie_in_the_log(kafka.bootstrap, copy, count + aborted)
    _assert_nothing_left_open(kafka.bootstrap, copy, group, target)


def _write_until_both_share(source: Source, count: int, first: Member, second: Member) -> None:
    """A trickle of input, so that the rebalance meets transactions and does not come after them all."""
    deadline = time.monotonic() + 60
    while not second.holds_within(TRICKLE_S, lambda: bool(first.assignment()) and bool(second.assignment())):
        assert time.monotonic() < deadline, f"no rebalance: {first.last_words()}\n{second.last_words()}"
        if source.written + TRICKLE_RECORDS <= count // 4 * 3:
            source.write(TRICKLE_RECORDS)


def _wait_copied(bootstrap: str, topic: str, group: str, count: int, members: Sequence[Member]) -> None:
    """Until the group's committed offsets have reached the end of the input."""
    deadline = time.monotonic() + COPY_TIMEOUT_S
    while sum(committed_offsets(bootstrap, group, {topic: PARTITIONS}).values()) < count:
        words = "\n".join(member.last_words() for member in members)
        assert time.monotonic() < deadline, f"not copied within {COPY_TIMEOUT_S} s: {words}"
        members[0].holds_within(0.5, lambda: False)
        members[1].assert_running()


def _assert_real_work(first: Member, second: Member) -> None:
    """Both took part, and transactions of both kinds happened: otherwise the test would prove nothing."""
    for member in (first, second):
        assert member.count("committed") > 0, member.last_words()
    commits, aborts = (
        sum(len(member.events(kind)) for member in (first, second)) for kind in ("committed", "aborted")
    )
    assert aborts > 0
    print(f"{commits} commits, {aborts} aborts, given up: {first.events('failed') + second.events('failed')}")


def _assert_exactly_once(bootstrap: str, copy: str, count: int) -> None:
    by_partition = records_of(bootstrap, copy, PARTITIONS)
    numbers = Counter(int(value) for values in by_partition.values() for value in values)
    twice = sorted(number for number, times in numbers.items() if times > 1)
    lost = sorted(set(range(count)) - set(numbers))
    assert (twice[:10], lost[:10]) == ([], []), f"{len(twice)} messages twice, {len(lost)} lost"
    assert len(numbers) == count
    for values in by_partition.values():
        last: dict[int, int] = {}
        for number in map(int, values):
            assert last.get(number % KEYS, -1) < number, f"{number} came after {last[number % KEYS]}, of the same key"
            last[number % KEYS] = number


def _assert_aborted_records_lie_in_the_log(bootstrap: str, copy: str, written: int) -> None:
    found = records_of(bootstrap, copy, PARTITIONS, committed=False)
    assert sum(map(len, found.values())) >= written


def _assert_nothing_left_open(bootstrap: str, copy: str, group: str, target: Target) -> None:
    """Every partition's last stable offset is its end, and the coordinator knows of no transaction that is open."""
    wait_until_settled(bootstrap, copy, PARTITIONS)
    if not target.has_transaction_admin:
        return
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        states = {one.transactional_id: one.state for one in admin.list_transactions()}
    ours = {name: state for name, state in states.items() if name.startswith(group)}
    assert ours
    assert set(ours.values()) <= ENDED, ours
