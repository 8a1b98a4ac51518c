"""The Java client of Apache Kafka as a peer: what one side writes, the other must read.

A small Java program (`java/Peer.java`, run straight from its source) carries out one command per line. Its docstring
has the line format; this module is the only one that speaks it.
"""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal

from semel.errors import SemelError
from semel.processes import spawn
from semel.testing.apache_kafka import LATEST, kafka_jars
from semel.testing.maven import java_command

Compression = Literal["none", "gzip", "snappy", "lz4", "zstd"]
End = Literal["commit", "abort", "leave open"]
Headers = tuple[tuple[str, bytes | None], ...]

SOURCE = Path(__file__).parent / "java" / "Peer.java"


class PeerFailed(SemelError):
    """The Java side raised; the message is its exception."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRecord:
    """A record as the Java client takes or gives it. None for what is left to the client, or not known."""

    key: bytes | None = None
    value: bytes | None = None
    headers: Headers = ()
    timestamp_ms: int | None = None
    partition: int | None = None
    offset: int | None = None
    sequence: int | None = None
    timestamp_type: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerBatch:
    """A record batch as Kafka's own reader sees it; its checksum was right."""

    magic: int
    base_offset: int
    last_offset: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    partition_leader_epoch: int
    compression: str
    timestamp_type: str
    max_timestamp_ms: int
    transactional: bool
    control: bool
    records: list[PeerRecord] = field(default_factory=list[PeerRecord])


