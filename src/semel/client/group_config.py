"""How a group member behaves: typed values, their defaults and the rules that they can break among themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from semel.errors import ConfigError

GroupProtocol = Literal["classic", "consumer"]

ASSIGNOR_SPELLINGS: Final = {
    "range": "range",
    "roundrobin": "roundrobin",
    "sticky": "sticky",
    "cooperative-sticky": "cooperative-sticky",
    "org.apache.kafka.clients.consumer.RangeAssignor": "range",
    "org.apache.kafka.clients.consumer.RoundRobinAssignor": "roundrobin",
    "org.apache.kafka.clients.consumer.StickyAssignor": "sticky",
    "org.apache.kafka.clients.consumer.CooperativeStickyAssignor": "cooperative-sticky",
}
"""librdkafka's names and Java's."""


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """
    >>> GroupConfig(group_id="billing").assignors
    ('cooperative-sticky',)
    """

    group_id: str | None = None
    group_instance_id: str | None = None
    """Makes a static member, which keeps its partitions while it is away for less than the session time-out."""
    protocol: GroupProtocol = "classic"
    """`consumer` is KIP-848, where the broker assigns; it needs Kafka 4.0."""
    assignors: tuple[str, ...] = ("cooperative-sticky",)
    """In order of preference. The group uses one that all members know."""
    remote_assignor: str | None = None
    """With `consumer`: which of the broker's assignors to use."""
    session_timeout_ms: int = 45_000
    """With `consumer` it is the broker's to say, and this only what the broker is expected to have."""
    heartbeat_interval_ms: int = 3_000
    rebalance_timeout_ms: int = 60_000
    """How long the others wait for this member to take part in a rebalance."""

    def __post_init__(self) -> None:
        if self.heartbeat_interval_ms * 2 > self.session_timeout_ms:
            raise ConfigError(
                f"heartbeat.interval.ms={self.heartbeat_interval_ms} leaves no second chance within "
                f"session.timeout.ms={self.session_timeout_ms}: write a third of it or less."
            )


def parse_assignors(name: str, value: object) -> tuple[str, ...]:
    """`partition.assignment.strategy`: one or several names, separated by commas, or a list of them.

    >>> parse_assignors("partition.assignment.strategy", "range, cooperative-sticky")
    ('range', 'cooperative-sticky')
    """
    entries = value.split(",") if isinstance(value, str) else value
    if not isinstance(entries, list | tuple) or not entries:
        raise ConfigError(
            f"{name} must be text: write one or several of range, roundrobin, sticky, cooperative-sticky."
        )
    found: list[str] = []
    for entry in entries:
        assignor = ASSIGNOR_SPELLINGS.get(str(entry).strip())
        if assignor is None:
            raise ConfigError(
                f"{name}={str(entry).strip()!r} is not supported: "
                "write one or several of range, roundrobin, sticky, cooperative-sticky."
            )
        found.append(assignor)
    return tuple(dict.fromkeys(found))
