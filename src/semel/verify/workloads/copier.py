"""Copies a topic: each committed record of the input must be in the output, once, and those of a key in their order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from semel.verify.history import Manifest
from semel.verify.workloads.life import Life
from semel.verify.workloads.options import GUARANTEES
from semel.verify.workloads.pipeline import Pipeline
from semel.verify.workloads.pipeline_worker import Transform
from semel.verify.workloads.transactions import Batch, Taken


class Copier(Pipeline):
    name = "copier"
    summary = "workers copy a topic in transactions: every record arrives once, in the order of its key"
    worker_role = "copier"
    guarantees = GUARANTEES

    def manifest(self) -> Manifest:
        copies = [(self.input, self.output)]
        return Manifest(self.partitions(), copies=copies, keyed_topics=[self.input, self.output])

    def source(self, life: Life) -> Callable[[int], Batch]:
        first, count = self.numbers_of(self.input)[0], self.options.partitions
        sequence = 0

        def make_batch(size: int) -> Batch:
            nonlocal sequence
            key = life.numbers.integers(0, self.options.keys, size)
            numbers = np.arange(sequence, sequence + size, dtype=np.int32)
            sequence += size
            return Batch(
                partition=(first + key % count).astype(np.int16),
                origin=np.full(size, life.number, np.int32),
                sequence=numbers,
                value=key,
                key=key,
            )

        return make_batch

    def transform(self, life: Life) -> Transform:
        return _Copy(self.numbers_of(self.output)[0], self.options.partitions)


class _Copy(Transform):
    def __init__(self, first: int, count: int) -> None:
        self._first = first
        self._count = count

    def apply(self, taken: Taken) -> Batch:
        found = taken.payloads
        return Batch(
            partition=(self._first + found.value % self._count).astype(np.int16),
            origin=found.origin,
            sequence=found.sequence,
            value=found.value,
            key=found.value,
        )
