"""Semel's own client for the workloads: Arrow tables both ways."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
import pyarrow as pa

from semel.client.fetcher import Fetcher
from semel.client.partitions import TopicPartition
from semel.client.producer import Outcome as Resolved
from semel.client.producer import Producer
from semel.client.sender import Stored
from semel.client.transaction_state import State
from semel.errors import CommitUnknown, ConfigError, Fenced, InvalidState, SemelError
from semel.verify.clients.face import (
    NOTHING,
    RETRY_S,
    Acks,
    Clients,
    Delivered,
    GroupConsumer,
    Incoming,
    Integers,
    Outcome,
    Outgoing,
    Surroundings,
)
from semel.verify.history import Isolation, Phase

_QUICK: Final = {"retry.backoff.ms": 20, "retry.backoff.max.ms": 200}
_READ_BYTES_MAX: Final = 2 << 20


def open_clients(surroundings: Surroundings) -> Clients:
    return Clients(surroundings, _TransactionalWriter, _PlainWriter, _Reader, _no_group_consumer)


def _no_group_consumer(surroundings: Surroundings, group: str, topic: str) -> GroupConsumer:
    raise ConfigError("Semel's client has no group member yet: let the workload assign the partitions.")


def _settings(surroundings: Surroundings, **more: Any) -> dict[str, Any]:
    return {
        "bootstrap.servers": surroundings.bootstrap,
        "client.id": surroundings.client_id,
        "default.api.timeout.ms": int(surroundings.patience_s * 1000),
        "delivery.timeout.ms": int(surroundings.patience_s * 1000),
        **_QUICK,
        **more,
        **surroundings.settings,
    }


class _Routes:
    """From the manifest's numbers to topics and partitions, for whole arrays of records, and back."""

    def __init__(self, partitions: Sequence[tuple[str, int]]) -> None:
        self._topics = list(dict.fromkeys(topic for topic, _ in partitions))
        self._topic = np.array([self._topics.index(topic) for topic, _ in partitions])
        self._index = np.array([index for _, index in partitions], np.int32)
        self._numbers = {place: number for number, place in enumerate(partitions)}

    def tables(self, records: Outgoing) -> Iterator[tuple[str, pa.Table]]:
        """As the producer takes them, one for each topic."""
        index, topic = self._index[records.partition], self._topic[records.partition]
        whole = pa.table({"value": records.payloads, "key": records.keys, "partition": pa.array(index)})
        for number in np.unique(topic).tolist():
            is_here = topic == number
            yield self._topics[number], whole if is_here.all() else whole.filter(pa.array(is_here))

    def offsets(self, sent: Sequence[Integers], stored: Sequence[Stored]) -> Integers:
        """The offset of each record, given the partitions they were sent to and the batches that were stored."""
        partition = np.concatenate(sent) if sent else np.empty(0, np.int16)
        batches: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for batch in stored:
            batches[self._numbers[batch.topic, batch.partition]].append((batch.base_offset, batch.record_count))
        offsets = np.full(len(partition), -1, np.int64)
        for number, found in batches.items():
            rows = np.flatnonzero(partition == number)
            if all(base >= 0 for base, _ in found) and sum(count for _, count in found) == len(rows):
                offsets[rows] = np.concatenate([np.arange(base, base + count) for base, count in sorted(found)])
        return offsets


class _TransactionalWriter:
    def __init__(self, surroundings: Surroundings, transactional_id: str) -> None:
        self._surroundings = surroundings
        self._id = transactional_id
        self._routes = _Routes(surroundings.partitions)
        self._sent: list[Integers] = []
        self._producer: Producer | None = None
        self._fenced: Fenced | None = None

    def connect(self) -> None:
        if self._fenced is not None:
            raise self._fenced
        if self._producer is None:
            self._producer = Producer(
                _settings(
                    self._surroundings,
                    transactional_id=self._id,
                    transaction_timeout_ms=self._surroundings.transaction_timeout_ms,
                )
            )

    def begin(self) -> None:
        self._sent = []
        self.connect()
        try:
            self._open.begin()
        except SemelError as error:
            self._give_up(error)
            raise

    def send(self, records: Outgoing) -> None:
        self._sent.append(records.partition)
        for topic, table in self._routes.tables(records):
            self._open.send_table(topic, table)

    def send_positions(self, positions: Mapping[int, int], group: str, member: object) -> None:
        places = {TopicPartition(*self._surroundings.partitions[number]): at for number, at in positions.items()}
        self._open.send_offsets(places, group)

    def flush(self) -> Integers:
        return self._routes.offsets(self._sent, self._open.flush())

    def commit(self) -> Outcome:
        try:
            self._open.commit()
            return Outcome.COMMITTED
        except CommitUnknown:
            return self._resolve()
        except SemelError as error:  # also Fenced: told only where the transaction is known not to be committed
            if self._open.state is State.DEAD:
                self._give_up(error)
            else:
                with suppress(SemelError):  # the next producer settles what this one cannot
                    self.abort()
        return Outcome.ABORTED

    def _resolve(self) -> Outcome:
        deadline = time.monotonic() + self._surroundings.patience_s
        while time.monotonic() < deadline and not self._surroundings.is_stopping():
            try:
                told = self._open.resolve()
                return Outcome.COMMITTED if told is Resolved.COMMITTED else Outcome.ABORTED
            except InvalidState:
                break
            except SemelError:
                time.sleep(RETRY_S)
        self._forget()
        return Outcome.UNKNOWN

    def abort(self) -> None:
        try:
            self._open.abort()
        except SemelError as error:
            self._give_up(error)
            raise

    def close(self) -> None:
        if self._producer is not None:
            with suppress(SemelError):  # what is open then is aborted by the next life, or by its time-out
                self._producer.close()

    @property
    def _open(self) -> Producer:
        if self._producer is None:
            raise InvalidState("There is no transaction: begin one first.")
        return self._producer

    def _forget(self) -> None:
        """A new producer of the same id settles whatever this one leaves."""
        if self._producer is not None:
            self._producer.cluster.close()
        self._producer = None

    def _give_up(self, error: SemelError) -> None:
        # A dead one may have been fenced whatever the error says: while its successor takes over, the coordinator
        # answers INVALID_TXN_STATE. A new one could take the id back from it, so this is the end.
        if self._open.state is State.DEAD:
            self._fenced = error if isinstance(error, Fenced) else Fenced(f"This producer cannot go on: {error}")
        self._forget()


