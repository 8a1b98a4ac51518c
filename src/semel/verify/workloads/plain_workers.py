"""Workers without transactions, as one writes them: at most once (commit, then write), at least once (the reverse).

Neither does anything foolish. Between the two steps a process can die, and no order of them helps against that.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

import numpy as np

from semel.errors import SemelError
from semel.verify.clients.face import GroupConsumer, Outcome, PlainWriter
from semel.verify.history import Act, Phase
from semel.verify.workloads.life import Stopped
from semel.verify.workloads.pipeline_worker import PipelineWorker
from semel.verify.workloads.transactions import Batch, Taken, note_sends, note_taken, outgoing

_TRIES: Final = 3


class _PlainWorker(PipelineWorker):
    def live(self) -> None:
        life = self._life
        writer = self._open_writer()
        consumer = life.insist(self._open_consumer)
        try:
            life.insist(consumer.rewind)
            while not life.is_over:
                incoming = self._poll(consumer)
                if len(incoming):
                    taken, batch, positions = self._take(incoming)
                    is_done = self._work(writer, consumer, taken, batch, positions)
                    self._transform.settle(Outcome.COMMITTED if is_done else Outcome.UNKNOWN)
                    if not is_done:
                        self._go_back(consumer)
        finally:
            consumer.close()
            writer.close()

    def _open_writer(self) -> PlainWriter:
        raise NotImplementedError

    def _work(
        self, writer: PlainWriter, consumer: GroupConsumer, taken: Taken, batch: Batch, positions: Mapping[int, int]
    ) -> bool:
        """Both steps for these records; False if the group's positions are not known to be behind them."""
        raise NotImplementedError

    def _commit(self, consumer: GroupConsumer, positions: Mapping[int, int]) -> bool:
        self._note_positions(positions, Phase.INVOKE)
        for _ in range(_TRIES):
            try:
                consumer.commit(positions)
            except SemelError:
                self._life.pause()
            else:
                self._note_positions(positions, Phase.OK)
                return True
        self._note_positions(positions, Phase.UNKNOWN)
        return False

    def _note_positions(self, positions: Mapping[int, int], phase: Phase) -> None:
        history, now_ns = self._life.history, time.monotonic_ns()
        for partition, offset in positions.items():
            history.note(Act.POSITION, phase, time_ns=now_ns, partition=partition, offset=offset)
        history.flush()


class AtMostOnce(_PlainWorker):
    """First the positions, then the records, without waiting for an answer: what is lost in between stays so."""

    def _open_writer(self) -> PlainWriter:
        return self._life.clients.plain_writer(idempotent=False, acks="0")

    def _work(
        self, writer: PlainWriter, consumer: GroupConsumer, taken: Taken, batch: Batch, positions: Mapping[int, int]
    ) -> bool:
        note_taken(self._life, taken, -1)
        if not self._commit(consumer, positions):
            return False
        note_sends(self._life, batch, -1, Phase.INVOKE)
        writer.write(outgoing(self._life, batch, -1))
        note_sends(self._life, batch, -1, Phase.UNKNOWN)  # whatever the library says: with acks=0 nobody has told it
        return True


class AtLeastOnce(_PlainWorker):
    """First the records, until each is acknowledged, then the positions: who dies in between writes them again."""

    def _open_writer(self) -> PlainWriter:
        return self._life.clients.plain_writer(idempotent=True, acks="all")

    def _work(
        self, writer: PlainWriter, consumer: GroupConsumer, taken: Taken, batch: Batch, positions: Mapping[int, int]
    ) -> bool:
        note_taken(self._life, taken, -1)
        self._write_all(writer, batch)
        return self._commit(consumer, positions)

    def _write_all(self, writer: PlainWriter, batch: Batch) -> None:
        while len(batch):
            note_sends(self._life, batch, -1, Phase.INVOKE)
            delivered = writer.write(outgoing(self._life, batch, -1))
            note_sends(self._life, batch, -1, delivered.phase, delivered.offset)
            batch = batch.chosen(np.flatnonzero(delivered.phase != Phase.OK))
            if len(batch):
                if self._life.is_over:
                    raise Stopped
                self._life.pause()
