"""Lists that only grow: each transaction reads some of them to their ends, then appends elements of its own to several.

An element is unique, so who has read whose element, and in which order elements stand, shows what depends on what.
"""

from __future__ import annotations

import time

import numpy as np

from semel.client.fetcher import Fetcher
from semel.errors import SemelError
from semel.verify.clients.face import Incoming, Reader
from semel.verify.history import Act, Manifest, Phase
from semel.verify.payload import Payloads
from semel.verify.workloads.life import Life
from semel.verify.workloads.transactions import Batch, Taken, Transactions, take_sound
from semel.verify.workloads.workload import Role, Workload

_QUIET_MS = 60
"""A list has been read to its end when nothing came for so long."""
_POLLS_MAX = 50
_READ_RECORDS_MAX = 20_000
_READ_FRACTION = 0.5


class ListAppend(Workload):
    name = "list-append"
    summary = "transactions read lists and append to lists: nobody reads what is not committed, or only half of it"

    def topics(self) -> dict[str, int]:
        return {f"{self.prefix}-lists": self.options.partitions}

    def work_roles(self) -> list[Role]:
        return [Role("appender", self.options.workers, "worker")]

    def manifest(self) -> Manifest:
        # An element's value is the number of its list.
        return Manifest(self.partitions(), keyed_topics=list(self.topics()))

    def work(self, life: Life) -> None:
        transactions = Transactions(life)
        reader = self._open_reader(life)
        sequence = 0
        try:
            while not life.is_over:
                taken = self._read(life, reader) if life.chance.random() < _READ_FRACTION else None
                batch = self._elements(life, life.batch_size(), sequence)
                sequence += len(batch)
                transactions.run(batch, taken=taken, is_to_abort=life.wants_abort())
                life.keep_pace(len(batch))
        finally:
            reader.close()
            transactions.writer.close()

    def _elements(self, life: Life, count: int, sequence: int) -> Batch:
        lists = life.numbers.integers(0, self.options.partitions, count)
        return Batch(
            partition=lists.astype(np.int16),
            origin=np.full(count, life.number, np.int32),
            sequence=np.arange(sequence, sequence + count, dtype=np.int32),
            value=lists,
            key=lists,
        )

    def _open_reader(self, life: Life) -> Reader:
        """For some of the lists: from their beginning on, or in a later life from their present end on."""
        lists = sorted(life.chance.sample(range(self.options.partitions), max(1, self.options.partitions // 2)))
        positions = dict.fromkeys(lists, 0)
        if life.spec.life:
            positions = life.insist(lambda: self._ends(life, lists))
        for number, offset in positions.items():
            life.history.note(Act.ASSIGN, Phase.OK, time_ns=time.monotonic_ns(), partition=number, offset=offset)
        return life.insist(lambda: life.clients.reader(positions, "read_committed"))

    def _ends(self, life: Life, lists: list[int]) -> dict[int, int]:
        places = {life.spec.partitions[number]: number for number in lists}
        with Fetcher({"bootstrap.servers": life.spec.bootstrap, **life.spec.settings}) as fetcher:
            return {
                places[place.topic, place.partition]: end
                for place, end in fetcher.offsets_for(places, "latest").items()
            }

    def _read(self, life: Life, reader: Reader) -> Taken | None:
        found: list[Taken] = []
        for _ in range(_POLLS_MAX):
            try:
                incoming: Incoming = reader.poll(_QUIET_MS, _READ_RECORDS_MAX)
            except SemelError:
                life.pause()
                break
            if not len(incoming):
                break
            found.append(take_sound(life, incoming))
        return _joined(found)


def _joined(parts: list[Taken]) -> Taken | None:
    if not parts:
        return None
    names = Payloads.__slots__
    columns = (np.concatenate([getattr(part.payloads, name) for part in parts]) for name in names)
    return Taken(
        np.concatenate([part.partition for part in parts]),
        np.concatenate([part.offset for part in parts]),
        Payloads(*columns),
    )
