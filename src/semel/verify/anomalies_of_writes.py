"""Anomalies of what was written: records lost, repeated, torn apart, out of order, and logs that cannot end.

One pure function for each, with its definition as docstring.
"""

from __future__ import annotations

import numpy as np

from semel.verify.cases import Case, Found, Words, case_of_sent, found, place_of, together
from semel.verify.copies import missing_copies
from semel.verify.evidence import Evidence
from semel.verify.evidence_of_reads import DAMAGED, Sighting, by_partition
from semel.verify.evidence_of_writes import Told
from semel.verify.history import Act
from semel.verify.record_keys import Array, distinct, look_up, places


def lost_write(evidence: Evidence) -> Found:
    """A record that was acknowledged, or whose transaction is committed, and that the judge did not see, though it read
    something behind it. Also a committed record of the input of a copy that is not in the output.

    Behind it means at a higher offset. Where the client was not told the offset: sent later by the same writer.
    """
    missing = evidence.must_be_seen_and_is_not
    lost = missing[_is_something_behind(evidence, missing)]
    text = "{record}, written by {writer} to {partition}, is gone: the judge read on behind its place."
    return together(found(lost, lambda n: case_of_sent(evidence, int(lost[n]), text)), missing_copies(evidence))


def unseen(evidence: Evidence) -> Found:
    """A record that was acknowledged, or whose transaction is committed, and that the judge did not see; nor did it see
    anything behind it, so that the record may be lost or only be late.
    """
    missing = evidence.must_be_seen_and_is_not
    rest = missing[~_is_something_behind(evidence, missing)]
    text = "{record}, written by {writer} to {partition}, did not show up, nor did anything behind it."
    return found(rest, lambda n: case_of_sent(evidence, int(rest[n]), text))


def duplicate(evidence: Evidence) -> Found:
    """A record of a topic (by origin and sequence) that read_committed readers see at more than one place."""
    log, words = evidence.log, Words(evidence)
    repeats = np.flatnonzero(log.is_repeat)
    partition = log.partition

    def case(number: int) -> Case:
        at = int(repeats[number])
        all_places = places(partition, log.offset)[log.key == log.key[at]]
        return _case_of_places(evidence, words, int(log.key[at]), all_places)

    extra = _seen_elsewhere(evidence)
    return together(found(repeats, case), found(extra, lambda n: _case_of_places(evidence, words, *extra[n])))


def inconsistent_offsets(evidence: Evidence) -> Found:
    """A place in a log that held different records for different readers, or another one than was acknowledged there;
    or the place at which a record was acknowledged that is read at another place only.
    """
    words = Words(evidence)
    conflicts = distinct(np.concatenate((_places_read_differently(evidence), _places_unlike_acknowledged(evidence))))

    def case(number: int) -> Case:
        place = int(conflicts[number])
        return Case(f"At {words.place(place)} not all saw the same record.", places=(place,))

    return found(conflicts, case)


def torn_transaction(evidence: Evidence) -> Found:
    """A committed transaction of which the judge saw some records and not others."""
    sends, transactions = evidence.sends, evidence.transactions
    missing = evidence.must_be_seen_and_is_not
    is_seen, is_missing = (np.zeros(transactions.count, np.bool_) for _ in range(2))
    is_seen[sends.slot[sends.is_seen_by_judge]] = True
    is_missing[sends.slot[missing]] = True
    torn = np.flatnonzero(transactions.is_committed & is_seen & is_missing)

    def case(number: int) -> Case:
        slot = int(torn[number])
        mine = np.flatnonzero(sends.slot == slot)
        gone = missing[sends.slot[missing] == slot]
        there = mine[sends.is_seen_by_judge[mine]]
        some = [evidence.lanes.origin_and_sequence(int(sends.key[at])) for at in (*gone[:2], *there[:2])]
        text = f"Of {Words(evidence).transaction(slot)}, {len(there)} of {len(mine)} records are visible."
        return Case(text, tuple(some), (slot,))

    return found(torn, case)


