"""Why a record was lost or written twice, or was not, told of one: who did what with it, and which fault was near.

The rows are those of the checker's own witness. A story is told of a record whose worker died at the wrong moment, if
there is one, because that is the failure that every pipeline must survive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from semel.verify.anomalies_of_writes import duplicate
from semel.verify.cases import Case
from semel.verify.copies import missing_copies
from semel.verify.evidence import Evidence
from semel.verify.history import History
from semel.verify.losses import undone
from semel.verify.verdict import Witness
from semel.verify.witnesses import witnesses_of
from semel.verify.workloads.options import Guarantee

_CANDIDATES_MAX: Final = 200
_NEAR_S: Final = 5.0
_FAR: Final = 1e9
FaultRecord = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Story:
    """What became of one record, and the rows of the history that tell it."""

    text: str
    lines: tuple[str, ...]


def tell(guarantee: Guarantee, history: History, evidence: Evidence, faults: Sequence[FaultRecord]) -> Story | None:
    """The story that this guarantee is about; None if its failure (or what it prevented) did not happen."""
    cases, tell_one = {
        "at-most-once": (_of(missing_copies(evidence)), _tell_lost),
        "at-least-once": (_of(duplicate(evidence)), _tell_repeated),
        "exactly-once": (_of_undone(evidence), _tell_undone),
    }[guarantee]
    done = [fault for fault in faults if fault["outcome"] == "done"]
    witnesses = witnesses_of(history, evidence, cases) if cases else []
    best: tuple[float, Story] | None = None
    for witness in witnesses:
        told = _Teller(witness, done, history).tell(tell_one)
        if told is not None and (best is None or told[0] < best[0]):
            best = told
    return best[1] if best else None


def _of(found: Any) -> list[Case]:
    step = max(1, found.count // _CANDIDATES_MAX)
    return [found.case(number) for number in range(0, found.count, step)][:_CANDIDATES_MAX]


def _of_undone(evidence: Evidence) -> list[Case]:
    sends, chosen = evidence.sends, undone(evidence)
    step = max(1, len(chosen) // _CANDIDATES_MAX)
    return [
        Case("", (evidence.lanes.origin_and_sequence(int(sends.key[at])),), (int(sends.slot[at]),))
        for at in chosen[::step][:_CANDIDATES_MAX].tolist()
    ]


class _Teller:
    """What is known of one record."""

    def __init__(self, witness: Witness, faults: Sequence[FaultRecord], history: History) -> None:
        self.rows: Rows = witness.rows
        self._lines = witness.lines
        self._faults = faults
        self._distance = _FAR
        self.start_ns = min((int(fault["start_ns"]) for fault in faults), default=int(self.rows[0]["time_ns"]))
        ((_, self.output),) = history.manifest.copies

    def tell(self, tell_one: Callable[[_Teller], tuple[str, FaultRecord | None] | None]) -> tuple[float, Story] | None:
        """How far its fault is, which is to be little, and the story."""
        told = tell_one(self)
        if told is None:
            return None
        text, fault = told
        lines = tuple(self._short(line) for line in self._lines if line)
        return (_FAR if fault is None else self._distance), Story(self._short(text), lines)

    def _short(self, text: str) -> str:
        """Without what all topics of a run begin with."""
        prefix, _, name = self.output.rpartition("-")
        return text.replace(f"{prefix}-", "") if prefix and name == "out" else text

    def of(self, act: str, *phases: str) -> Rows:
        return [row for row in self.rows if row["act"] == act and (not phases or row["phase"] in phases)]

    def writes(self, *phases: str) -> Rows:
        """Of copies, not of the record itself."""
        return [row for row in self.of("SEND", *phases) if row["partition"].startswith(f"{self.output}-")]

    def at(self, row: Mapping[str, Any]) -> str:
        return f"{(row['time_ns'] - self.start_ns) / 1e9:.2f} s"

    def record(self) -> str:
        taken = self.of("CONSUME")[0]
        return f"record {taken['sequence']} ({taken['partition']}, offset {taken['offset']})"

    def fault_after(self, row: Mapping[str, Any], *guilty: tuple[str, str]) -> FaultRecord | None:
        """The fault that explains best why this process went no further. `guilty` are requests, by name and whether
        they were stopped `before` they arrived or only `after`, that would explain it."""
        worker, time_ns = str(row["process"]).split("/")[0], int(row["time_ns"])
        near = [fault for fault in self._faults if _gap_s(fault, time_ns) < _NEAR_S]
        if not near:
            return None
        fault = min(near, key=lambda one: (_rank(one, worker, guilty), _gap_s(one, time_ns)))
        self._distance = _rank(fault, worker, guilty) * _NEAR_S + _gap_s(fault, time_ns)
        return fault

    def words(self, fault: FaultRecord | None) -> str:
        if fault is None:
            return "no fault is near"
        details = fault["details"]
        at = f"at {(fault['begin_ns'] - self.start_ns) / 1e9:.2f} s"
        who = str(details.get("victim") or details.get("workers") or "")
        api = details.get("api")
        return {
            "crash": f"{who} was killed {at}, while its {api} was on the way (it "
            f"{'arrived' if details.get('when') == 'after' else 'did not arrive'})",
            "worker-kill": f"{who} was killed {at}",
            "worker-pause": f"{who} stood still {at}",
            "kill": f"the broker was killed {at}",
            "pause": f"the broker stood still {at}",
            "cut": f"a connection was cut {at}, at {_article(api)} {api} {details.get('direction', '')}",
            "delay": f"{_article(api)} {api} {details.get('direction', '')} was held back {at}",
        }.get(fault["kind"], f"the fault {fault['kind']} came {at}")


def _article(api: object) -> str:
    """
    >>> _article("OFFSET_COMMIT"), _article("PRODUCE")
    ('an', 'a')
    """
    return "an" if str(api)[:1].upper() in "AEIO" else "a"


def _gap_s(fault: FaultRecord, time_ns: int) -> float:
    """From a moment to a fault that comes soon after it, or that it is in the middle of."""
    if fault["begin_ns"] <= time_ns <= fault["end_ns"]:
        return 0.0
    gap_s = (fault["begin_ns"] - time_ns) / 1e9
    return gap_s if gap_s >= 0 else _NEAR_S  # what was over before has not done it


def _rank(fault: FaultRecord, worker: str, guilty: Sequence[tuple[str, str]]) -> int:
    """0 for a fault that must have done it, 1 for one that may have, 2 for the rest."""
    kind, details = fault["kind"], fault["details"]
    if kind == "worker-kill" and details["workers"] == worker:
        return 1
    is_its = kind == "crash" and details["victim"] == worker
    is_cut = kind == "cut" and details["direction"] == "request" and fault["note"].find(f"-{worker}'") > 0
    if (is_its or is_cut) and (details["api"], details["when"]) in guilty:
        return 0 if is_its else 1
    return 1 if kind == "kill" else 2


def _tell_lost(teller: _Teller) -> tuple[str, FaultRecord | None] | None:
    taken = teller.of("CONSUME")
    if not taken:
        return None
    row, sent = taken[-1], teller.writes("INVOKE")
    fault = teller.fault_after(sent[-1] if sent else row, ("PRODUCE", "before") if sent else ("OFFSET_COMMIT", "after"))
    handed = (
        f" It handed the copy over at {teller.at(sent[-1])} with acks=0, so no answer says whether it was stored."
        if sent
        else " It never wrote the copy."
    )
    return (
        f"{row['process']} took {teller.record()} at {teller.at(row)} and committed the position behind it "
        f"first.{handed} Then {teller.words(fault)}. The group goes on behind the record, so nobody takes it "
        "again: it is lost.",
        fault,
    )


def _tell_repeated(teller: _Teller) -> tuple[str, FaultRecord | None] | None:
    sent = teller.writes("INVOKE")
    if len(sent) < 2 or not teller.of("CONSUME"):
        return None
    first, second = sent[0], sent[1]
    fault = teller.fault_after(first, ("PRODUCE", "after"), ("OFFSET_COMMIT", "before"))
    if first["process"] == second["process"]:
        again = f"It began again at the last committed position, and wrote the record once more at {teller.at(second)}."
    else:
        again = (
            f"{second['process']} began at the last committed position, which is before the record, and wrote it once "
            f"more at {teller.at(second)}."
        )
    return (
        f"{first['process']} wrote its copy of {teller.record()} at {teller.at(first)}. Before the position behind it "
        f"was committed, {teller.words(fault)}. {again} Both copies stay: an idempotent producer knows only the "
        "repeats of its own life.",
        fault,
    )


def _tell_undone(teller: _Teller) -> tuple[str, FaultRecord | None] | None:
    sent, seen = teller.writes("INVOKE"), _judged(teller.of("READ"), teller.output)
    if len(sent) < 2 or len(seen) != 1:
        return None
    first, last = sent[0], sent[-1]
    fault = teller.fault_after(first, ("PRODUCE", "after"), ("END_TXN", "before"))
    return (
        f"{first['process']} sent its copy of {teller.record()} at {teller.at(first)}, in its transaction "
        f"{first['transaction']}. Before that was committed, {teller.words(fault)}. Copy and position were undone "
        f"together; {last['process']} took the record again, in its transaction {last['transaction']}. Readers see one "
        f"copy, at offset {seen[0]['offset']} of {seen[0]['partition']}.",
        fault,
    )


def _judged(reads: Iterable[Mapping[str, Any]], output: str) -> Rows:
    return [row for row in reads if row["process"] == "judge" and row["partition"].startswith(f"{output}-")]
