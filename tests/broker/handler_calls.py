"""Calls a handler the way a client does: from bytes to bytes, on a broker that has topics and nothing else."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import random
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

from kio.index import load_request_schema
from memory_meta import MemoryMeta

from semel.broker.acls import AllowAll, Authorizer
from semel.broker.configs import BrokerSettings, topic_settings
from semel.broker.context import Encoded, RequestContext
from semel.broker.dispatch import handler_for
from semel.broker.durability import Durability, Fsync
from semel.broker.pacing import Slices, SlowLane
from semel.broker.state import Broker
from semel.broker.topics import Topic, TopicStore
from semel.core.partition_log import PartitionLog
from semel.wire.api import Api
from semel.wire.messages import decode_response, encode_request, response_type_for
from semel.wire.server import decode_request, encode_response, read_request_head
from semel.wire.shape import nested_entity

ADDRESS = ("127.0.0.1", 9092)


class SmallPartition:
    """A partition that holds a number of records and no bytes."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.log = PartitionLog()
        self.log.leader_epochs.begin(0, 0)
        self.size_bytes = 0

    def fill(self, record_count: int) -> None:
        self.log.log_end_offset = record_count
        self.log.replay_high_watermark(record_count)
        self.size_bytes = 100 * record_count

    def delete_records(self, offset: int) -> int:
        log_start_offset = self.log.decide_delete_records(offset)
        self.log.replay_log_start(log_start_offset)
        return log_start_offset


class SmallBroker:
    """Topics, settings and an authorizer; partitions appear and go with the topics."""

    def __init__(self, *, data: str = "/data", meta: MemoryMeta | None = None, **configs: object) -> None:
        self.meta = meta or MemoryMeta()
        self.settings = BrokerSettings({name.replace("_", "."): value for name, value in configs.items()})
        self.options = SimpleNamespace(data=Path(data))
        self.authorizer: Authorizer = AllowAll()
        self.storage_errors: list[Exception] = []
        self.durability = Durability(Fsync.NEVER, self.storage_errors.append, in_thread=False)
        self.lane = SlowLane()
        self.leader_epoch = 0
        self.partitions: dict[tuple[str, int], SmallPartition] = {}
        source = random.Random(1)
        self.topics = TopicStore(self.meta, self, new_id=lambda: UUID(int=source.getrandbits(128), version=4))

    def partition(self, topic: str, index: int) -> SmallPartition | None:
        return self.partitions.get((topic, index))

    def advertised(self, context: RequestContext) -> tuple[str, int]:
        return ADDRESS

    def ensure_internal_topic(self, name: str) -> Topic:
        return self.topics.ensure_internal(name, self.settings)

    def note_storage_error(self, error: Exception) -> None:
        self.storage_errors.append(error)

    def new_topic(self, name: str, partition_count: int = 1, **configs: str) -> Topic:
        texts = {key.replace("_", "."): text for key, text in configs.items()}
        return self.topics.create(
            self.topics.decide_create(name, self.settings, partition_count=partition_count, configs=texts)
        )

    def on_created(self, topic: Topic) -> Slices[None]:
        return self.on_grown(topic, 0)

    def on_grown(self, topic: Topic, first_new: int) -> Slices[None]:
        yield
        for index in range(first_new, topic.partition_count):
            self.partitions[topic.name, index] = SmallPartition(topic_settings(topic.configs, self.settings).log)

    def on_deleted(self, topic: Topic) -> Slices[None]:
        yield
        for index in range(topic.partition_count):
            del self.partitions[topic.name, index]

    def on_config(self, topic: Topic) -> None:
        for index in range(topic.partition_count):
            self.partitions[topic.name, index].settings = topic_settings(topic.configs, self.settings).log


def ask(broker: SmallBroker, api: Api, version: int, /, *, principal: str = "User:ANONYMOUS", **fields: object) -> Any:
    """What a client reads that sends this request, made from plain values; a version leaves out what it has not."""
    request = _make(load_request_schema(api, version), fields)
    frame = b"".join(encode_request(request, 7, "test"))[4:]
    assert read_request_head(frame) == (api, version, 7)
    client_id, decoded = decode_request(frame, api, version)
    assert decoded == request
    connection = cast(Any, None)
    context = RequestContext(connection, principal, "127.0.0.1", client_id, version, 7)
    reply = handler_for(api)(cast(Broker, broker), context, decoded)
    if inspect.isawaitable(reply):
        reply = asyncio.run(_awaited(reply))
    pieces = reply.pieces if isinstance(reply, Encoded) else encode_response(cast(Any, reply), 7)
    answer = b"".join(pieces)
    assert int.from_bytes(answer[:4]) == len(answer) - 4
    return decode_response(response_type_for(request), answer[4:])


async def _awaited(reply: Any) -> Any:
    return await reply


def _make(entity: Any, values: Mapping[str, Any]) -> Any:
    made = {
        field.name: _convert(field, values[field.name]) for field in dataclasses.fields(entity) if field.name in values
    }
    return entity(**made)


def _convert(field: dataclasses.Field[Any], value: Any) -> Any:
    nested = nested_entity(field.type)
    if value is None:
        return None
    if nested is not None and isinstance(value, Mapping):
        return _make(nested, value)
    if nested is not None:
        return tuple(_make(nested, item) for item in value)
    if str(field.metadata.get("kafka_type", "")).startswith("timedelta"):
        return timedelta(milliseconds=value)
    return tuple(value) if isinstance(value, list) else value
