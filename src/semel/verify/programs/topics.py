"""Reads a program's topics: all that is committed, as often as asked; and what a watching reader is given meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from semel.client.fetcher import Fetcher
from semel.errors import InvalidState, SemelError
from semel.verify.clients.face import Clients, Reader
from semel.verify.history import Act, HistoryWriter, Isolation, Phase, make_rows
from semel.verify.programs.records import Finding, TopicRecord

Place = tuple[str, int, int]
"""Topic, partition and offset."""

_POLL_MS: Final = 200
_POLL_RECORDS_MAX: Final = 20_000
_PAUSE_S: Final = 0.1
_JOIN_S: Final = 30.0


def read_topic(bootstrap: str, topic: str, partitions: int) -> list[TopicRecord]:
    """All committed records, by partition and offset. What an open transaction holds back is not committed."""
    records = [
        TopicRecord(topic, partition, offset, key, value, tuple(map(_pair, headers or ())), timestamp)
        for table in _tables(bootstrap, topic, partitions, "read_committed")
        for partition, offset, key, value, headers, timestamp in zip(*_columns(table), strict=True)
    ]
    return sorted(records, key=lambda record: (record.partition, record.offset))


def count_written(bootstrap: str, topic: str, partitions: int) -> int:
    """How many records there are with those that were aborted or are not committed yet."""
    return sum(table.num_rows for table in _tables(bootstrap, topic, partitions, "read_uncommitted"))


def _tables(bootstrap: str, topic: str, partitions: int, isolation: Isolation) -> Iterator[pa.Table]:
    settings = {"bootstrap.servers": bootstrap, "client.id": "semel-verify-judge", "isolation.level": isolation}
    with Fetcher(settings) as fetcher:
        fetcher.assign({(topic, index): 0 for index in range(partitions)})
        yield from fetcher.read_until(fetcher.end_offsets())


def _columns(table: pa.Table) -> list[list[Any]]:
    named = [table.column(name).to_pylist() for name in ("partition", "offset", "key", "value", "headers")]
    return [*named, table.column("timestamp").cast(pa.int64()).to_pylist()]


def _pair(header: Any) -> tuple[str, bytes | None]:
    return (header["key"], header["value"]) if isinstance(header, Mapping) else (header[0], header[1])


class Watcher:
    """Reads committed records of the outputs while the run goes on, with a client of any library.

    It notes when it saw what: a record that it was given and that is not committed in the end is dirty.
    """

    def __init__(self, path: Path, *, process: int, clients: Clients, numbers: Mapping[int, tuple[str, int]]) -> None:
        self._clients = clients
        self._numbers = numbers
        self._history = HistoryWriter(path, process=process)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="semel-watcher", daemon=True)
        self._lock = threading.Lock()
        self._seen: dict[Place, tuple[int, int]] = {}
        self._failure: Exception | None = None

    def raise_failure(self) -> None:
        """Without a watcher nothing is known of the outputs."""
        if self._failure is not None:
            raise InvalidState(f"The reader of the outputs failed: {self._failure!r}.") from self._failure

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    @property
    def count(self) -> int:
        """How many records it has seen."""
        with self._lock:
            return len(self._seen)

    @property
    def times_ns(self) -> list[int]:
        """When it saw each of them."""
        with self._lock:
            return [time_ns for time_ns, _ in self._seen.values()]

    def saw_at_ns(self, record: TopicRecord) -> int | None:
        """When it saw this output."""
        seen = self._seen.get((record.topic, record.partition, record.offset))
        return None if seen is None else seen[0]

    def dirty(self, outputs: Sequence[TopicRecord]) -> Iterator[Finding]:
        """What it was given, and is not among these outputs, which are all that are committed."""
        committed = {(one.topic, one.partition, one.offset): hash(one.value) for one in outputs}
        for (topic, partition, offset), (_, content) in sorted(self._seen.items()):
            if committed.get((topic, partition, offset)) != content:
                record = TopicRecord(topic, partition, offset, None, None)
                text = f"Dirty: a reader of committed records was given {topic}-{partition} offset {offset}."
                yield Finding("dirty", text, (record,))

    def _run(self) -> None:
        now_ns = time.monotonic_ns()
        for number in self._numbers:
            self._history.note(Act.ASSIGN, Phase.OK, time_ns=now_ns, partition=number, offset=0)
        self._history.flush()
        reader: Reader | None = None
        try:
            while not self._stopping.is_set():
                try:
                    if reader is None:
                        reader = self._clients.reader(dict.fromkeys(self._numbers, 0), "read_committed")
                    self._take(reader)
                except SemelError:  # the broker is away, by a fault
                    self._stopping.wait(_PAUSE_S)
        except Exception as error:
            self._failure = error
        finally:
            if reader is not None:
                reader.close()
            self._clients.close()
            self._history.close()

    def _take(self, reader: Reader) -> None:
        incoming = reader.poll(_POLL_MS, _POLL_RECORDS_MAX)
        if not len(incoming):
            return
        now_ns = time.monotonic_ns()
        places = zip(incoming.partition.tolist(), incoming.offset.tolist(), incoming.payloads.to_pylist(), strict=True)
        with self._lock:
            for number, offset, value in places:
                self._seen.setdefault((*self._numbers[number], offset), (now_ns, hash(value)))
        self._history.note_rows(
            make_rows(
                len(incoming),
                Act.READ,
                Phase.OK,
                time_ns=now_ns,
                partition=incoming.partition,
                offset=incoming.offset,
            )
        )