def order_violation(evidence: Evidence) -> Found:
    """A record that is read behind one that the same writer sent to the same partition later; in a keyed topic also one
    that is read behind a later one (by sequence) of the same origin with the same key in the same partition.

    What is in the log again (a duplicate), or was sent twice in one transaction, has no place in an order.
    """
    log, words = evidence.log, Words(evidence)
    keyed = evidence.numbers_of(evidence.manifest.keyed_topics)
    pairs: list[Array] = [np.empty((0, 2), np.int64)]
    for partition in range(len(log.starts) - 1):
        at = np.arange(log.starts[partition], log.starts[partition + 1])
        at = at[~log.is_repeat[at]]
        pairs.append(_sent_later(evidence, at))
        if evidence.lanes.topic_of_partition[partition] in keyed:
            pairs.append(_of_one_key_and_later(evidence, at))
    swapped = np.concatenate(pairs)
    # By the record that comes too late: the two rules may both find it.
    swapped = swapped[np.unique(swapped[:, 1], return_index=True)[1]]
    partition_of = log.partition

    def case(number: int) -> Case:
        before, after = (int(at) for at in swapped[number])
        place_before, place_after = places(partition_of[[before, after]], log.offset[[before, after]]).tolist()
        text = (
            f"{words.record(int(log.key[after]))} was sent before {words.record(int(log.key[before]))} "
            f"and is behind it, at {words.place(place_after)}."
        )
        records = tuple(evidence.lanes.origin_and_sequence(int(log.key[at])) for at in (before, after))
        return Case(text, records, places=(place_before, place_after))

    return found(swapped, case)


def nonmonotonic_send(evidence: Evidence) -> Found:
    """A record that was acknowledged at a lower offset than the one that the same process sent before it to the same
    partition.
    """
    sends, process = evidence.sends, evidence.transactions.process
    placed = np.flatnonzero((sends.offset >= 0) & (sends.partition >= 0))
    placed = placed[np.argsort(sends.rank[placed])]
    writer = process[sends.slot[placed]]
    pairs: list[Array] = [np.empty((0, 2), np.int64)]
    # Ranks run through one process after the other, so that each is a slice.
    starts = np.flatnonzero(np.concatenate(([True], writer[1:] != writer[:-1]))) if len(placed) else []
    for mine in np.split(placed, starts[1:]):
        for _, chosen in by_partition(sends.partition[mine]):
            at = mine[chosen]
            back = np.flatnonzero(sends.offset[at[1:]] < sends.offset[at[:-1]])
            pairs.append(np.stack((at[back], at[back + 1]), axis=1))
    descents = np.concatenate(pairs)

    def case(number: int) -> Case:
        before, after = (int(at) for at in descents[number])
        text = f"{{record}} got offset {sends.offset[after]}; one sent before it had got {sends.offset[before]}."
        earlier = case_of_sent(evidence, before, "")
        later = case_of_sent(evidence, after, text)
        return Case(later.text, (*earlier.records, *later.records), (*earlier.slots, *later.slots))

    return found(descents, case)


def hung_lso(evidence: Evidence) -> Found:
    """A partition whose last stable offset is below its high watermark at the end, when every client has ended and
    every transaction has timed out: read_committed readers wait there for ever.
    """
    last = {int(row["partition"]): row for row in evidence.ends}
    hung = [row for _, row in sorted(last.items()) if row["offset"] < row["value"]]

    def case(number: int) -> Case:
        row = hung[number]
        name = Words(evidence).partition(int(row["partition"]))
        return Case(
            f"{name} is stable up to {row['offset']} only, and ends at {row['value']}.", places=(place_of(row),)
        )

    return found(hung, case)


def _is_something_behind(evidence: Evidence, missing: Array) -> Array:
    sends, log = evidence.sends, evidence.log
    partition = sends.partition[missing].astype(np.int64)
    end = log.starts[1:]
    last = np.array([log.offset[b - 1] if b > a else -1 for a, b in zip(log.starts, end, strict=False)] + [-1])
    by_offset = (sends.offset[missing] >= 0) & (last[partition] > sends.offset[missing])
    untold = sends.offset[missing] < 0
    if not untold.any():
        return by_offset
    process, width = evidence.transactions.process, len(log.starts) - 1
    lane = process[sends.slot].astype(np.int64) * width + sends.partition
    last_rank = np.full((int(process.max()) + 1) * width, -1, np.int64)
    there = sends.is_seen_by_judge & (sends.partition >= 0)
    np.maximum.at(last_rank, lane[there], sends.rank[there])
    return by_offset | (untold & (partition >= 0) & (last_rank[lane[missing]] > sends.rank[missing]))


def _case_of_places(evidence: Evidence, words: Words, key: int, all_places: Array) -> Case:
    text = (
        f"{words.record(key)} is at " + " and at ".join(words.place(place) for place in all_places[:4].tolist()) + "."
    )
    return Case(text, (evidence.lanes.origin_and_sequence(key),), places=tuple(all_places.tolist()))


