"""What a history tells of writing, as arrays: transactions and what became of them, and every record that was sent.

A transaction is known by a `slot`: the transactions of a process follow each other, and before the first of them is a
slot for what the process wrote outside of any. A record is known by a `key`, which stands for its topic, origin and
sequence; one that was sent again in a later transaction, because the first was aborted, is in `Sends` twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Final

import numpy as np

from semel.errors import SemelError
from semel.verify.history import Act, History, Manifest, Phase, Rows
from semel.verify.record_keys import OFFSET_BITS, Array, Lanes, look_up

NEVER: Final = np.iinfo(np.int64).max


class BrokenHistory(SemelError, ValueError):
    """A history contradicts its own form, so that no verdict on it would mean anything."""


class Fate(IntEnum):
    """What a transaction's own process was told of its end."""

    PLAIN = 0
    """No transaction: each record for itself."""
    COMMITTED = 1
    ABORTED = 2
    OPEN = 3
    """Never asked to commit, so it cannot be committed."""
    UNKNOWN = 4
    """Asked to commit and got no answer."""


class Told(IntEnum):
    """What a writer was told of one record; a higher one outweighs a lower where a record was sent again."""

    NOTHING = 0
    FAILED = 1
    UNKNOWN = 2
    OK = 3


def parts_by_process(history: History) -> Iterator[tuple[int, Rows]]:
    """The parts of a history that have rows, each with its process."""
    for rows in history.parts():
        if len(rows):
            yield int(rows["process"][0]), rows


def check_form(manifest: Manifest, process: int, rows: Rows) -> None:
    """Refuse a part that does not keep to its own form."""
    if process not in {each.number for each in manifest.processes} or (rows["process"] != process).any():
        raise BrokenHistory(f"A part of the history mixes processes or is of one ({process}) that is not listed.")
    partition, act = rows["partition"], rows["act"]
    if partition.min() < -1 or partition.max() >= len(manifest.partitions):
        raise BrokenHistory(f"Process {process} names a partition that is not listed in the manifest.")
    if act.min() < min(Act) or act.max() > max(Act) or rows["phase"].max() > max(Phase):
        raise BrokenHistory(f"Process {process} has rows of an unknown kind.")
    # What a damaged payload says of itself may be anything.
    own = rows["transaction"][act != Act.READ]
    if rows["offset"].max() >= 1 << OFFSET_BITS or own.min(initial=-1) < -1:
        raise BrokenHistory(f"Process {process} names an offset or a transaction that cannot be.")


class Transactions:
    """What became of each transaction, by slot."""

    _ASKED, _OK, _FAILED, _GIVEN_UP = 1, 2, 4, 8

    def __init__(self, manifest: Manifest) -> None:
        count = max((process.number for process in manifest.processes), default=-1) + 1
        self._base = np.full(count, -1, np.int64)
        self._size = np.zeros(count, np.int64)
        self._notes = np.zeros(64, np.uint8)
        self.commit_invoked_ns = np.full(64, NEVER, np.int64)
        self.commit_ok_ns = np.full(64, NEVER, np.int64)
        self.count = 0
        self._current = -1
        self.fate = np.empty(0, np.uint8)
        self.process = np.empty(0, np.int32)
        self.is_committed = np.empty(0, np.bool_)
        """As `fate` tells, and where that is unknown, as what became visible shows. Filled in when all is read."""

    def add(self, process: int, rows: Rows) -> None:
        """Rows of what a process did with its own transactions."""
        if process != self._current:
            if self._base[process] >= 0:
                raise BrokenHistory(f"The rows of process {process} do not follow each other.")
            self._base[process], self._size[process], self._current = self.count, 1, process
        self._size[process] = max(self._size[process], int(rows["transaction"].max(initial=-1)) + 2)
        self._grow(int(self._base[process] + self._size[process]))
        ends = rows[(rows["act"] == Act.COMMIT) | (rows["act"] == Act.ABORT)]
        if not len(ends):
            return
        slot = self._base[process] + 1 + ends["transaction"]
        is_commit, phase = ends["act"] == Act.COMMIT, ends["phase"]
        for chosen, note in (
            (is_commit, self._ASKED),
            (is_commit & (phase == Phase.OK), self._OK),
            (is_commit & (phase == Phase.FAIL), self._FAILED),
            (~is_commit, self._GIVEN_UP),
        ):
            self._notes[slot[chosen]] |= note
        for chosen, times in (
            (is_commit & (phase == Phase.INVOKE), self.commit_invoked_ns),
            (is_commit & (phase == Phase.OK), self.commit_ok_ns),
        ):
            np.minimum.at(times, slot[chosen], ends["time_ns"][chosen])

    def finish(self) -> None:
        """Give every transaction its fate."""
        notes = self._notes = self._notes[: self.count]
        self.commit_invoked_ns = self.commit_invoked_ns[: self.count]
        self.commit_ok_ns = self.commit_ok_ns[: self.count]
        # A process that gives up after it asked to commit knows nothing: the broker may have heard the first and not
        # the second. One that never asked cannot have committed.
        self.fate = np.select(
            [notes & bit > 0 for bit in (self._OK, self._FAILED, self._ASKED, self._GIVEN_UP)],
            [Fate.COMMITTED, Fate.ABORTED, Fate.UNKNOWN, Fate.ABORTED],
            Fate.OPEN,
        ).astype(np.uint8)
        used = np.flatnonzero(self._base >= 0)
        self.fate[self._base[used]] = Fate.PLAIN
        used = used[np.argsort(self._base[used])]
        self.process = np.repeat(used, self._size[used]).astype(np.int32)
        # Whoever did not note when it asked cannot be read too early.
        self.commit_invoked_ns[(self.commit_invoked_ns == NEVER) & (notes & self._ASKED > 0)] = -1

    def slots(self, writer: Array, transaction: Array) -> Array:
        """The slots of these transactions, -1 for those of which no row tells."""
        number = transaction.astype(np.int64) + 1
        known = (writer >= 0) & (writer < len(self._base))
        safe = np.where(known, writer, 0)
        known &= (self._base[safe] >= 0) & (number >= 0) & (number < self._size[safe])
        return np.where(known, self._base[safe] + number, -1)

    def writer_and_number(self, slot: int) -> tuple[int, int]:
        """The process, and the number that it gives this transaction."""
        process = int(self.process[slot])
        return process, slot - int(self._base[process]) - 1

    def _grow(self, count: int) -> None:
        self.count = max(self.count, count)
        missing = count - len(self._notes)
        if missing > 0:
            missing = max(missing, len(self._notes))
            self._notes = np.concatenate((self._notes, np.zeros(missing, np.uint8)))
            unknown = np.full(missing, NEVER, np.int64)
            self.commit_invoked_ns = np.concatenate((self.commit_invoked_ns, unknown))
            self.commit_ok_ns = np.concatenate((self.commit_ok_ns, unknown))


