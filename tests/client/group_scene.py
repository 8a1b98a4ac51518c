"""Members of one group on an embedded broker, each with a thread, for tests that watch who has which partition."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from semel.client.admin import Admin
from semel.client.membership import Membership
from semel.client.partitions import TopicPartition
from semel.client.settings import parse_config

SESSION_TIMEOUT_MS = 2_000
BROKER_CONFIG = {
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "300",
    "group.consumer.min.session.timeout.ms": "300",
    "group.consumer.session.timeout.ms": str(SESSION_TIMEOUT_MS),
    "group.consumer.min.heartbeat.interval.ms": "50",
    "group.consumer.heartbeat.interval.ms": "100",
}
WAIT_S = 30.0


class Hands:
    """A holder that agrees or not, and remembers what it was told."""

    def __init__(self) -> None:
        self.agrees = True
        self.asked_for: list[frozenset[TopicPartition]] = []
        self.was_lost: list[frozenset[TopicPartition]] = []

    def may_release(self, partitions: frozenset[TopicPartition]) -> bool:
        self.asked_for.append(partitions)
        return self.agrees

    def lost(self, partitions: frozenset[TopicPartition]) -> None:
        self.was_lost.append(partitions)

    def tick(self, now: float) -> None:
        pass


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not after {timeout_s:g} s: {what}"
        time.sleep(0.01)


class Scene:
    def __init__(self, bootstrap: str, protocol: str, partitions: int = 4) -> None:
        self.bootstrap = bootstrap
        self.topic = f"topic-{uuid.uuid4().hex[:8]}"
        self.group = f"{self.topic}-group"
        self.partitions = partitions
        self.settings: dict[str, object] = {
            "bootstrap.servers": bootstrap,
            "group.id": self.group,
            "session.timeout.ms": SESSION_TIMEOUT_MS,
            "heartbeat.interval.ms": 100,
            "max.poll.interval.ms": 10_000,
        }
        if protocol == "consumer":
            self.settings["group.protocol"] = "consumer"
        else:
            self.settings["partition.assignment.strategy"] = protocol
        with Admin({"bootstrap.servers": bootstrap}) as admin:
            admin.create_topics(self.topic, partitions=partitions)

    @contextmanager
    def member(self, hands: Hands | None = None, **more: Any) -> Iterator[Membership]:
        config = parse_config({**self.settings, **{name.replace("_", "."): value for name, value in more.items()}})
        membership = Membership(config.client, config.group, [self.topic], hands or Hands(), look_at_topics_s=0.5)
        membership.start()
        try:
            yield membership
        finally:
            membership.close()

    def wait_shared(self, *members: Membership) -> list[set[int]]:
        """Until every partition has one owner and every member has some; who has what then."""

        def shares() -> list[set[int]]:
            return [{partition.partition for partition in member.tenures} for member in members]

        def is_shared() -> bool:
            for member in members:
                member.raise_fatal()
            found = shares()
            return all(found) and sorted(p for share in found for p in share) == list(range(self.partitions))

        wait_until(is_shared, f"all partitions shared among {len(members)} members")
        return shares()
