"""The topics of a pipeline held against each other: what the input has and the output lacks, and the reverse."""

from __future__ import annotations

import numpy as np

from semel.verify.cases import Case, Found, Words, found
from semel.verify.evidence import Evidence
from semel.verify.evidence_of_writes import Fate, Told
from semel.verify.record_keys import Array, look_up, places


def visible_in(evidence: Evidence, topic: int) -> Array:
    """Where in the log the records of a topic are that are visible by right, each once, sorted by key."""
    log = evidence.log
    first, end = np.searchsorted(log.key, evidence.lanes.range_of(topic), sorter=log.by_key)
    at = log.by_key[first:end]
    return at[~log.is_repeat[at] & log.is_rightly_seen[at]]


def missing_copies(evidence: Evidence) -> Found:
    """Committed records of the input of a copy that are not in its output."""
    log, words = evidence.log, Words(evidence)
    missing: list[tuple[int, str]] = []
    for source, target in _numbered_copies(evidence):
        inputs, outputs = visible_in(evidence, source), visible_in(evidence, target)
        wanted = evidence.lanes.in_topic(log.key[inputs], target)
        gone = inputs[look_up(log.key[outputs], wanted) < 0]
        missing += [(int(at), evidence.lanes.topics[target]) for at in gone]

    def case(number: int) -> Case:
        at, target = missing[number]
        place = int(places(log.partition[[at]], log.offset[[at]])[0])
        key, slot = int(log.key[at]), int(log.slot[at])
        text = f"{words.record(key)}, at {words.place(place)}, has no copy in {target}."
        return Case(text, (evidence.lanes.origin_and_sequence(key),), (slot,) if slot >= 0 else (), (place,))

    return found(missing, case)


def copies_of_aborted(evidence: Evidence) -> Found:
    """Visible copies of records that are not visible in the input, because they were aborted."""
    return _copies_of_nothing(evidence, was_sent=True)


def copies_of_unsent(evidence: Evidence) -> Found:
    """Visible copies of records that are not in the input at all, or in a transaction that never asked to commit."""
    return _copies_of_nothing(evidence, was_sent=False)


def _copies_of_nothing(evidence: Evidence, *, was_sent: bool) -> Found:
    log, words = evidence.log, Words(evidence)
    wrong: list[tuple[int, str]] = []
    for source, target in _numbered_copies(evidence):
        inputs, outputs = visible_in(evidence, source), visible_in(evidence, target)
        wanted = evidence.lanes.in_topic(log.key[outputs], source)
        extra = look_up(log.key[inputs], wanted) < 0
        for at, key in zip(outputs[extra].tolist(), wanted[extra].tolist(), strict=True):
            fates = _fates_of(evidence, key)
            if fates <= {Fate.ABORTED, Fate.OPEN} and (Fate.ABORTED in fates) == was_sent:
                wrong.append((at, evidence.lanes.topics[source]))

    def case(number: int) -> Case:
        at, source = wrong[number]
        place = int(places(log.partition[[at]], log.offset[[at]])[0])
        key, slot = int(log.key[at]), int(log.slot[at])
        why = "was aborted in" if was_sent else "is not committed in"
        text = f"{words.record(key)}, at {words.place(place)}, is a copy of what {why} {source}."
        return Case(text, (evidence.lanes.origin_and_sequence(key),), (slot,) if slot >= 0 else (), (place,))

    return found(wrong, case)


def _fates_of(evidence: Evidence, key: int) -> set[int]:
    """What became of all that was sent with this key, as far as it rules out that it was ever visible by right."""
    sends, transactions = evidence.sends, evidence.transactions
    fates: set[int] = set()
    for sent in sends.all_with(key) if key >= 0 else []:
        slot = int(sends.slot[sent])
        fate = int(transactions.fate[slot])
        if sends.told[sent] == Told.FAILED or (fate == Fate.UNKNOWN and not transactions.is_committed[slot]):
            fate = Fate.ABORTED
        fates.add(fate)
    return fates


def _numbered_copies(evidence: Evidence) -> list[tuple[int, int]]:
    topics = evidence.lanes.topics
    return [(topics.index(a), topics.index(b)) for a, b in evidence.manifest.copies if a in topics and b in topics]
