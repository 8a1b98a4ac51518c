"""All that a history tells, gathered in four passes over its rows into arrays that fit into memory.

1. Transactions and sent records. 2. What was told of those records, and what the judge saw. 3. Every read against what
the judge saw. 4. The order of each reader's reads. Rows are never held beyond the part that they came in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from semel.verify.evidence_of_reads import Log, Reads, Sighting, Sightings
from semel.verify.evidence_of_writes import Fate, Sends, Told, Transactions, check_form, parts_by_process
from semel.verify.history import ROW, Act, History, Manifest, Phase, Rows
from semel.verify.record_keys import Array, Lanes


@dataclass
class Evidence:
    """What the anomalies are looked for in."""

    manifest: Manifest
    lanes: Lanes
    transactions: Transactions
    sends: Sends
    log: Log
    sightings: Sightings
    reads: Reads
    consumed: tuple[Array, Array, Array]
    """The slot of each transaction that took an input, the place of the input, and the slot that wrote it."""
    positions: Rows
    ends: Rows
    checked: dict[str, int]

    @property
    def must_be_seen(self) -> Array:
        """Of each sent record, whether the judge must have seen it.

        Acknowledged, or of a transaction that is committed; or seen by any read_committed reader, and so there. A
        writer that was told "unknown" of a record and committed all the same has no promise for that record.
        """
        sends, transactions = self.sends, self.transactions
        is_plain = transactions.fate[sends.slot] == Fate.PLAIN
        plain = is_plain & ((sends.told == Told.OK) | (sends.is_seen & (sends.told != Told.FAILED)))
        promised = (sends.told == Told.NOTHING) | (sends.told == Told.OK) | sends.is_seen
        return plain | (transactions.is_committed[sends.slot] & promised & (sends.told != Told.FAILED))

    @property
    def must_be_seen_and_is_not(self) -> Array:
        return np.flatnonzero(self.must_be_seen & ~self.sends.is_seen_by_judge)

    def numbers_of(self, topics: list[str]) -> list[int]:
        """The numbers of topics; one that has no partition in the manifest has none."""
        return [self.lanes.topics.index(topic) for topic in topics if topic in self.lanes.topics]


def gather(history: History) -> Evidence:
    """Go through a history four times."""
    manifest = history.manifest
    lanes, transactions = Lanes(manifest), Transactions(manifest)
    sends = Sends(lanes, transactions)
    positions, ends, checked = _gather_writes(history, lanes, transactions, sends)
    reads = Reads(manifest, lanes, transactions, sends)
    _gather_answers(history, sends, reads)
    for process, rows in parts_by_process(history):
        reads.compare(process, rows)
    _resolve(transactions, sends)
    reads.log.is_rightly_seen = reads.is_rightly_seen(reads.log.sent, reads.log.partition)
    reads.prepare_polls()
    for process, rows in parts_by_process(history):
        reads.follow(process, rows)
    checked |= _counts(transactions, sends, reads.log)
    return Evidence(
        manifest,
        lanes,
        transactions,
        sends,
        reads.log,
        reads.sightings,
        reads,
        reads.consumed,
        positions,
        ends,
        checked,
    )


def _gather_writes(
    history: History, lanes: Lanes, transactions: Transactions, sends: Sends
) -> tuple[Rows, Rows, dict[str, int]]:
    positions: list[Rows] = [np.empty(0, ROW)]
    ends: list[Rows] = [np.empty(0, ROW)]
    checked = {"rows": 0, "operations": 0, "reads": 0, "consumed": 0}
    for process, rows in parts_by_process(history):
        check_form(history.manifest, process, rows)
        act, phase = rows["act"].copy(), rows["phase"].copy()
        transactions.add(process, rows[(act >= Act.BEGIN) & (act <= Act.ABORT)])
        begun = rows[(act == Act.SEND) & (phase == Phase.INVOKE)]
        sends.add(process, begun)
        is_input = ((act == Act.READ) | (act == Act.CONSUME)) & (phase == Phase.OK)
        for named in (begun, rows[is_input]):
            lanes.add(named["partition"], named["origin"])
        positions.append(rows[(act == Act.POSITION) & (phase == Phase.OK) & (rows["transaction"] >= 0)])
        ends.append(rows[act == Act.ENDS])
        # A beginning and its end are one operation; what has no beginning of its own is one too.
        has_beginning = (act == Act.SEND) | (act == Act.COMMIT) | (act == Act.ABORT)
        checked["rows"] += len(rows)
        checked["operations"] += int(np.count_nonzero(~has_beginning | (phase == Phase.INVOKE)))
        checked["reads"] += int(np.count_nonzero(act == Act.READ))
        checked["consumed"] += int(np.count_nonzero(act == Act.CONSUME))
    transactions.finish()
    sends.finish()
    return np.concatenate(positions), np.concatenate(ends), checked


def _gather_answers(history: History, sends: Sends, reads: Reads) -> None:
    pipelines: set[int] = set()
    for process, rows in parts_by_process(history):
        answers = rows[(rows["act"] == Act.SEND) & (rows["phase"] != Phase.INVOKE)]
        if len(answers):
            elsewhere = sends.note_ends(process, answers)
            reads.sightings.add(Sighting.MISROUTED, process, elsewhere)
        reads.gather_log(process, rows)
        if (rows["act"] == Act.CONSUME).any():
            pipelines.add(process)
    sends.finish_ends()
    reads.finish_log(pipelines)
    sends.is_seen_by_judge = np.zeros(len(sends), np.bool_)
    sends.is_seen_by_judge[reads.log.sent[reads.log.sent >= 0]] = True
    sends.is_seen = sends.is_seen_by_judge.copy()


def _resolve(transactions: Transactions, sends: Sends) -> None:
    """An unknown outcome is what became visible: of a commit at least something is, of an abort nothing."""
    shown = np.zeros(transactions.count, np.bool_)
    shown[sends.slot[sends.is_seen]] = True
    fate = transactions.fate
    transactions.is_committed = (fate == Fate.COMMITTED) | ((fate == Fate.UNKNOWN) & shown)


def _counts(transactions: Transactions, sends: Sends, log: Log) -> dict[str, int]:
    fate, is_transaction = transactions.fate, transactions.fate != Fate.PLAIN
    return {
        "records": len(sends),
        "acknowledged": int(np.count_nonzero(sends.told == Told.OK)),
        "visible": len(log),
        "transactions": int(np.count_nonzero(is_transaction)),
        "committed": int(np.count_nonzero(transactions.is_committed)),
        "unknown_that_committed": int(np.count_nonzero((fate == Fate.UNKNOWN) & transactions.is_committed)),
        "unknown_that_aborted": int(np.count_nonzero((fate == Fate.UNKNOWN) & ~transactions.is_committed)),
    }
