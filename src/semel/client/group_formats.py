"""What members of a classic group tell each other: subscriptions and assignments as bytes, in Java's layout.

The broker passes both on unread, so members of other libraries must understand ours and we theirs. Each begins with a
version; a reader takes what it knows and leaves the rest, so newer versions than ours can be read as ours.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Final

from kio.serial import entity_reader, entity_writer
from kio.serial.errors import SerialError

from semel.client.leader_calls import by_topic
from semel.client.partitions import TopicPartition
from semel.errors import WireError

NO_GENERATION: Final = -1

_VERSION: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_NEWEST: Final = 3


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a member wants, and what it had: `owned` in the generation named beside it."""

    topics: tuple[str, ...]
    owned: frozenset[TopicPartition] = frozenset()
    generation: int = NO_GENERATION
    user_data: bytes | None = None
    rack: str | None = None


def encode_subscription(subscription: Subscription) -> bytes:
    """In version 3, which every reader of version 0 and later understands as far as it goes.

    >>> decode_subscription(encode_subscription(Subscription(("orders",)))).topics
    ('orders',)
    """
    entity = _entity("subscription", _NEWEST)
    nested = _nested("subscription", _NEWEST)
    return _write(
        entity(
            topics=subscription.topics,
            user_data=subscription.user_data,
            owned_partitions=tuple(
                nested(topic=topic, partitions=tuple(partitions))
                for topic, partitions in by_topic(sorted(subscription.owned)).items()
            ),
            generation_id=subscription.generation,
            rack_id=subscription.rack,
        )
    )


def decode_subscription(data: bytes) -> Subscription:
    read = _read("subscription", data)
    return Subscription(
        tuple(read.topics),
        frozenset(
            TopicPartition(owned.topic, partition)
            for owned in getattr(read, "owned_partitions", ())
            for partition in owned.partitions
        ),
        getattr(read, "generation_id", NO_GENERATION),
        read.user_data,
        getattr(read, "rack_id", None),
    )


def encode_assignment(partitions: Iterable[TopicPartition]) -> bytes:
    """
    >>> decode_assignment(encode_assignment([TopicPartition("orders", 2)]))
    frozenset({TopicPartition(topic='orders', partition=2)})
    """
    entity, nested = _entity("assignment", _NEWEST), _nested("assignment", _NEWEST)
    assigned = tuple(
        nested(topic=topic, partitions=tuple(numbers)) for topic, numbers in by_topic(sorted(partitions)).items()
    )
    return _write(entity(assigned_partitions=assigned, user_data=None))


def decode_assignment(data: bytes) -> frozenset[TopicPartition]:
    """No bytes at all are an assignment of nothing: the leader has left this member out."""
    if not data:
        return frozenset()
    return frozenset(
        TopicPartition(topic.topic, partition)
        for topic in _read("assignment", data).assigned_partitions
        for partition in topic.partitions
    )


# -- user data of the sticky assignors ---------------------------------------------------------------------------------


def encode_sticky_data(owned: Iterable[TopicPartition], generation: int) -> bytes:
    """`sticky` is of the eager kind: by the time a member joins it owns nothing, so what it had is told here."""
    topics = by_topic(sorted(owned))
    parts = [_INT32.pack(len(topics))]
    for topic, partitions in topics.items():
        name = topic.encode()
        parts += [_VERSION.pack(len(name)), name, struct.pack(f">{len(partitions) + 1}i", len(partitions), *partitions)]
    return b"".join([*parts, _INT32.pack(generation)])


def encode_cooperative_data(generation: int) -> bytes:
    """For members that read version 1, where the subscription itself has no generation."""
    return _INT32.pack(generation)


def decode_sticky_data(data: bytes) -> tuple[frozenset[TopicPartition], int]:
    """What the member had, and in which generation. What cannot be read counts as nothing: it only costs stickiness.

    librdkafka writes this layout for `cooperative-sticky` too, where Java has the generation alone.

    >>> decode_sticky_data(encode_sticky_data([TopicPartition("orders", 2)], 7))
    (frozenset({TopicPartition(topic='orders', partition=2)}), 7)
    """
    if len(data) == _INT32.size:
        return frozenset(), _INT32.unpack(data)[0]
    owned: set[TopicPartition] = set()
    try:
        (topic_count,), at = _INT32.unpack_from(data), _INT32.size
        for _ in range(topic_count):
            (length,) = _VERSION.unpack_from(data, at)
            at += _VERSION.size
            topic = data[at : at + length].decode()
            at += length
            (count,) = _INT32.unpack_from(data, at)
            numbers = struct.unpack_from(f">{count}i", data, at + _INT32.size)
            at += _INT32.size * (count + 1)
            owned.update(TopicPartition(topic, number) for number in numbers)
        # Version 0 of the layout, from Kafka before 2.3, has no generation.
        generation = _INT32.unpack_from(data, at)[0] if at < len(data) else NO_GENERATION
    except (struct.error, UnicodeDecodeError):
        return frozenset(), NO_GENERATION
    return frozenset(owned), generation


# -- kio's messages ----------------------------------------------------------------------------------------------------


@cache
def _module(kind: str, version: int) -> Any:
    return import_module(f"kio.schema.consumer_protocol_{kind}.v{version}.data")


def _entity(kind: str, version: int) -> Any:
    return getattr(_module(kind, version), f"ConsumerProtocol{kind.title()}")


def _nested(kind: str, version: int) -> Any:
    return _module(kind, version).TopicPartition


def _write(message: Any) -> bytes:
    buffer = io.BytesIO(_VERSION.pack(message.__version__))
    buffer.seek(0, io.SEEK_END)
    entity_writer(type(message))(buffer, message)
    return buffer.getvalue()


def _read(kind: str, data: bytes) -> Any:
    try:
        (version,) = _VERSION.unpack_from(data)
        if version < 0:
            raise WireError(f"A member's {kind} has version {version}, which does not exist.")
        message, _ = entity_reader(_entity(kind, min(version, _NEWEST)))(data, _VERSION.size)
    except (struct.error, SerialError, IndexError) as error:
        raise WireError(f"A member's {kind} cannot be read: {error}.") from error
    return message