class Sends:
    """Every record that was sent, sorted by key: once for each transaction that sent it."""

    def __init__(self, lanes: Lanes, transactions: Transactions) -> None:
        self._lanes, self._transactions = lanes, transactions
        self._gathered: list[tuple[Array, ...]] = []
        self.key = np.empty(0, np.int64)
        self.slot = np.empty(0, np.int32)
        self.partition = np.empty(0, np.int16)
        self.rank = np.empty(0, np.int32)
        """In the order of sending among all records of a process; processes one after the other."""
        self.told = np.empty(0, np.uint8)
        self.offset = np.empty(0, np.int64)
        """As acknowledged, or -1."""
        self.is_resent = np.empty(0, np.bool_)
        """Sent more than once in one transaction: which of them an acknowledgement or a reader means is not known."""
        self.topics_written: set[int] = set()
        self.is_seen_by_judge = np.empty(0, np.bool_)
        self.is_seen = np.empty(0, np.bool_)
        """By any read_committed reader. Both are filled in when all is read."""

    def __len__(self) -> int:
        return len(self.key)

    def add(self, process: int, rows: Rows) -> None:
        """Rows of SEND that begin."""
        if len(rows):
            slot = self._transactions.slots(np.full(len(rows), process), rows["transaction"]).astype(np.int32)
            columns = (rows["partition"].copy(), rows["origin"].copy(), rows["sequence"].copy(), slot)
            self._gathered.append(columns)

    def finish(self) -> None:
        """Sort what was gathered, and put together what one transaction sent twice."""
        keys = [self._lanes.keys(partition, origin, sequence) for partition, origin, sequence, _ in self._gathered]
        partitions, slots = [c[0] for c in self._gathered], [c[3] for c in self._gathered]
        self._gathered = []
        if keys:
            self.key, self.slot, self.partition = (np.concatenate(column) for column in (keys, slots, partitions))
        del keys, slots, partitions
        self.topics_written = set(np.unique(self._lanes.topic_of_partition[self.partition]).tolist()) - {-1}
        order = np.argsort(self.key, kind="stable")
        self.key, self.slot, self.partition = self.key[order], self.slot[order], self.partition[order]
        self.rank = order.astype(np.int32)
        del order
        self._sort_runs_by_slot()
        same = np.zeros(len(self.key), np.bool_)
        same[1:] = (self.key[1:] == self.key[:-1]) & (self.slot[1:] == self.slot[:-1])
        self.is_resent = same.copy()
        self.is_resent[:-1] |= same[1:]
        if same.any():
            for name in ("key", "slot", "partition", "rank", "is_resent"):
                setattr(self, name, getattr(self, name)[~same])
        self.told = np.zeros(len(self.key), np.uint8)
        self.offset = np.full(len(self.key), -1, np.int64)

    def find(self, partition: Array, origin: Array, sequence: Array, slot: Array) -> Array:
        """Which sent records these are, -1 where none is: in the topic of the partition, or one that was not told."""
        found = self._find_in(self._lanes.topic_of_partition[partition], origin, sequence, slot)
        self._find_missing(found, -1, partition, origin, sequence, slot)
        for topic in range(len(self._lanes.topics)):
            self._find_missing(found, topic, partition, origin, sequence, slot, only_untold=True)
        return found

    def find_anywhere(self, partition: Array, origin: Array, sequence: Array, slot: Array) -> Array:
        """Which sent records these are, in whatever topic."""
        found = self.find(partition, origin, sequence, slot)
        for topic in range(len(self._lanes.topics)):
            self._find_missing(found, topic, partition, origin, sequence, slot)
        return found

    def find_by_writer(self, rows: Rows) -> Array:
        """Which record that `writer` sent each CONSUME took; of several, that which was acknowledged at its place."""
        process, writer = self._transactions.process, rows["writer"]
        found = np.full(len(rows), -1, np.int64)
        for topic in (self._lanes.topic_of_partition[rows["partition"]], np.full(len(rows), -1)):
            key = self._lanes.keys_in(topic, rows["origin"], rows["sequence"])
            first = self._walk(key, lambda sent, asked: process[self.slot[sent]] == writer[asked])
            exact = self._walk(
                key,
                lambda sent, asked: (
                    (process[self.slot[sent]] == writer[asked])
                    & (self.partition[sent] == rows["partition"][asked])
                    & (self.offset[sent] == rows["offset"][asked])
                ),
            )
            found = np.where(found >= 0, found, np.where(exact >= 0, exact, first))
        return found

    def note_ends(self, process: int, rows: Rows) -> Rows:
        """Take what was told of sent records; returns the rows that tell of another partition than was asked for."""
        slot = self._transactions.slots(np.full(len(rows), process), rows["transaction"])
        sent = self.find(rows["partition"], rows["origin"], rows["sequence"], slot)
        if (sent < 0).any():
            raise BrokenHistory(f"Process {process} tells the end of a SEND that it never began.")
        told = np.choose(rows["phase"], (Told.NOTHING, Told.OK, Told.FAILED, Told.UNKNOWN)).astype(np.uint8)
        np.maximum.at(self.told, sent, told)
        is_placed = (told == Told.OK) & (rows["partition"] >= 0)
        unplaced = is_placed & (self.partition[sent] < 0)
        self.partition[sent[unplaced]] = rows["partition"][unplaced]
        self.topics_written |= set(np.unique(self._lanes.topic_of_partition[rows["partition"][unplaced]]).tolist())
        elsewhere = is_placed & (self.partition[sent] != rows["partition"])
        at = (told == Told.OK) & ~elsewhere
        self.offset[sent[at]] = rows["offset"][at]
        return rows[elsewhere]

    def finish_ends(self) -> None:
        # Of two tries one failed; what became of the other is not known.
        self.told[self.is_resent & (self.told == Told.FAILED)] = Told.UNKNOWN
        self.offset[self.is_resent] = -1

    def _sort_runs_by_slot(self) -> None:
        same = self.key[1:] == self.key[:-1]
        if not same.any():
            return
        in_run = np.zeros(len(self.key), np.bool_)
        in_run[1:] |= same
        in_run[:-1] |= same
        at = np.flatnonzero(in_run)
        order = at[np.lexsort((self.rank[at], self.slot[at], self.key[at]))]
        for column in (self.slot, self.partition, self.rank):
            column[at] = column[order]

    def _find_missing(
        self,
        found: Array,
        topic: int,
        partition: Array,
        origin: Array,
        sequence: Array,
        slot: Array,
        *,
        only_untold: bool = False,
    ) -> None:
        missing = found < 0
        if only_untold:
            missing &= partition < 0
        at = np.flatnonzero(missing)
        if len(at):
            found[at] = self._find_in(np.full(len(at), topic), origin[at], sequence[at], slot[at])

    def _find_in(self, topic: Array, origin: Array, sequence: Array, slot: Array) -> Array:
        key = self._lanes.keys_in(topic, origin, sequence)
        return self._walk(key, lambda sent, asked: self.slot[sent] == slot[asked])

    def all_with(self, key: int) -> list[int]:
        """All sent records that may have this key: those with it, and those of which the topic was never told."""
        origin, sequence = (np.array([number]) for number in self._lanes.origin_and_sequence(key))
        keys = (key, int(self._lanes.keys_in(np.array([-1]), origin, sequence)[0]))
        spans = [np.searchsorted(self.key, [each, each + 1]).tolist() for each in keys if each >= 0]
        topic = int(self._lanes.topic[key >> 32])
        places = {*np.flatnonzero(self._lanes.topic_of_partition == topic).tolist(), -1}
        return [sent for first, end in spans for sent in range(first, end) if int(self.partition[sent]) in places]

    def _walk(self, key: Array, matches: Callable[[Array, Array], Array]) -> Array:
        """For each key, the first record that has it and matches: few have more than one."""
        found = np.full(len(key), -1, np.int64)
        sent = look_up(self.key, key)
        asked = np.flatnonzero(sent >= 0)
        sent = sent[asked]
        while len(asked):
            hit = matches(sent, asked)
            found[asked[hit]] = sent[hit]
            asked, sent = asked[~hit], sent[~hit] + 1
            more = sent < len(self.key)
            asked, sent = asked[more], sent[more]
            more = self.key[sent] == key[asked]
            asked, sent = asked[more], sent[more]
        return found
