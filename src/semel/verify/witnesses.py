"""The rows of a history that tell of chosen cases, fetched in one pass, and put into words.

A case names records, transactions and places; a witness has everything that any process noted about them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from semel.verify.cases import Case, Words
from semel.verify.evidence import Evidence
from semel.verify.evidence_of_writes import parts_by_process
from semel.verify.history import ROW, Act, History, Phase, Rows
from semel.verify.record_keys import Array, distinct, look_up, places
from semel.verify.verdict import Witness

ROWS_MAX: Final = 60
"""Of one witness: a record that a hundred readers read is understood by the first few."""
_NS_PER_S: Final = 1_000_000_000
_TRANSACTION_ACTS: Final = (Act.BEGIN, Act.POSITION, Act.COMMIT, Act.ABORT)
_RECORD_ACTS: Final = (Act.SEND, Act.CONSUME, Act.READ)


def witnesses_of(history: History, evidence: Evidence, cases: Sequence[Case]) -> list[Witness]:
    """A witness for each case."""
    slots = {slot for case in cases for slot in case.slots}
    for_slots = [evidence.transactions.writer_and_number(slot) for slot in sorted(slots)]
    wanted_transactions = distinct(_packed([pair for pair in for_slots if pair[1] >= 0]))
    wanted_records = distinct(_packed([record for case in cases for record in case.records]))
    wanted_places = distinct(np.array([place for case in cases for place in case.places], np.int64))
    kept: list[Rows] = [np.empty(0, ROW)]
    starts: list[int] = []
    for _, rows in parts_by_process(history):
        act = rows["act"].copy()
        starts.append(int(rows["time_ns"].min()))
        chosen = np.isin(act, _RECORD_ACTS) & _is_in(wanted_records, _pack(rows["origin"], rows["sequence"]))
        chosen |= np.isin(act, _TRANSACTION_ACTS) & _is_in(
            wanted_transactions, _pack(rows["process"], rows["transaction"])
        )
        chosen |= _is_about(wanted_places, rows)
        kept.append(rows[chosen])
    rows = np.concatenate(kept)
    rows = rows[np.argsort(rows["time_ns"], kind="stable")]
    return [_witness(evidence, case, rows, min(starts)) for case in cases]


def _witness(evidence: Evidence, case: Case, rows: Rows, start_ns: int) -> Witness:
    words = Words(evidence)
    transactions = [evidence.transactions.writer_and_number(slot) for slot in case.slots]
    act = rows["act"]
    # Whoever wrote one of the records is of interest even where the case does not name the transaction.
    is_about_record = np.isin(act, _RECORD_ACTS) & _is_in(
        distinct(_packed(list(case.records))), _pack(rows["origin"], rows["sequence"])
    )
    chosen = is_about_record | (
        np.isin(act, _TRANSACTION_ACTS)
        & _is_in(distinct(_packed(transactions)), _pack(rows["process"], rows["transaction"]))
        & (rows["transaction"] >= 0)
    )
    chosen |= _is_about(distinct(np.array(case.places, np.int64)), rows)
    telling = _without_repeated_looks(rows[chosen])
    mine = telling[:ROWS_MAX]
    lines = [case.text, *(_line(words, row, start_ns) for row in mine)]
    left_out = len(telling) - len(mine)
    if left_out:
        lines.append(f"({left_out} more rows)")
    return Witness(tuple(lines), tuple(_as_dict(words, row) for row in mine))


def _is_about(wanted_places: Array, rows: Rows) -> Array:
    """What was done at one of these places, and who was told that its record is there."""
    is_told = (rows["act"] == Act.SEND) & (rows["phase"] == Phase.OK)
    return (is_told | (rows["act"] >= Act.CONSUME)) & _is_in(wanted_places, places(rows["partition"], rows["offset"]))


def _without_repeated_looks(rows: Rows) -> Rows:
    """Where a partition ended was looked at time and again: the first and the last of those that saw the same tell."""
    is_look = rows["act"] == Act.ENDS
    last_seen: dict[tuple[int, int, int], int] = {}
    is_kept = ~is_look
    for row in np.flatnonzero(is_look).tolist():
        saw = (int(rows["partition"][row]), int(rows["offset"][row]), int(rows["value"][row]))
        is_kept[row] |= saw not in last_seen
        last_seen[saw] = row
    is_kept[list(last_seen.values())] = True
    return rows[is_kept]


def _line(words: Words, row: Any, start_ns: int) -> str:
    """One row in words, with the time since the beginning of the history."""
    act, phase = Act(int(row["act"])), Phase(int(row["phase"]))
    told = {Phase.INVOKE: "begins", Phase.OK: "ok", Phase.FAIL: "failed", Phase.UNKNOWN: "unknown"}[phase]
    parts = [
        f"{(int(row['time_ns']) - start_ns) / _NS_PER_S:+.6f} s",
        f"{words.process(int(row['process']))}:",
        act.name,
        told,
    ]
    if row["sequence"] >= 0:
        parts.append(f"record {row['sequence']} of origin {row['origin']}")
    if row["partition"] >= 0:
        parts.append(f"in {words.partition(int(row['partition']))}")
    if act is Act.ENDS:
        parts.append(f"stable up to {row['offset']}, ends at {row['value']}")
    elif row["offset"] >= 0:
        parts.append(f"at offset {row['offset']}")
    if act is Act.READ and row["writer"] >= 0:
        parts.append(f"written by {words.process(int(row['writer']))}" + _in_transaction(row))
    elif act is not Act.READ:
        parts.append(_in_transaction(row).strip())
    return " ".join(part for part in parts if part)


def _in_transaction(row: Any) -> str:
    return f" in its transaction {row['transaction']}" if row["transaction"] >= 0 else ""


def _as_dict(words: Words, row: Any) -> dict[str, Any]:
    """A row with names for its numbers, without what it has no use for."""
    fields: dict[str, Any] = {
        "time_ns": int(row["time_ns"]),
        "process": words.process(int(row["process"])),
        "act": Act(int(row["act"])).name,
        "phase": Phase(int(row["phase"])).name,
    }
    if row["partition"] >= 0:
        fields["partition"] = words.partition(int(row["partition"]))
    if row["writer"] >= 0:
        fields["writer"] = words.process(int(row["writer"]))
    fields |= {name: int(row[name]) for name in ("transaction", "offset", "origin", "sequence") if row[name] >= 0}
    # An amount may be -1, so that of a record is always told.
    if row["value"] != -1 or row["sequence"] >= 0:
        fields["value"] = int(row["value"])
    return fields


def _is_in(wanted: Array, values: Array) -> Array:
    return look_up(wanted, values) >= 0 if len(wanted) else np.zeros(len(values), np.bool_)


def _pack(high: Array, low: Array) -> Array:
    return (high.astype(np.int64) << 32) | (low.astype(np.int64) & 0xFFFFFFFF)


def _packed(pairs: Sequence[tuple[int, int]]) -> Array:
    return np.array([high << 32 | (low & 0xFFFFFFFF) for high, low in pairs], np.int64)