class JavaPeer:
    """The running program; a context manager. Not for use by several threads at once."""

    def __init__(self, version: str = LATEST) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="semel-peer-")
        self._log = Path(self._folder.name) / "peer.log"
        command = [
            java_command(),
            "-Xmx512m",
            "-XX:TieredStopAtLevel=1",
            "-XX:+UseSerialGC",
            "-XX:-UsePerfData",
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=error",
            "-cp",
            f"{kafka_jars(version)}/*",
            str(SOURCE),
        ]
        self._process = spawn(command, folder=Path(self._folder.name), output=self._log, pipes=True)

    def __enter__(self) -> JavaPeer:
        try:
            self._call("hello")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()
        self._folder.cleanup()

    def produce(
        self,
        bootstrap: str,
        topic: str,
        records: Iterable[PeerRecord],
        *,
        compression: Compression = "none",
        transactional_id: str | None = None,
        end: End = "commit",
        config: Mapping[str, str] | None = None,
    ) -> list[tuple[int, int]]:
        """Write records, in one transaction if there is a `transactional_id`; returns their partitions and offsets."""
        options = {"bootstrap.servers": bootstrap, "compression.type": compression, "acks": "all", **(config or {})}
        options |= {"peer.topic": topic, "peer.end": end}
        if transactional_id is not None:
            options["transactional.id"] = transactional_id
        answer = self._call("produce", _map(options), *map(_record, records))
        return [(_int(partition), _int(offset)) for partition, offset in answer]

    def consume(
        self,
        bootstrap: str,
        topic: str,
        *,
        isolation: Literal["read_committed", "read_uncommitted"] = "read_committed",
        timeout_s: int = 30,
        config: Mapping[str, str] | None = None,
    ) -> list[PeerRecord]:
        """Every record of the topic up to where its partitions end now: their last stable offsets if read_committed."""
        options = {"bootstrap.servers": bootstrap, "isolation.level": isolation, **(config or {})}
        options |= {"peer.topic": topic, "peer.timeout.s": str(timeout_s)}
        return [
            PeerRecord(
                key=_bytes(key),
                value=_bytes(value),
                timestamp_ms=_int(timestamp),
                partition=_int(partition),
                offset=_int(offset),
                timestamp_type=_str(timestamp_type),
                headers=_headers(headers),
            )
            for key, value, timestamp, partition, offset, timestamp_type, *headers in self._call(
                "consume", _map(options)
            )
        ]

    def build_batch(
        self,
        records: Iterable[PeerRecord],
        *,
        compression: Compression = "none",
        base_offset: int = 0,
        producer_id: int = -1,
        producer_epoch: int = -1,
        base_sequence: int = -1,
        transactional: bool = False,
        partition_leader_epoch: int = -1,
        log_append_time_ms: int | None = None,
    ) -> bytes:
        """The bytes of one batch as Kafka's own writer makes it. Records need a timestamp; offsets may leave gaps."""
        options = {
            "compression": compression,
            "base_offset": base_offset,
            "producer_id": producer_id,
            "producer_epoch": producer_epoch,
            "base_sequence": base_sequence,
            "transactional": str(transactional).lower(),
            "partition_leader_epoch": partition_leader_epoch,
            "timestamp_type": "CreateTime" if log_append_time_ms is None else "LogAppendTime",
            "log_append_time": -1 if log_append_time_ms is None else log_append_time_ms,
        }
        ((batch,),) = self._call("build", _map(options), *map(_record, records))
        return _bytes(batch) or b""

    def build_end_marker(
        self,
        kind: Literal["COMMIT", "ABORT"],
        *,
        producer_id: int,
        producer_epoch: int,
        coordinator_epoch: int = 0,
        base_offset: int = 0,
        timestamp_ms: int = 0,
        partition_leader_epoch: int = 0,
    ) -> bytes:
        """The bytes of the control batch that ends a transaction."""
        options = {
            "type": kind,
            "producer_id": producer_id,
            "producer_epoch": producer_epoch,
            "coordinator_epoch": coordinator_epoch,
            "base_offset": base_offset,
            "timestamp": timestamp_ms,
            "partition_leader_epoch": partition_leader_epoch,
        }
        ((batch,),) = self._call("marker", _map(options))
        return _bytes(batch) or b""

    def parse_batches(self, data: bytes) -> list[PeerBatch]:
        """What Kafka's own reader finds in the bytes; raises PeerFailed if a checksum or a length is wrong."""
        batches: list[PeerBatch] = []
        for kind, *fields in self._call("parse", _field(data)):
            if _str(kind) == "batch":
                batches.append(_batch(fields))
            else:
                batches[-1].records.append(_parsed_record(fields))
        return batches

    def partition_for(self, key: bytes, partitions: int) -> int:
        """The partition that the Java producer's default partitioner gives a key."""
        options = {"key": base64.b64encode(key).decode(), "partitions": partitions}
        ((partition,),) = self._call("partition", _map(options))
        return _int(partition)

    def _call(self, command: str, *tokens: str) -> list[list[str]]:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise PeerFailed("The Java peer was started without pipes.")
        try:
            stdin.write(" ".join([command, *tokens]).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise PeerFailed(f"The Java peer has ended:\n{self._log.read_text()[-2000:]}") from None
        status, *answer = stdout.readline().decode().rstrip("\n").split(" ")
        if status == "ok":
            return [token.split(",") for token in answer]
        if status == "error":
            raise PeerFailed(_str(answer[0]))
        raise PeerFailed(f"The Java peer has ended:\n{self._log.read_text()[-2000:]}")


def _field(value: bytes | str | int | None) -> str:
    if value is None:
        return "-"
    raw = value if isinstance(value, bytes) else str(value).encode()
    return "+" + base64.b64encode(raw).decode()


def _record(record: PeerRecord) -> str:
    fields = [record.key, record.value, record.timestamp_ms, record.partition, record.offset]
    return ",".join(_field(value) for value in [*fields, *(part for header in record.headers for part in header)])


def _map(options: Mapping[str, str] | Mapping[str, str | int]) -> str:
    return ",".join(f"{_field(key)},{_field(value)}" for key, value in options.items())


def _bytes(text: str) -> bytes | None:
    return None if text == "-" else base64.b64decode(text[1:], validate=True)


def _str(text: str) -> str:
    return (_bytes(text) or b"").decode()


def _int(text: str) -> int:
    return int(_str(text))


def _headers(fields: Sequence[str]) -> Headers:
    return tuple((_str(name), _bytes(value)) for name, value in zip(fields[::2], fields[1::2], strict=True))


def _batch(fields: Sequence[str]) -> PeerBatch:
    (
        magic,
        first,
        last,
        producer_id,
        epoch,
        sequence,
        leader_epoch,
        codec,
        timestamps,
        newest,
        transactional,
        control,
    ) = fields
    return PeerBatch(
        magic=_int(magic),
        base_offset=_int(first),
        last_offset=_int(last),
        producer_id=_int(producer_id),
        producer_epoch=_int(epoch),
        base_sequence=_int(sequence),
        partition_leader_epoch=_int(leader_epoch),
        compression=_str(codec),
        timestamp_type=_str(timestamps),
        max_timestamp_ms=_int(newest),
        transactional=_str(transactional) == "true",
        control=_str(control) == "true",
    )


def _parsed_record(fields: Sequence[str]) -> PeerRecord:
    key, value, timestamp, offset, sequence, *headers = fields
    return PeerRecord(
        key=_bytes(key),
        value=_bytes(value),
        timestamp_ms=_int(timestamp),
        offset=_int(offset),
        sequence=_int(sequence),
        headers=_headers(headers),
    )
