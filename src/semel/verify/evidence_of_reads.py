"""What a history tells of reading, as arrays: the log that the judge saw, and every read that does not fit.

Reads that agree with the judge's log are only counted. Those that do not are kept as `Sighting`s, few in any history
that is worth reading on.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np

from semel.verify.evidence_of_writes import Fate, Sends, Told, Transactions
from semel.verify.history import Act, Manifest, Phase, Rows
from semel.verify.record_keys import Array, Lanes, distinct, places

NOT_SENT: Final = -1
"""In place of a sent record: no row tells of it."""
DAMAGED: Final = -2
"""In place of a sent record: the payload was not sound, so it is not known what it was."""


class Sighting(IntEnum):
    """Why a read is kept."""

    STRANGE = 0
    """The judge did not see this record there. Not yet an anomaly: it may be an aborted one, read uncommitted."""
    ABORTED = 1
    DIRTY = 2
    PRECOMMITTED = 3
    MISROUTED = 4
    WENT_BACK = 5
    SKIPPED = 6


SIGHTING: Final = np.dtype(
    [
        ("kind", "u1"),
        ("act", "u1"),
        ("partition", "<i2"),
        ("process", "<i4"),
        ("slot", "<i4"),
        ("sent", "<i4"),
        ("time_ns", "<i8"),
        ("offset", "<i8"),
        ("key", "<i8"),
        ("expected", "<i8"),  # the offset that the reader was at, or the partition that was asked for
    ]
)


class Sightings:
    """Gathered as they are found, taken out by kind."""

    def __init__(self) -> None:
        self._gathered: list[Array] = []

    def add(self, kind: Sighting, process: int, rows: Rows, **columns: Array | int) -> None:
        if not len(rows):
            return
        sightings = np.full(len(rows), -1, np.int8).astype(SIGHTING)
        sightings["kind"], sightings["process"] = kind, process
        for name in ("act", "partition", "time_ns", "offset"):
            sightings[name] = rows[name]
        for name, values in columns.items():
            sightings[name] = values
        self._gathered.append(sightings)

    def of(self, kind: Sighting) -> Array:
        chosen = [sightings for sightings in self._gathered if sightings["kind"][0] == kind]
        if not chosen:
            return np.empty(0, SIGHTING)
        found = np.concatenate(chosen)
        # In one order, however the history is cut into parts: a part is searched partition by partition.
        return found[np.lexsort([found[name] for name in ("expected", "offset", "partition", "process", "time_ns")])]


class Log:
    """All records that the judge saw, sorted by partition and offset."""

    def __init__(self, manifest: Manifest) -> None:
        self._gathered: list[list[tuple[Array, ...]]] = [[] for _ in manifest.partitions]
        self.starts = np.zeros(len(manifest.partitions) + 1, np.int64)
        """The records of partition p are those from `starts[p]` to `starts[p + 1]`."""
        self.offset = np.empty(0, np.int64)
        self.key = np.empty(0, np.int64)
        self.slot = np.empty(0, np.int32)
        self.sent = np.empty(0, np.int32)
        self.value = np.empty(0, np.int64)
        self.by_key = np.empty(0, np.int32)
        """The order that sorts the log by key, and then by place."""
        self.is_repeat = np.empty(0, np.bool_)
        """The same key is in the log before."""
        self.is_rightly_seen = np.empty(0, np.bool_)
        """Not of an aborted transaction, nor of one that never asked to commit. Filled in when all is read."""

    def __len__(self) -> int:
        return len(self.offset)

    def add(self, partition: int, columns: tuple[Array, ...]) -> None:
        """Offset, key, slot, sent and value of records of one partition, in the order in which they were read."""
        self._gathered[partition].append(columns)

    def finish(self) -> None:
        """Sort, and drop what was read again. Where two reads of the judge differ, the first stays."""
        tables = [self._sorted(gathered) for gathered in self._gathered]
        self._gathered = []
        self.starts[1:] = np.cumsum([len(table[0]) for table in tables])
        if tables:
            columns = [np.concatenate(column) for column in zip(*tables, strict=True)]
            del tables
            self.offset, self.key, self.slot, self.sent, self.value = columns
        order = np.argsort(self.key, kind="stable")
        ordered = self.key[order]
        again = np.flatnonzero((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)) + 1
        self.is_repeat = np.zeros(len(self.key), np.bool_)
        self.is_repeat[order[again]] = True
        self.by_key = order.astype(np.int32)

    @property
    def partition(self) -> Array:
        return np.repeat(np.arange(len(self.starts) - 1, dtype=np.int16), np.diff(self.starts))

    def find(self, partition: Array, offset: Array) -> Array:
        """Where in the log these places are, -1 for those at which the judge saw nothing."""
        found = np.full(len(partition), -1, np.int64)
        for number, rows in by_partition(partition):
            start, end = self.starts[number], self.starts[number + 1]
            if start == end:
                continue
            at = np.searchsorted(self.offset[start:end], offset[rows])
            at[at == end - start] = 0
            at += start
            found[rows] = np.where(self.offset[at] == offset[rows], at, -1)
        return found

    def _sorted(self, gathered: list[tuple[Array, ...]]) -> tuple[Array, ...]:
        if not gathered:
            kinds = (np.int64, np.int64, np.int32, np.int32, np.int64)
            return tuple(np.empty(0, kind) for kind in kinds)
        columns = tuple(np.concatenate(column) for column in zip(*gathered, strict=True))
        gathered.clear()
        offset = columns[0]
        if (offset[1:] <= offset[:-1]).any():
            order = np.argsort(offset, kind="stable")
            order = order[np.concatenate(([True], offset[order[1:]] != offset[order[:-1]]))]
            columns = tuple(column[order] for column in columns)
        return columns


def by_partition(partition: Array) -> list[tuple[int, Array]]:
    """The rows of each partition, in their order. Rows without a partition are left out."""
    order = np.argsort(partition, kind="stable")
    numbers = distinct(partition)
    numbers = numbers[numbers >= 0]
    first = np.searchsorted(partition, numbers, sorter=order)
    end = np.searchsorted(partition, numbers, side="right", sorter=order)
    return [(int(number), order[a:b]) for number, a, b in zip(numbers, first, end, strict=True)]


class Reads:
    """Goes through what processes read: first the judge, then all against the judge, then in which order."""

    def __init__(self, manifest: Manifest, lanes: Lanes, transactions: Transactions, sends: Sends) -> None:
        self._lanes, self._transactions, self._sends = lanes, transactions, sends
        self._processes = {process.number: process for process in manifest.processes}
        self._positions: dict[int, Array] = {}
        self._visible: list[Array] = []
        self._consumed: list[tuple[Array, ...]] = []
        self._output_topics = {output for _, output in manifest.copies} | {each.output for each in manifest.aggregates}
        self.log = Log(manifest)
        self.sightings = Sightings()
        self.foreign_topics: list[int] = []
        """Outputs of a pipeline that notes nothing of what it sends: what is in them is held against the input only."""

    def finish_log(self, pipelines: set[int]) -> None:
        """Sort the log, and tell foreign topics; `pipelines` are the processes that take inputs."""
        self.log.finish()
        sends, topics = self._sends, self._lanes.topics
        # A pipeline that was never told where it wrote may have written to any of the outputs.
        untold = set(np.unique(self._transactions.process[sends.slot[sends.partition < 0]]).tolist())
        if not untold & pipelines:
            outputs = [number for number, name in enumerate(topics) if name in self._output_topics]
            self.foreign_topics = [number for number in outputs if number not in sends.topics_written]
            self.log.sent[self._is_foreign(self.log.partition) & (self.log.sent != DAMAGED)] = NOT_SENT

    def is_read_committed(self, process: int) -> bool:
        return self._processes[process].isolation == "read_committed"

    def gather_log(self, process: int, rows: Rows) -> None:
        """Take a part of what the judge read."""
        if self._processes[process].role != "judge":
            return
        reads = rows[(rows["act"] == Act.READ) & (rows["partition"] >= 0)]
        slot = self._transactions.slots(reads["writer"], reads["transaction"])
        key = self._lanes.keys(reads["partition"], reads["origin"], reads["sequence"])
        sent = self._sends.find(reads["partition"], reads["origin"], reads["sequence"], slot)
        is_damaged = reads["phase"] == Phase.FAIL
        key[is_damaged], slot[is_damaged], sent[is_damaged] = -1, -1, DAMAGED
        columns = (reads["offset"], key, slot.astype(np.int32), sent.astype(np.int32), reads["value"])
        for partition, chosen in by_partition(reads["partition"]):
            self.log.add(partition, tuple(column[chosen] for column in columns))

    def compare(self, process: int, rows: Rows) -> None:
        """Hold a part of what any process read against the log and against the fates of transactions."""
        is_read = (rows["act"] == Act.READ) | ((rows["act"] == Act.CONSUME) & (rows["offset"] >= 0))
        reads = rows[is_read & (rows["partition"] >= 0)]
        damaged = reads[reads["phase"] == Phase.FAIL]
        self.sightings.add(Sighting.MISROUTED, process, damaged, sent=DAMAGED)
        reads = reads[reads["phase"] == Phase.OK]
        if not len(reads):
            return
        sent, slot, key, is_strange = self._identify(reads)
        self._note_consumed(process, reads, slot)
        self.sightings.add(
            Sighting.STRANGE,
            process,
            reads[is_strange],
            sent=sent[is_strange],
            slot=slot[is_strange],
            key=key[is_strange],
        )
        if self.is_read_committed(process):
            self._sends.is_seen[sent[is_strange & (sent >= 0)]] = True
            self._judge(process, reads, sent, slot, key)
        else:
            self._note_misrouted(process, reads, sent, slot, key)

    @property
    def consumed(self) -> tuple[Array, Array, Array]:
        """The slot of each transaction that took an input, the place of the input, and the slot that wrote it."""
        if not self._consumed:
            return np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int32)
        consumer, place, writer = (np.concatenate(column) for column in zip(*self._consumed, strict=True))
        return consumer, place, writer

    def prepare_polls(self) -> None:
        """What every reader that comes by must see: what is visible by right, to the judge or to anyone else."""
        log, starts = self.log, self.log.starts
        strange = self.sightings.of(Sighting.STRANGE)
        sent = strange["sent"]
        committed = np.array([self.is_read_committed(process) for process in strange["process"].tolist()], np.bool_)
        strange = strange[committed & self.is_rightly_seen(sent, strange["partition"])] if len(strange) else strange
        for partition in range(len(starts) - 1):
            mine = slice(int(starts[partition]), int(starts[partition + 1]))
            offsets = log.offset[mine]
            if not log.is_rightly_seen[mine].all():
                offsets = offsets[log.is_rightly_seen[mine]]
            extra = strange["offset"][strange["partition"] == partition]
            self._visible.append(distinct(np.concatenate((offsets, extra))) if len(extra) else offsets)

    def is_rightly_seen(self, sent: Array, partition: Array) -> Array:
        """Whether a read_committed reader may see these, by what became of their transactions in the end."""
        right = (sent == DAMAGED) | self._is_foreign(partition)
        known = np.flatnonzero(sent >= 0)
        slot = self._sends.slot[sent[known]]
        committed = self._transactions.is_committed[slot] | (self._transactions.fate[slot] == Fate.PLAIN)
        right[known] = committed & (self._sends.told[sent[known]] != Told.FAILED)
        return right

    def follow(self, process: int, rows: Rows) -> None:
        """Take a part of a reader's reads in its order: where it went back, and what it passed over."""
        # A pipeline notes what it took and not all that it saw, so that gaps in it mean nothing.
        if self._processes[process].role == "writer":
            return
        steps = rows[(rows["act"] == Act.READ) | (rows["act"] == Act.ASSIGN)]
        if not len(steps):
            return
        # A reader's place in each partition: the offset that it reads next, or -1 where that is not known.
        positions = self._positions.setdefault(process, np.full(len(self.log.starts) - 1, -1, np.int64))
        for partition, chosen in by_partition(steps["partition"]):
            mine = steps[chosen]
            is_read, offset = mine["act"] == Act.READ, mine["offset"]
            after = offset + is_read
            before = np.concatenate(([positions[partition]], after[:-1]))
            positions[partition] = after[-1]
            jumps = np.flatnonzero(is_read & (before >= 0) & (before != offset))
            if not len(jumps):
                continue
            mine, before = mine[jumps], before[jumps]
            visible = self._visible[partition]
            back = mine["offset"] < before
            passed = np.searchsorted(visible, mine["offset"]) - np.searchsorted(visible, before)
            self.sightings.add(Sighting.WENT_BACK, process, mine[back], expected=before[back])
            skip = ~back & (passed > 0)
            self.sightings.add(Sighting.SKIPPED, process, mine[skip], expected=before[skip])

    def _identify(self, reads: Rows) -> tuple[Array, Array, Array, Array]:
        """The sent record of each read, its slot and key, and whether the judge saw something else or nothing there."""
        partition, log = reads["partition"], self.log
        key = self._lanes.keys(partition, reads["origin"], reads["sequence"])
        slot = self._transactions.slots(reads["writer"], reads["transaction"])
        # CONSUME tells the consumer's transaction and not the writer's.
        slot[reads["act"] == Act.CONSUME] = -1
        at = log.find(partition, reads["offset"])
        if not len(log):
            matches = np.zeros(len(reads), np.bool_)
        elif reads["act"][0] == Act.READ and (reads["act"] == Act.READ).all():
            matches = (at >= 0) & (log.key[at] == key) & (log.slot[at] == slot)
        else:
            matches = self._consumed_what_the_judge_saw(reads, at, key, slot)
        sent = np.where(matches, log.sent[at] if len(log) else NOT_SENT, NOT_SENT).astype(np.int64)
        slot = np.where(matches, log.slot[at] if len(log) else -1, slot)
        rest = np.flatnonzero(~matches)
        if len(rest):
            others = reads[rest]
            is_consume = others["act"] == Act.CONSUME
            by_slot = self._sends.find(others["partition"], others["origin"], others["sequence"], slot[rest])
            sent[rest] = np.where(is_consume, self._sends.find_by_writer(others), by_slot)
            sent[rest[self._is_foreign(others["partition"])]] = NOT_SENT
            known = rest[is_consume & (sent[rest] >= 0)]
            slot[known] = self._sends.slot[sent[known]]
        return sent, slot, key, ~matches

    def _note_consumed(self, process: int, reads: Rows, slot: Array) -> None:
        taken = np.flatnonzero((reads["act"] == Act.CONSUME) & (reads["transaction"] >= 0))
        if len(taken):
            rows = reads[taken]
            consumer = self._transactions.slots(np.full(len(rows), process), rows["transaction"])
            place = places(rows["partition"], rows["offset"])
            self._consumed.append((consumer.astype(np.int32), place, slot[taken].astype(np.int32)))

    def _consumed_what_the_judge_saw(self, reads: Rows, at: Array, key: Array, slot: Array) -> Array:
        # CONSUME may leave out which record it was, and then only the place counts.
        log = self.log
        is_read = reads["act"] == Act.READ
        same_key = (log.key[at] == key) | (~is_read & (reads["origin"] < 0))
        writer = np.where(log.slot[at] >= 0, self._transactions.process[log.slot[at]], -1)
        same_slot = np.where(is_read, log.slot[at] == slot, (reads["writer"] < 0) | (reads["writer"] == writer))
        return (at >= 0) & same_key & same_slot

    def _judge(self, process: int, reads: Rows, sent: Array, slot: Array, key: Array) -> None:
        transactions, sends = self._transactions, self._sends
        self._note_misrouted(process, reads, sent, slot, key)
        known = sent >= 0
        slot_of_sent = np.where(known, sends.slot[sent] if len(sends) else -1, -1)
        fate = np.where(known, transactions.fate[slot_of_sent], Fate.PLAIN)
        aborted = (fate == Fate.ABORTED) | (known & ((sends.told[sent] if len(sends) else 0) == Told.FAILED))
        dirty = fate == Fate.OPEN
        unsent = np.flatnonzero(sent == NOT_SENT)
        if len(unsent):
            dirty[unsent] = self._is_from_nowhere(reads[unsent], slot[unsent])
        is_transaction = known & (fate != Fate.PLAIN) & ~aborted & ~dirty
        early = is_transaction & (reads["time_ns"] < transactions.commit_invoked_ns[slot_of_sent])
        for kind, chosen in (
            (Sighting.ABORTED, aborted),
            (Sighting.DIRTY, dirty & ~aborted),
            (Sighting.PRECOMMITTED, early),
        ):
            self.sightings.add(kind, process, reads[chosen], sent=sent[chosen], slot=slot[chosen], key=key[chosen])

    def _is_from_nowhere(self, reads: Rows, slot: Array) -> Array:
        """Whether no row tells of these records. What was sent to another topic is misrouted, and noted as that."""
        foreign = self._is_foreign(reads["partition"])
        # A CONSUME that does not say what it took cannot be held against anything that was sent.
        unnamed = (reads["act"] == Act.CONSUME) & ((reads["origin"] < 0) | (reads["writer"] < 0))
        elsewhere = self._sends.find_anywhere(reads["partition"], reads["origin"], reads["sequence"], slot) >= 0
        return ~foreign & ~unnamed & ~elsewhere

    def _is_foreign(self, partition: Array) -> Array:
        if not self.foreign_topics:
            return np.zeros(len(partition), np.bool_)
        return np.isin(self._lanes.topic_of_partition[partition], self.foreign_topics)

    def _note_misrouted(self, process: int, reads: Rows, sent: Array, slot: Array, key: Array) -> None:
        sends = self._sends
        asked = np.where(sent >= 0, sends.partition[sent] if len(sends) else -1, -1).astype(np.int64)
        unsent = np.flatnonzero(sent == NOT_SENT)
        if len(unsent):
            others = reads[unsent]
            foreign = self._is_foreign(others["partition"])
            elsewhere = sends.find_anywhere(others["partition"], others["origin"], others["sequence"], slot[unsent])
            elsewhere[foreign] = -1
            asked[unsent] = np.where(elsewhere >= 0, sends.partition[elsewhere] if len(sends) else -1, -1)
        wrong = (asked >= 0) & (asked != reads["partition"])
        self.sightings.add(
            Sighting.MISROUTED,
            process,
            reads[wrong],
            sent=sent[wrong],
            slot=slot[wrong],
            key=key[wrong],
            expected=asked[wrong],
        )
