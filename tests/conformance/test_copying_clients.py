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
from pathlib import Path

import pytest
from confluent_kafka import Producer
from member_processes import Client, Member, go_program, java_program, python_program
from observer import committed_offsets, records_of, wait_until_settled
from targets import WHOLE, KafkaUnderTest, NewTopic, Target

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
    *(Client("java", one, java_program("Copier")) for one in ("cooperative", "consumer")),
    *(Client("franz-go", one, go_program("copier"), needs="go") for one in ("cooperative", "consumer")),
]
KILLED_CLIENTS = [
    client
    for client in CLIENTS
    if str(client)
    in ("confluent-eager", "kafka-python-eager", "aiokafka-eager", "java-consumer", "franz-go-cooperative")
]
KILLED_MESSAGES = 12_000
SHORT_SESSION_MS = 3_000
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
    """The whole takes minutes for each kind of broker: `make conformance-whole`; every day has a part of it."""
    everyday = {"embedded": 20_000, "embedded-1": 10_000}.get(target.name, 4_000)
    return int(os.environ.get("SEMEL_COPIED_MESSAGES", 100_000 if WHOLE else everyday))


class Copy:
    """One group that copies one topic, and what is asked of the copy at the end."""

    def __init__(self, client: Client, bootstrap: str, new_topic: NewTopic, rng: random.Random, folder: Path) -> None:
        self.bootstrap = bootstrap
        self.source = Source(bootstrap, new_topic(partitions=PARTITIONS))
        self.topic = new_topic(partitions=PARTITIONS)
        self.group = f"copy-{uuid.uuid4().hex[:8]}"
        self._client = client
        self._rng = rng
        self._folder = folder

    def member(self, name: str, *, transactional_id: str | None = None, session_timeout_ms: int = 10_000) -> Member:
        settings = {
            "bootstrap": self.bootstrap,
            "source": self.source.topic,
            "target": self.topic,
            "group": self.group,
            "protocol": self._client.protocol,
            "transaction_records": TRANSACTION_RECORDS,
            "abort_one_in": ABORT_ONE_IN,
            "session_timeout_ms": session_timeout_ms,
            "transactional_id": f"{self.group}-{transactional_id or name}",
            "seed": self._rng.random(),
        }
        return Member(name, self._client, self._folder, settings)

    def write_until_both_share(self, count: int, first: Member, second: Member) -> None:
        """A trickle of input, so that the rebalance meets transactions and does not come after them all."""
        deadline = time.monotonic() + 60
        while not second.holds_within(TRICKLE_S, lambda: bool(first.assignment()) and bool(second.assignment())):
            assert time.monotonic() < deadline, f"no rebalance: {first.last_words()}\n{second.last_words()}"
            if self.source.written + TRICKLE_RECORDS <= count:
                self.source.write(TRICKLE_RECORDS)

    def wait_done(self, *members: Member) -> None:
        """Until the group's committed offsets have reached the end of the input."""
        deadline = time.monotonic() + COPY_TIMEOUT_S
        while self._committed() < self.source.written:
            words = "\n".join(member.last_words() for member in members)
            assert time.monotonic() < deadline, f"not copied within {COPY_TIMEOUT_S} s: {words}"
            for member in members:
                member.assert_running()
            members[0].holds_within(0.5, lambda: False)

    def _committed(self) -> int:
        return sum(committed_offsets(self.bootstrap, self.group, {self.source.topic: PARTITIONS}).values())

    def assert_exactly_once(self) -> None:
        """Every message of the input is there once, those of a key in their order."""
        by_partition = records_of(self.bootstrap, self.topic, PARTITIONS)
        numbers = Counter(int(value) for values in by_partition.values() for value in values)
        twice = sorted(number for number, times in numbers.items() if times > 1)
        lost = sorted(set(range(self.source.written)) - set(numbers))
        assert (twice[:10], lost[:10]) == ([], []), f"{len(twice)} messages twice, {len(lost)} lost"
        assert len(numbers) == self.source.written
        for values in by_partition.values():
            last: dict[int, int] = {}
            for number in map(int, values):
                before = last.get(number % KEYS, -1)
                assert before < number, f"{number} came after {before}, which has the same key"
                last[number % KEYS] = number

    def assert_nothing_left_open(self, target: Target) -> None:
        """Every partition's last stable offset is its end, and the coordinator knows of no open transaction."""
        wait_until_settled(self.bootstrap, self.topic, PARTITIONS)
        if target.has_transaction_admin:
            with Admin({"bootstrap.servers": self.bootstrap}) as admin:
                states = {one.transactional_id: one.state for one in admin.list_transactions()}
            ours = {name: state for name, state in states.items() if name.startswith(self.group)}
            assert ours
            assert set(ours.values()) <= ENDED, ours


@pytest.mark.parametrize("client", CLIENTS, ids=str)
def test_a_topic_is_copied_exactly_once_through_aborts_and_a_rebalance(
    client: Client, target: Target, kafka: KafkaUnderTest, new_topic: NewTopic, rng: random.Random, tmp_path: Path
) -> None:
    """Two members, transactions of 750, a third aborted, a member joins in the middle: nothing lost, nothing twice."""
    count = message_count(target)
    copy = Copy(client, kafka.bootstrap, new_topic, rng, tmp_path)
    with copy.member("first") as first, copy.member("second") as second:
        copy.source.write(count // 4)
        first.join()
        first.wait_until(lambda: first.count("committed") > 0, "copying")
        second.join()
        copy.write_until_both_share(count // 4 * 3, first, second)
        copy.source.write(count - copy.source.written)
        copy.wait_done(first, second)
        first.leave()
        second.leave()
    assert min(first.count("committed"), second.count("committed")) > 0, "one of them did nothing"
    aborted = first.count("aborted") + second.count("aborted")
    assert aborted > 0
    copy.assert_exactly_once()
    everything = records_of(kafka.bootstrap, copy.topic, PARTITIONS, committed=False)
    assert sum(map(len, everything.values())) >= count + aborted, "what was aborted never reached the log"
    copy.assert_nothing_left_open(target)


@pytest.mark.parametrize("client", KILLED_CLIENTS, ids=str)
def test_a_copy_is_exactly_once_though_a_member_is_killed_and_replaced(
    client: Client, target: Target, kafka: KafkaUnderTest, new_topic: NewTopic, rng: random.Random, tmp_path: Path
) -> None:
    """SIGKILL amid its transactions; a new process with its transactional id ends what it left and goes on."""
    copy = Copy(client, kafka.bootstrap, new_topic, rng, tmp_path)
    with (
        copy.member("first", session_timeout_ms=SHORT_SESSION_MS) as first,
        copy.member("second", session_timeout_ms=SHORT_SESSION_MS) as second,
        copy.member("third", transactional_id="first", session_timeout_ms=SHORT_SESSION_MS) as third,
    ):
        copy.source.write(KILLED_MESSAGES // 4)
        first.join()
        second.join()
        copy.write_until_both_share(KILLED_MESSAGES // 2, first, second)
        before = first.count("committed")
        copy.source.write(KILLED_MESSAGES - copy.source.written)
        first.wait_until(lambda: first.count("committed") > before, "copying")
        first.kill()
        third.join()
        copy.wait_done(second, third)
        third.wait_until(lambda: bool(third.assignment()), "a member")
        second.leave()
        third.leave()
    copy.assert_exactly_once()
    copy.assert_nothing_left_open(target)
