"""What the search for an anomaly returns: how many cases there are, and what to tell of each when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from semel.verify.evidence import Evidence
from semel.verify.evidence_of_reads import DAMAGED
from semel.verify.history import Act
from semel.verify.record_keys import OFFSET_BITS, Array, partition_and_offset


@dataclass(frozen=True, slots=True)
class Case:
    """One case in a sentence, and whose rows tell of it: records by origin and sequence, slots, places in logs."""

    text: str
    records: tuple[tuple[int, int], ...] = ()
    slots: tuple[int, ...] = ()
    places: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """Cases in a fixed order. The words for one are made only when it is asked for: there may be millions."""

    count: int
    case: Callable[[int], Case]


def found(items: Sequence[object] | Array, case: Callable[[int], Case]) -> Found:
    return Found(len(items), case)


def together(*several: Found) -> Found:
    """Cases of one anomaly from several searches, one search after the other."""

    def case(number: int) -> Case:
        for one in several:
            if number < one.count:
                return one.case(number)
            number -= one.count
        raise IndexError(number)

    return Found(sum(one.count for one in several), case)


class Words:
    """Names for what the evidence only knows by numbers."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._names = {process.number: process.name for process in evidence.manifest.processes}

    def process(self, number: int) -> str:
        return self._names.get(number, f"process {number}")

    def partition(self, number: int) -> str:
        if number < 0:
            return "a partition that the client chooses"
        topic, index = self._evidence.manifest.partitions[number]
        return f"{topic}-{index}"

    def place(self, place: int) -> str:
        partition, offset = partition_and_offset(place)
        return f"offset {offset} of {self.partition(partition)}"

    def record(self, key: int) -> str:
        origin, sequence = self._evidence.lanes.origin_and_sequence(key)
        return f"record {sequence} of origin {origin}"

    def transaction(self, slot: int) -> str:
        if slot < 0:
            return "a transaction of which no row tells"
        process, number = self._evidence.transactions.writer_and_number(slot)
        return f"transaction {number} of {self.process(process)}" if number >= 0 else f"{self.process(process)}"


def case_of_sent(evidence: Evidence, sent: int, text: str, *places: int) -> Case:
    """A case around one sent record; `{record}`, `{writer}` and `{partition}` in the text are filled in."""
    sends, words = evidence.sends, Words(evidence)
    key, slot = int(sends.key[sent]), int(sends.slot[sent])
    text = text.format(
        record=words.record(key), writer=words.transaction(slot), partition=words.partition(int(sends.partition[sent]))
    )
    return Case(text, (evidence.lanes.origin_and_sequence(key),), (slot,), places)


def case_of_sighting(evidence: Evidence, sighting: Array, text: str) -> Case:
    """A case around one read; `{reader}`, `{record}`, `{writer}`, `{place}` and `{expected}` are filled in."""
    words = Words(evidence)
    key, slot, place = int(sighting["key"]), int(sighting["slot"]), place_of(sighting)
    text = text.format(
        reader=f"{words.process(int(sighting['process']))} {'consumed' if sighting['act'] == Act.CONSUME else 'read'}",
        record=words.record(key) if key >= 0 and sighting["sent"] != DAMAGED else "a record",
        writer=words.transaction(slot),
        place=words.place(place),
        expected=int(sighting["expected"]),
    )
    records = (evidence.lanes.origin_and_sequence(key),) if key >= 0 else ()
    return Case(text, records, (slot,) if slot >= 0 else (), (place,))


def place_of(sighting: Array) -> int:
    return (int(sighting["partition"]) << OFFSET_BITS) | int(sighting["offset"])