class _PlainWriter:
    def __init__(self, surroundings: Surroundings, idempotent: bool, acks: Acks) -> None:
        self._settings = _settings(surroundings, enable_idempotence=idempotent, acks=acks)
        self._routes = _Routes(surroundings.partitions)
        self._producer: Producer | None = None

    def write(self, records: Outgoing) -> Delivered:
        try:
            if self._producer is None:
                self._producer = Producer(self._settings)
        except SemelError:
            return Delivered.all_alike(len(records), Phase.FAIL)  # not one byte of them has left
        try:
            for topic, table in self._routes.tables(records):
                self._producer.send_table(topic, table)
            offsets = self._routes.offsets([records.partition], self._producer.flush())
        except SemelError:
            self._producer.cluster.close()
            self._producer = None
            return Delivered.all_alike(len(records), Phase.UNKNOWN)
        return Delivered(np.full(len(records), Phase.OK, np.uint8), offsets)

    def close(self) -> None:
        if self._producer is not None:
            self._producer.close()


class _Reader:
    """Keeps what a fetch brought beyond the wanted number for the next poll."""

    def __init__(self, surroundings: Surroundings, positions: Mapping[int, int], isolation: Isolation) -> None:
        self._places = surroundings.partitions
        self._numbers = surroundings.number_of()
        self._positions = dict(positions)
        self._settings = _settings(
            surroundings,
            isolation_level=isolation,
            fetch_max_wait_ms=50,
            max_partition_fetch_bytes=_READ_BYTES_MAX,
        )
        self._fetcher: Fetcher | None = None
        self._waiting: list[tuple[int, pa.Table]] = []

    def poll(self, timeout_ms: int, records_max: int) -> Incoming:
        if self._fetcher is None:
            fetcher = self._fetcher = Fetcher(self._settings)
            fetcher.assign({TopicPartition(*self._places[number]): at for number, at in self._positions.items()})
        if not self._waiting:
            self._waiting = [
                (self._numbers[found.topic, found.partition], found.table)
                for found in self._fetcher.fetch(timeout_ms)
                if found.table.num_rows
            ]
        taken: list[tuple[int, pa.Table]] = []
        left = records_max
        while self._waiting and left > 0:
            number, table = self._waiting.pop(0)
            if table.num_rows > left:
                self._waiting.insert(0, (number, table.slice(left)))
                table = table.slice(0, left)
            taken.append((number, table))
            left -= table.num_rows
        return self._incoming(taken) if taken else NOTHING

    def _incoming(self, taken: list[tuple[int, pa.Table]]) -> Incoming:
        lengths = [table.num_rows for _, table in taken]
        whole = pa.concat_tables([table.select(["offset", "value"]) for _, table in taken])
        payloads = whole.column("value").combine_chunks()
        return Incoming(
            np.repeat(np.array([number for number, _ in taken], np.int16), lengths),
            whole.column("offset").to_numpy(),
            payloads if isinstance(payloads, pa.BinaryArray) else payloads.cast(pa.binary()),
        )

    def seek(self, positions: Mapping[int, int]) -> None:
        self._waiting = [(number, table) for number, table in self._waiting if number not in positions]
        self._positions.update(positions)
        if self._fetcher is not None:
            for number, position in positions.items():
                self._fetcher.seek(*self._places[number], position)

    def close(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()
