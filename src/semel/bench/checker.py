"""The history checker on ten million operations: how long it takes, and how much memory.

The history is a clean one of a pipeline that copies a topic: writers whose transactions overlap, one in twenty aborted,
copiers that note every input, a reader and the judge. It is made first and is not part of what is measured; the checker
then runs in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from semel.bench.report import Bar, Row, Section
from semel.verify.history import Act, History, HistoryWriter, Manifest, Phase, Process, Rows, make_rows

TIMED = (
    "Seconds, and megabytes at the most, of a fresh process that checks a history of twenty million rows on disk: "
    "a copy pipeline with four writers, four copiers, a reader and the judge."
)
SECONDS_MAX = 60.0
MEGABYTES_MAX = 1000.0
RECORDS = 2_300_000
_WRITERS = 4
_PARTITIONS = 8
_TRANSACTION_RECORDS = 100
_ABORTED_ONE_IN = 20
_ROWS_AT_ONCE = 1 << 18

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sent:
    """Records in the order in which they were sent, with what became of them."""

    writer: Numbers
    transaction: Numbers
    partition: Numbers
    offset: Numbers
    origin: Numbers
    sequence: Numbers
    time_ns: Numbers
    is_committed: npt.NDArray[np.bool_]

    def take(self, chosen: npt.NDArray[np.bool_] | Numbers) -> Sent:
        return Sent(**{name: column[chosen] for name, column in vars(self).items()})


def run(records: int = RECORDS) -> Section:
    """Make a history, check it, and compare; fewer records make it quick and the figures meaningless."""
    with tempfile.TemporaryDirectory() as folder:
        write_history(Path(folder), records)
        command = [sys.executable, "-c", "from semel.bench.checker import main; main()", folder]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    figures = json.loads(answer)
    rows = tuple(Row(name, (float(figures[name]),)) for name in ("rows", "operations", "seconds", "megabytes"))
    bars = (
        Bar("seconds, of 60", 1.0, figures["seconds"] / SECONDS_MAX if figures["is_clean"] else None, at_most=True),
        Bar("memory, of 1 GB", 1.0, figures["megabytes"] / MEGABYTES_MAX, at_most=True),
    )
    return Section("checker", TIMED, ("figure",), rows, bars)


def main() -> None:
    """Check the history in the folder that is given, and print what it took."""
    from semel.verify.checker import check

    begin = time.perf_counter()
    verdict = check(History.in_folder(Path(sys.argv[1])))
    seconds = time.perf_counter() - begin
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    figures = {"seconds": seconds, "megabytes": peak / 1000, "is_clean": verdict.is_clean, "counts": verdict.counts}
    print(json.dumps(figures | verdict.checked))


def write_history(folder: Path, records: int) -> None:
    """A history that is clean but for G0, which overlapping writers always have."""
    names = [f"writer-{n}" for n in range(_WRITERS)] + [f"copier-{n}" for n in range(_WRITERS)]
    processes = [Process(number, name, "writer") for number, name in enumerate(names)]
    reader, judge = len(names), len(names) + 1
    processes += [Process(reader, "reader", "reader"), Process(judge, "judge", "judge")]
    partitions = [(topic, index) for topic in ("orders", "copies") for index in range(_PARTITIONS)]
    Manifest(partitions, processes, copies=[("orders", "copies")]).save(folder / "manifest.json")

    orders = _sent_orders(records)
    for writer in range(_WRITERS):
        _write_process(folder, writer, orders.take(orders.writer == writer), None)
    visible = _in_log_order(orders)
    inputs = np.lexsort((visible.time_ns, visible.partition % _WRITERS))
    copies = _sent_copies(visible.take(inputs))
    for copier in range(_WRITERS):
        mine = np.flatnonzero(copies.writer == _WRITERS + copier)
        _write_process(folder, _WRITERS + copier, copies.take(mine), visible.take(inputs[mine]))
    for process in (reader, judge):
        with HistoryWriter(folder / f"{process}.rows", process=process) as history:
            for partition in range(len(partitions)):
                history.note(Act.ASSIGN, Phase.OK, time_ns=0, partition=partition, offset=0)
            for topic in (visible, _in_log_order(copies)):
                _write_reads(history, topic)


def _sent_orders(records: int) -> Sent:
    """Writers send in turn; their transactions begin and end at different times, so that they overlap."""
    tick = np.arange(records)
    writer, number = tick % _WRITERS, tick // _WRITERS
    transaction = (number + writer * _TRANSACTION_RECORDS // _WRITERS) // _TRANSACTION_RECORDS
    is_committed = (transaction * _WRITERS + writer) % _ABORTED_ONE_IN != 0
    return _placed(writer, transaction, number % _PARTITIONS, writer, number, tick * 1000, is_committed)


def _sent_copies(inputs: Sent) -> Sent:
    """Each copier takes its own partitions, in the order in which the records came."""
    copier = inputs.partition % _WRITERS
    starts = np.searchsorted(copier, np.arange(_WRITERS))
    number = np.arange(len(copier)) - starts[copier]
    late = int(inputs.time_ns.max()) + 1_000_000
    return _placed(
        copier + _WRITERS,
        number // _TRANSACTION_RECORDS,
        inputs.partition + _PARTITIONS,
        inputs.origin,
        inputs.sequence,
        late + number * 1000,
        np.ones(len(copier), np.bool_),
    )


def _placed(
    writer: Numbers,
    transaction: Numbers,
    partition: Numbers,
    origin: Numbers,
    sequence: Numbers,
    time_ns: Numbers,
    is_committed: npt.NDArray[np.bool_],
) -> Sent:
    """Give offsets by time, with a gap behind each run of a writer, as a marker would leave."""
    order = np.lexsort((time_ns, partition))
    ordered = partition[order]
    change = np.concatenate(([False], transaction[order][1:] != transaction[order][:-1]))
    place = np.arange(len(order)) + np.cumsum(change)
    first = np.searchsorted(ordered, ordered)
    offset = np.empty(len(order), np.int64)
    offset[order] = place - place[first]
    return Sent(writer, transaction, partition, offset, origin, sequence, time_ns, is_committed)


def _in_log_order(sent: Sent) -> Sent:
    visible = sent.take(sent.is_committed)
    return visible.take(np.lexsort((visible.offset, visible.partition)))


def _write_process(folder: Path, process: int, sent: Sent, inputs: Sent | None) -> None:
    """The rows of a writer: each transaction begins, sends, is told, takes its inputs, and ends."""
    last = np.flatnonzero(np.append(sent.transaction[1:] != sent.transaction[:-1], True))
    ends = sent.take(last)
    named = {name: getattr(sent, name) for name in ("partition", "origin", "sequence", "transaction", "time_ns")}
    invoked = make_rows(len(sent.writer), Act.SEND, Phase.INVOKE, writer=process, **named)
    told = invoked.copy()
    told["phase"], told["offset"] = Phase.OK, sent.offset
    per_end = {"transaction": ends.transaction, "time_ns": ends.time_ns + 1}
    asked = make_rows(len(last), Act.COMMIT, Phase.INVOKE, **per_end)
    asked["act"] = np.where(ends.is_committed, Act.COMMIT, Act.ABORT)
    ended = asked.copy()
    ended["phase"] = Phase.OK
    begun = make_rows(len(last), Act.BEGIN, Phase.OK, **per_end)
    steps: list[Rows] = [begun, invoked, told, asked, ended]
    if inputs is not None:
        taken = make_rows(len(sent.writer), Act.CONSUME, Phase.OK, **{**named, "partition": inputs.partition})
        taken["writer"], taken["offset"] = inputs.writer, inputs.offset
        steps.insert(1, taken)
    step = np.repeat(np.arange(len(steps)), [len(rows) for rows in steps])
    rows = np.concatenate(steps)
    rows = rows[np.lexsort((step, rows["transaction"]))]
    with HistoryWriter(folder / f"{process}.rows", process=process) as history:
        history.note_rows(rows)


def _write_reads(history: HistoryWriter, log: Sent) -> None:
    late = 2 * int(log.time_ns.max()) + 1_000_000_000
    for start in range(0, len(log.writer), _ROWS_AT_ONCE):
        part = log.take(np.arange(start, min(start + _ROWS_AT_ONCE, len(log.writer))))
        columns = {name: column for name, column in vars(part).items() if name not in ("is_committed", "time_ns")}
        history.note_rows(make_rows(len(part.writer), Act.READ, Phase.OK, time_ns=late, **columns))
