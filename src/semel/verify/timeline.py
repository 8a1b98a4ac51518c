"""A run second by second: what was written and read, how long commits took, how far readers were behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from semel.verify.history import Act, History, Phase, Rows

Counts = npt.NDArray[np.int64]
Figures = npt.NDArray[np.float64]
"""One figure a second; nan where there is nothing to tell."""


@dataclass
class Timeline:
    """Index 0 is the first second. All arrays have the same length."""

    begin_ns: int
    sent: Counts
    committed: Counts
    """Transactions, and so with the next two."""
    aborted: Counts
    unknown: Counts
    read: Counts
    commit_p50_ms: Figures
    commit_p99_ms: Figures
    unstable_records: Figures
    """Offsets between the last stable offset and the high watermark, of all partitions together."""
    totals: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def knows_transactions(self) -> bool:
        """A run of a user's own program has no rows of its transactions."""
        return any(self.totals[name] for name in ("committed", "aborted", "unknown"))

    @property
    def seconds(self) -> int:
        return len(self.sent)

    def at_second(self, time_ns: int) -> float:
        return (time_ns - self.begin_ns) / 1e9


def timeline_of(history: History) -> Timeline:
    """Goes through a history once, a part at a time."""
    begin_ns, end_ns = _span(history)
    judges = [one.number for one in history.manifest.processes if one.role == "judge"]
    counter = _Counter(begin_ns, int((end_ns - begin_ns) // 1_000_000_000) + 1, judges)
    for rows in history.parts():
        counter.take(rows)
    return counter.timeline()


def _span(history: History) -> tuple[int, int]:
    begins, ends = list[int](), list[int]()
    for rows in history.parts():
        if len(rows):
            begins.append(int(rows["time_ns"].min()))
            ends.append(int(rows["time_ns"].max()))
    return min(begins, default=0), max(ends, default=0)


class _Counter:
    def __init__(self, begin_ns: int, seconds: int, judges: Sequence[int]) -> None:
        self._begin_ns, self._seconds, self._judges = begin_ns, seconds, judges
        self._counts = {
            name: np.zeros(seconds, np.int64) for name in ("sent", "committed", "aborted", "unknown", "read")
        }
        self._latencies: list[tuple[Counts, Figures]] = []
        self._open_commits: dict[tuple[int, int], int] = {}
        self._ends: list[Rows] = []

    def take(self, rows: Rows) -> None:
        act, phase = rows["act"], rows["phase"]
        is_ok, is_fail = phase == Phase.OK, phase == Phase.FAIL
        is_commit, is_abort = act == Act.COMMIT, act == Act.ABORT
        self._count("sent", rows[(act == Act.SEND) & (phase == Phase.INVOKE)])
        # The judge reads everything at the end, at a speed beside which nothing else could be seen.
        self._count("read", rows[(act == Act.READ) & is_ok & ~np.isin(rows["process"], self._judges)])
        self._count("committed", rows[is_commit & is_ok])
        self._count("aborted", rows[(is_abort & is_ok) | (is_commit & is_fail)])
        self._count("unknown", rows[(is_commit | is_abort) & (phase == Phase.UNKNOWN)])
        self._take_commits(rows[is_commit])
        ends = rows[act == Act.ENDS]
        if len(ends):
            self._ends.append(ends.copy())

    def _count(self, name: str, rows: Rows) -> None:
        self._counts[name] += np.bincount(self._second(rows), minlength=self._seconds)

    def _second(self, rows: Rows) -> npt.NDArray[Any]:
        return (rows["time_ns"] - self._begin_ns) // 1_000_000_000

    def _take_commits(self, rows: Rows) -> None:
        """An end belongs to the beginning of the same transaction, which may be in an earlier part."""
        at: list[int] = []
        took_ms: list[float] = []
        for process, transaction, phase, time_ns in zip(
            *(rows[name].tolist() for name in ("process", "transaction", "phase", "time_ns")), strict=True
        ):
            if phase == Phase.INVOKE:
                self._open_commits[process, transaction] = time_ns
            elif (begun := self._open_commits.pop((process, transaction), None)) is not None and phase == Phase.OK:
                at.append((time_ns - self._begin_ns) // 1_000_000_000)
                took_ms.append((time_ns - begun) / 1e6)
        if at:
            self._latencies.append((np.array(at, np.int64), np.array(took_ms, np.float64)))

    def timeline(self) -> Timeline:
        p50, p99 = np.full(self._seconds, np.nan), np.full(self._seconds, np.nan)
        if self._latencies:
            at = np.concatenate([one for one, _ in self._latencies])
            took_ms = np.concatenate([one for _, one in self._latencies])
            order = np.argsort(at, kind="stable")
            at, took_ms = at[order], took_ms[order]
            for second in np.unique(at):
                within = took_ms[np.searchsorted(at, second) : np.searchsorted(at, second, side="right")]
                p50[second], p99[second] = np.percentile(within, [50, 99])
        return Timeline(
            begin_ns=self._begin_ns,
            **self._counts,
            commit_p50_ms=p50,
            commit_p99_ms=p99,
            unstable_records=self._unstable(),
            totals={name: int(counts.sum()) for name, counts in self._counts.items()},
        )

    def _unstable(self) -> Figures:
        lag = np.full(self._seconds, np.nan)
        if not self._ends:
            return lag
        ends = np.concatenate(self._ends)
        ends = ends[np.argsort(ends["time_ns"], kind="stable")]
        behind: dict[int, int] = {}
        for second, partition, offset, high_watermark in zip(
            self._second(ends).tolist(),
            *(ends[name].tolist() for name in ("partition", "offset", "value")),
            strict=True,
        ):
            behind[partition] = max(0, high_watermark - offset)
            lag[second] = sum(behind.values())
        return lag
