"""Where a pipeline into a database begins: the database's positions beside the offsets that Kafka's group has. Pure.

The database decides. Kafka's copy can only tell that something is missing, or that the database has gone back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from semel.bridges.positions import Position
from semel.client.partitions import TopicPartition
from semel.errors import ConfigError

Resume = Literal["database", "group"]


class Differences(NamedTuple):
    """What Kafka's group has and the database has not."""

    missing: dict[TopicPartition, Position]
    """The group's positions in partitions of which the database knows nothing."""
    ahead: dict[TopicPartition, tuple[int, int]]
    """Where the database is, and where the group."""


def compare(stored: Mapping[TopicPartition, Position], committed: Mapping[TopicPartition, Position]) -> Differences:
    """
    >>> place = TopicPartition("orders", 0)
    >>> compare({place: Position(5)}, {place: Position(8)}).ahead
    {TopicPartition(topic='orders', partition=0): (5, 8)}
    >>> compare({}, {place: Position(8)}).missing
    {TopicPartition(topic='orders', partition=0): Position(next_offset=8, topic_id=None)}
    """
    missing = {place: at for place, at in committed.items() if place not in stored and at.next_offset > 0}
    ahead = {
        place: (stored[place].next_offset, at.next_offset)
        for place, at in committed.items()
        if place in stored and at.next_offset > stored[place].next_offset
    }
    return Differences(missing, ahead)


def refuse_missing(name: str, group: str, where: str, missing: Mapping[TopicPartition, Position]) -> ConfigError:
    place, (offset, _) = min(missing.items())
    return ConfigError(
        f"{where} knows nothing of pipeline {name!r} in {place.topic}-{place.partition}, but group {group!r} has "
        f"committed offset {offset} there. Either this is another database than before (a failover to a server without "
        f"Semel's tables, a wrong URL), or the group is that of another program. Nothing was read. If this is the "
        "wrong database, connect to the right one. If its tables are to be filled from the beginning, write "
        'resume="database". If they have the rows up to the group\'s offsets, write resume="group": rows of the last '
        "batch before the change may then come twice. Or use another name= and group=."
    )


def describe_ahead(ahead: Mapping[TopicPartition, tuple[int, int]]) -> str:
    """
    >>> describe_ahead({TopicPartition("orders", 0): (5, 8)})
    'orders-0 from 8 back to 5'
    """
    return ", ".join(
        f"{place.topic}-{place.partition} from {group} back to {database}"
        for place, (database, group) in sorted(ahead.items())
    )
