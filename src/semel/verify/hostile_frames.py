"""Requests of every API and version that the broker serves, with plausible values, and the ways to spoil them."""

from __future__ import annotations

import dataclasses
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from semel.records import reference
from semel.wire.api import Api
from semel.wire.messages import encode_request, request_schema
from semel.wire.server import SERVER_VERSIONS
from semel.wire.shape import nested_entity

CLIENT_ID: Final = "hostile"
_MS: Final = timedelta(milliseconds=1)

TOPICS: Final = ("orders", "compacted", "events.v2")
GROUPS: Final = ("readers", "classic", "modern")
TRANSACTIONAL_IDS: Final = ("tx-1", "tx-2", "tx-3")
CONFIGS: Final = (
    ("retention.ms", "60000"),
    ("cleanup.policy", "compact"),
    ("compression.type", "gzip"),
    ("max.message.bytes", "1000"),
    ("no.such.setting", "1"),
    ("min.insync.replicas", "1"),
)


@dataclass(slots=True)
class World:
    """What is alive on the broker that the frames are for: a request with these values gets far."""

    topic_ids: list[UUID] = field(default_factory=lambda: [UUID(int=7)])
    producers: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    member_ids: list[str] = field(default_factory=lambda: ["member-1"])
    sequences: dict[int, int] = field(default_factory=dict[int, int])
    now_ms: int = 1_700_000_000_000


def served() -> Iterator[tuple[Api, int]]:
    """Every API in every version that the broker serves."""
    for api, versions in SERVER_VERSIONS.items():
        for version in range(versions.lowest, versions.highest + 1):
            yield api, version