def _seen_elsewhere(evidence: Evidence) -> list[tuple[int, Array]]:
    """Keys that others than the judge saw at further places, once for each such place."""
    log, strange = evidence.log, evidence.sightings.of(Sighting.STRANGE)
    committed = [evidence.reads.is_read_committed(process) for process in strange["process"].tolist()]
    strange = strange[np.array(committed, np.bool_) & (strange["act"] == Act.READ)]
    if not len(strange):
        return []
    keys = distinct(strange["key"])
    known = np.flatnonzero(look_up(keys, log.key) >= 0)
    key = np.concatenate((log.key[known], strange["key"]))
    place = np.concatenate(
        (places(log.partition[known], log.offset[known]), places(strange["partition"], strange["offset"]))
    )
    is_in_log = np.arange(len(key)) < len(known)
    order = np.lexsort((~is_in_log, place, key))
    key, place, is_in_log = key[order], place[order], is_in_log[order]
    is_new = np.concatenate(([True], (key[1:] != key[:-1]) | (place[1:] != place[:-1])))
    key, place, is_in_log = key[is_new], place[is_new], is_in_log[is_new]
    elsewhere: list[tuple[int, Array]] = []
    starts = np.flatnonzero(np.concatenate(([True], key[1:] != key[:-1])))
    for mine in np.split(np.arange(len(key)), starts[1:]):
        extra = len(mine) - max(int(is_in_log[mine].sum()), 1)
        elsewhere += [(int(key[mine[0]]), place[mine])] * extra
    return elsewhere


def _places_read_differently(evidence: Evidence) -> Array:
    """Where someone saw another record than the judge, or two others saw different ones."""
    log, strange = evidence.log, evidence.sightings.of(Sighting.STRANGE)
    # A CONSUME that does not say what it took says nothing against anyone.
    strange = strange[(strange["act"] == Act.READ) | (strange["sent"] >= 0)]
    at = log.find(strange["partition"], strange["offset"])
    is_other = (at >= 0) & ((log.sent[at] if len(log) else DAMAGED) != DAMAGED)
    place = places(strange["partition"], strange["offset"])
    order = np.lexsort((strange["slot"], strange["key"], place))
    ordered, key, slot = place[order], strange["key"][order], strange["slot"][order]
    differs = (ordered[1:] == ordered[:-1]) & ((key[1:] != key[:-1]) | (slot[1:] != slot[:-1]))
    return np.concatenate((place[is_other], ordered[1:][differs]))


def _places_unlike_acknowledged(evidence: Evidence) -> Array:
    sends, log = evidence.sends, evidence.log
    placed = np.flatnonzero((sends.told == Told.OK) & (sends.offset >= 0) & (sends.partition >= 0))
    place = places(sends.partition[placed], sends.offset[placed])
    order = np.argsort(place)
    place, placed = place[order], placed[order].astype(np.int32)
    del order
    twice = place[1:][place[1:] == place[:-1]]
    log_places = places(log.partition, log.offset)
    at = look_up(log_places, place)
    del log_places
    there = log.sent[at] if len(log) else np.full(len(at), DAMAGED)
    other = (at >= 0) & (there != placed) & (there != DAMAGED)
    # Seen by the judge, and not where the writer was told.
    moved = (at < 0) & sends.is_seen_by_judge[placed]
    strange = evidence.sightings.of(Sighting.STRANGE)
    strange_place = places(strange["partition"], strange["offset"])
    acknowledged = look_up(place, strange_place)
    unlike = (acknowledged >= 0) & ((strange["sent"] >= 0) | (strange["act"] == Act.READ))
    unlike[unlike] = placed[acknowledged[unlike]] != strange["sent"][unlike]
    return np.concatenate((twice, place[other | moved], strange_place[unlike]))


def _sent_later(evidence: Evidence, at: Array) -> Array:
    """Pairs of neighbours among the records of one writer in a partition, of which the first was sent later."""
    log, sends = evidence.log, evidence.sends
    at = at[log.sent[at] >= 0]
    at = at[~sends.is_resent[log.sent[at]]]
    writer = evidence.transactions.process[log.slot[at]]
    at = at[np.argsort(writer.astype(np.int16) if writer.max(initial=0) < 1 << 15 else writer, kind="stable")]
    sent = log.sent[at]
    writer, rank = evidence.transactions.process[sends.slot[sent]], sends.rank[sent]
    back = np.flatnonzero((writer[1:] == writer[:-1]) & (rank[1:] < rank[:-1]))
    return np.stack((at[back], at[back + 1]), axis=1)


def _of_one_key_and_later(evidence: Evidence, at: Array) -> Array:
    log = evidence.log
    at = at[log.sent[at] != DAMAGED]
    at = at[np.lexsort((log.value[at], log.key[at] >> 32))]
    key, value = log.key[at], log.value[at]
    same = (key[1:] >> 32 == key[:-1] >> 32) & (value[1:] == value[:-1])
    back = np.flatnonzero(same & (key[1:] < key[:-1]))
    return np.stack((at[back], at[back + 1]), axis=1)
