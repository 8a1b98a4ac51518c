"""Makes a verdict of what was found in a program's topics: each finding with its records and the faults around it."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from semel.verify.faults.driver import Record
from semel.verify.faults.kinds import FaultKind
from semel.verify.programs.records import Finding, TopicRecord
from semel.verify.programs.rules import DEFINITIONS
from semel.verify.verdict import Anomaly, Verdict, Witness

WITNESSES_MAX: Final = 20
_FAULTS_MAX: Final = 3
_NEAR_S: Final = 15.0
_WRITING_S: Final = 1.0
_KILLS: Final = (FaultKind.WORKER_KILL, FaultKind.CRASH)
_OF_THE_RULE: Final = "Found by the rule."


class Times:
    """When records were written or seen, and which faults were carried out around then."""

    def __init__(self, zero_ns: int, time_of: Callable[[TopicRecord], int | None], faults: Iterable[Record]) -> None:
        self._zero_ns = zero_ns
        self._time_of = time_of
        self._faults = [fault for fault in faults if fault.outcome == "done"]

    def at_s(self, record: TopicRecord) -> float | None:
        """In seconds since the beginning of the history."""
        time_ns = self._time_of(record)
        return None if time_ns is None else self.since_zero_s(time_ns)

    def since_zero_s(self, time_ns: int) -> float:
        return round((time_ns - self._zero_ns) / 1e9, 3)

    def faults_near(self, records: Sequence[TopicRecord]) -> list[Record]:
        """The nearest ones, in the order of their time."""
        times = [at for record in records if (at := self._time_of(record)) is not None]
        near = [(min(_apart_s(fault, at) for at in times), fault) for fault in self._faults] if times else []
        near = sorted((one for one in near if one[0] <= _NEAR_S), key=lambda one: one[0])[:_FAULTS_MAX]
        return sorted((fault for _, fault in near), key=lambda fault: fault.begin_ns)


def verdict_of(findings: Sequence[Finding], checked: dict[str, int], times: Times) -> Verdict:
    """One anomaly for each kind of finding, those with a definition first."""
    by_kind: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        by_kind[finding.kind].append(finding)
    order = [*(kind for kind in DEFINITIONS if kind in by_kind), *(kind for kind in by_kind if kind not in DEFINITIONS)]
    return Verdict(
        tuple(
            Anomaly(
                kind,
                DEFINITIONS.get(kind, _OF_THE_RULE),
                len(by_kind[kind]),
                tuple(_witness(finding, times) for finding in by_kind[kind][:WITNESSES_MAX]),
            )
            for kind in order
        ),
        checked,
    )


def write_findings(path: Path, findings: Iterable[Finding], times: Times) -> None:
    """All of them, a line each."""
    with path.open("w") as file:
        for one in findings:
            fields = {"kind": one.kind, "text": one.text, "records": [_row(record, times) for record in one.records]}
            file.write(json.dumps(fields) + "\n")


def kills_while_writing(faults: Iterable[Record], seen_ns: Sequence[int]) -> tuple[int, int]:
    """How many kills there were, and how many of them met a program that had written within the last second.

    >>> kills_while_writing([], [])
    (0, 0)
    """
    times = sorted(seen_ns)
    kills = [fault for fault in faults if fault.outcome == "done" and fault.fault.kind in _KILLS]
    met = 0
    for kill in kills:
        at = bisect_right(times, kill.begin_ns)
        met += at > 0 and kill.begin_ns - times[at - 1] <= _WRITING_S * 1e9
    return len(kills), met


def _witness(finding: Finding, times: Times) -> Witness:
    faults = times.faults_near(finding.records)
    lines = finding.text.splitlines()
    for record in finding.records:
        at_s = times.at_s(record)
        lines.append(f"{'' if at_s is None else f'{at_s:+.3f} s  '}{record}")
    for fault in faults:
        lines.append(f"{times.since_zero_s(fault.begin_ns):+.3f} s  fault: {_described(fault)}")
    if finding.records and not faults:
        lines.append(f"No fault within {_NEAR_S:g} s.")
    rows = [_row(record, times) for record in finding.records]
    rows += [{"fault": fault.fault.kind.value, "at_s": times.since_zero_s(fault.begin_ns)} for fault in faults]
    return Witness(tuple(lines), tuple(rows))


def _row(record: TopicRecord, times: Times) -> dict[str, Any]:
    return {**record.to_json(), "at_s": times.at_s(record)}


def _described(fault: Record) -> str:
    details = [f"{name} {value}" for name, value in fault.fault.details.items() if value is not None]
    lasted_s = (fault.end_ns - fault.begin_ns) / 1e9
    return f"{fault.fault.kind} {', '.join(details)}, for {lasted_s:.1f} s"


def _apart_s(fault: Record, at_ns: int) -> float:
    return max(fault.begin_ns - at_ns, at_ns - fault.end_ns, 0) / 1e9