class FrameMaker:
    """Makes valid requests out of the shape of the messages."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self.world = world
        self._chance = chance

    def frame(self, api: Api, version: int, correlation_id: int) -> bytes:
        """A request as it is sent, with its size in front."""
        return b"".join(encode_request(self._request(api, version), correlation_id, CLIENT_ID))

    def _request(self, api: Api, version: int) -> Any:
        request = self._entity(request_schema(api, version))
        chance = self._chance
        if api is Api.FETCH:
            # A session is mostly begun or done without; most fetches are answered at once.
            changes: dict[str, Any] = {"max_wait": chance.choice((0, 0, 0, 5)) * _MS}
            if version >= 7:
                changes |= {"session_id": 0, "session_epoch": chance.choice((-1, 0))}
            return dataclasses.replace(request, **changes)
        if api is Api.CREATE_TOPICS and chance.random() < 0.8:
            plain = {"assignments": (), "num_partitions": chance.choice((-1, 1, 2)), "replication_factor": 1}
            topics = tuple(dataclasses.replace(topic, **plain) for topic in request.topics)
            return dataclasses.replace(request, topics=topics)
        return request

    def _entity(self, entity: Any) -> Any:
        producer = self._chance.choice(sorted(self.world.producers.items()) or [("tx-1", (1, 0))])
        return entity(**{one.name: self._field(entity.__name__, one, producer) for one in dataclasses.fields(entity)})

    def _field(self, entity: str, one: dataclasses.Field[Any], producer: tuple[str, tuple[int, int]]) -> Any:
        nested = nested_entity(one.type)
        may_be_null = "None" in str(one.type)
        if "tuple" in str(one.type):
            if may_be_null and self._chance.random() < 0.2:
                return None
            count = self._chance.choice((0, 1, 1, 1, 2))
            return tuple(
                self._entity(nested) if nested is not None else self._scalar(entity, one, producer)
                for _ in range(count)
            )
        if nested is not None:
            return None if self._chance.random() < 0.5 else self._entity(nested)
        if may_be_null and self._chance.random() < 0.3:
            return None
        return self._scalar(entity, one, producer)

    def _scalar(self, entity: str, one: dataclasses.Field[Any], producer: tuple[str, tuple[int, int]]) -> Any:
        kind, name = one.metadata["kafka_type"], one.name
        chance, world = self._chance, self.world
        if kind == "string":
            return self._text(entity, name, producer[0])
        if kind == "records":
            return self._batch(producer)
        if kind == "bytes":
            return chance.choice((b"", b"bytes", bytes(range(40)), b"\0\1\0\0\0\1\0\6orders\xff\xff\xff\xff"))
        if kind == "bool":
            return chance.random() < 0.5
        if kind == "uuid":
            return chance.choice(world.topic_ids)
        if kind.startswith("timedelta"):
            return chance.choice((0, 1, 6_000, 10_000, 45_000)) * _MS
        if name.endswith("producer_id") or name == "producer_id_filters":
            return producer[1][0]
        if name.endswith("producer_epoch"):
            return producer[1][1]
        return self._number(name)

    def _number(self, name: str) -> int:
        chance = self._chance
        if name == "acks":
            return chance.choice((-1, -1, 1, 0))
        if "partition" in name and name not in ("num_partitions", "partition_max_bytes"):
            return chance.choice((0, 0, 1, 2))
        if "bytes" in name:
            return chance.choice((0, 1, 1_048_576))
        if name in ("resource_type", "resource_type_filter", "key_type"):
            return chance.choice((0, 1, 2, 2, 3, 4, 5))
        if name == "timestamp":
            return chance.choice((-1, -2, -3, -4, 0, self.world.now_ms))
        if name in ("member_epoch", "generation_id", "generation_id_or_member_epoch"):
            return chance.choice((-1, 0, 0, 1, -2))
        return chance.choice((-1, 0, 0, 1, 2, 5))

    def _text(self, entity: str, name: str, transactional_id: str) -> str:
        chance = self._chance
        if "transactional_id_pattern" in name:
            return chance.choice(("tx-.*", ".*", "(a|b)+", "tx-[0-9]"))
        if "regex" in name:
            return chance.choice(("orders", "e.*", "o(r|d|e)+s"))
        if "transactional_id" in name:
            return transactional_id
        if "group" in name and name != "group_instance_id":
            return chance.choice(GROUPS)
        if "member" in name:
            return chance.choice(("", *self.world.member_ids))
        if entity == "JoinGroupRequestProtocol":
            return chance.choice(("range", "roundrobin"))
        if name == "protocol_type":
            return "consumer"
        if name == "server_assignor":
            return chance.choice(("uniform", "range", "none such"))
        if "Config" in entity or "configuration" in name:
            return chance.choice(chance.choice(CONFIGS))
        if name in ("states_filter", "state_filters"):
            return chance.choice(("Empty", "Stable", "Ongoing", "no such state"))
        if "mechanism" in name:
            return "PLAIN"
        if name == "host":
            return "*"
        if "principal" in name:
            return "User:alice"
        if name in ("key", "coordinator_keys"):
            return chance.choice((*GROUPS, *TRANSACTIONAL_IDS))
        if "topic" in name.lower() or name == "name" or "resource" in name:
            return chance.choice((*TOPICS, *TOPICS, f"new-{chance.randrange(20)}", "alice", "1", ""))
        return chance.choice(("", "text", "1"))

    def _batch(self, producer: tuple[str, tuple[int, int]]) -> bytes:
        chance, world = self._chance, self.world
        records = [
            reference.Record(at, world.now_ms, chance.choice((b"key", None)), b"value" * chance.randrange(3))
            for at in range(chance.randint(1, 3))
        ]
        compression = chance.choice(("none", "none", "gzip", "lz4", "snappy", "zstd"))
        identity: dict[str, Any] = {}
        if chance.random() < 0.7:
            producer_id, epoch = producer[1]
            sequence = world.sequences.get(producer_id, 0)
            world.sequences[producer_id] = sequence + len(records)
            identity = {
                "producer_id": producer_id,
                "producer_epoch": epoch,
                "base_sequence": sequence,
                "transactional": chance.random() < 0.7,
            }
        return reference.encode_batch(records, compression=compression, **identity)


# Spoiling.

_NUMBERS: Final = (
    *(struct.pack(">h", value) for value in (-1, -2, 0, 1, 2**15 - 1, -(2**15))),
    *(struct.pack(">i", value) for value in (-1, -2, 0, 1, 10_000, 100_001, 2**31 - 1, -(2**31))),
    *(struct.pack(">q", value) for value in (-1, 0, 2**63 - 1, -(2**63))),
    b"\xff\xff\xff\xff\x0f",
    b"\xff\xff\xff\xff\x07",
    b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    b"\x80\x80\x80\x80\x08",
    b"\x80\x00",
    b"\x00",
    b"\x01",
    b"\xff",
)
_SEQUENCES: Final = (b"\xed\xa0\x80", b"\xc3\x28", b"\x00", "é".encode(), b"..", b"/../../x", b"\n")


def mutate(frame: bytes, chance: random.Random) -> bytes:
    """A request without its size, spoiled in one to four places; now and then it is left alone."""
    data = bytearray(frame)
    for _ in range(chance.choice((0, 1, 1, 1, 1, 2, 2, 3, 4))):
        _spoil(data, chance)
    return bytes(data)


def _spoil(data: bytearray, chance: random.Random) -> None:
    # Behind the API key and the version, mostly: a spoiled head is refused before anything is looked at.
    first = 0 if chance.random() < 0.02 else min(8, len(data))
    at = chance.randint(first, len(data))
    match chance.randrange(8):
        case 0 if at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        case 1 if at < len(data):
            data[at] = chance.randrange(256)
        case 2:
            number = chance.choice(_NUMBERS)
            data[at : at + len(number)] = number
        case 3:
            data[at:at] = chance.choice(_NUMBERS)
        case 4:
            del data[at : at + chance.randint(1, 16)]
        case 5:
            end = at + chance.randint(1, 64)
            data[at:at] = data[at:end] * chance.randint(1, 4)
        case 6:
            data += chance.randbytes(chance.randint(1, 32))
        case 7:
            wild = chance.choice(_SEQUENCES)
            data[at : at + len(wild)] = wild
        case _:
            del data[at:]


def with_size(body: bytes) -> bytes:
    """The body as a frame."""
    return struct.pack(">i", len(body)) + body
