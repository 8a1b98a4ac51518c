"""Running totals: workers add up what the input says of each key, and write a new total for every record of it.

A key is a record's `origin`. A worker has its totals in memory; when it begins, or is given a partition, it reads them
from the output, where the last ones are that count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from semel.client.fetcher import Fetcher
from semel.client.partitions import TopicPartition
from semel.verify.clients.face import Outcome
from semel.verify.history import Aggregate, Manifest
from semel.verify.payload import decode_many
from semel.verify.workloads.life import Life
from semel.verify.workloads.pipeline import Pipeline
from semel.verify.workloads.pipeline_worker import Transform
from semel.verify.workloads.roles import running_totals
from semel.verify.workloads.transactions import Batch, Taken

_AMOUNT_MAX = 10


class Counters(Pipeline):
    name = "counters"
    summary = "workers keep running totals by key: a record counted twice or not at all makes a wrong total"
    worker_role = "counter"

    def manifest(self) -> Manifest:
        return Manifest(self.partitions(), aggregates=[Aggregate(self.input, self.output, "sum")])

    def source(self, life: Life) -> Callable[[int], Batch]:
        """A source has keys of its own, since a record is told apart by its origin and its sequence there."""
        first, count = self.numbers_of(self.input)[0], self.options.partitions
        sent = np.zeros(self.options.keys, np.int32)

        def make_batch(size: int) -> Batch:
            key = life.numbers.integers(0, self.options.keys, size)
            sequence = sent[key] + running_totals(key, np.ones(size, np.int64)) - 1
            np.add.at(sent, key, 1)
            origin = life.number * self.options.keys + key
            return Batch(
                partition=(first + origin % count).astype(np.int16),
                origin=origin,
                sequence=sequence,
                value=life.numbers.integers(1, _AMOUNT_MAX, size),
                key=origin,
            )

        return make_batch

    def transform(self, life: Life) -> Transform:
        settings = {
            "bootstrap.servers": life.spec.bootstrap,
            "default.api.timeout.ms": 2 * self.options.transaction_timeout_ms,
            **life.spec.settings,
        }
        return _Totals(settings, self.output, self.numbers_of(self.input)[0], self.numbers_of(self.output)[0])


class _Totals(Transform):
    """The totals of partition n of the input are in partition n of the output."""

    def __init__(self, settings: dict[str, Any], output: str, first_input: int, first_output: int) -> None:
        self._settings = settings
        self._output = output
        self._first_input = first_input
        self._first_output = first_output
        self._totals: dict[int, dict[int, int]] = {}
        self._new: dict[int, dict[int, int]] = {}

    def apply(self, taken: Taken) -> Batch:
        origin, shift = taken.payloads.origin, self._first_output - self._first_input
        total = running_totals(origin, taken.payloads.value)
        self._new = {}
        for number in np.unique(taken.partition).tolist():
            if number not in self._totals:
                self._totals[number] = self._read_totals(number - self._first_input)
            self._add_up(number, np.flatnonzero(taken.partition == number), origin, total)
        return Batch(
            partition=(taken.partition + shift).astype(np.int16),
            origin=origin,
            sequence=taken.payloads.sequence,
            value=total,
            key=origin,
        )

    def _add_up(self, number: int, rows: Any, origin: Any, total: Any) -> None:
        """Adds the totals so far to those of the batch, in place."""
        known, new = self._totals[number], self._new.setdefault(number, {})
        keys, where = np.unique(origin[rows], return_inverse=True)
        total[rows] += np.array([known.get(key, 0) for key in keys.tolist()], np.int64)[where]
        new.update(zip(origin[rows].tolist(), total[rows].tolist(), strict=True))  # the last of a key stays

    def settle(self, outcome: Outcome) -> None:
        if outcome is Outcome.COMMITTED:
            for number, totals in self._new.items():
                self._totals[number].update(totals)
        elif outcome is Outcome.UNKNOWN:
            self._totals.clear()
        self._new = {}

    def forget(self, partitions: frozenset[int]) -> None:
        for number in partitions:
            self._totals.pop(number, None)

    def _read_totals(self, index: int) -> dict[int, int]:
        """Up to what is written, not to what is stable: the former owner's last markers may still be on their way."""
        place = TopicPartition(self._output, index)
        with Fetcher({**self._settings, "isolation.level": "read_uncommitted"}) as fetcher:
            ends = fetcher.offsets_for([place], "latest")
        totals: dict[int, int] = {}
        with Fetcher({**self._settings, "isolation.level": "read_committed"}) as fetcher:
            fetcher.assign({place: 0})
            for table in fetcher.read_until(ends):
                found = decode_many(table.column("value").combine_chunks())
                totals.update(zip(found.origin.tolist(), found.value.tolist(), strict=True))
        return totals
