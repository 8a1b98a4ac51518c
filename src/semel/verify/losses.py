"""What a pipeline made of its input, counted from the evidence that the checker works with: losses, repeats, speed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from semel.verify.anomalies_of_writes import order_violation, torn_transaction
from semel.verify.copies import missing_copies, visible_in
from semel.verify.evidence import Evidence
from semel.verify.evidence_of_writes import Fate, parts_by_process
from semel.verify.history import Act, History, Phase, Rows


@dataclass(frozen=True, slots=True)
class Tally:
    """All numbers are of records, but for the last four."""

    input: int
    """In the input topic."""
    lost: int
    """Of those, in the output not at all."""
    repeated: int
    """In the output, beyond the first of each."""
    out_of_order: int
    undone: int
    """Sent in transactions that came to nothing: without transactions they would be losses or repeats."""
    torn: int | None
    """Transactions that are visible in part; None where there are none."""
    seconds: float
    """From the first record of the input to the last step of a worker."""
    records_per_s: float
    """Of the input, in the output, over that time."""
    batch_ms: float
    """Half of the batches took no longer, from the first step to the last; nan if none was finished."""


def count(history: History, evidence: Evidence) -> Tally:
    """Of a history with one pair of input and output (`Manifest.copies`)."""
    ((source, target),) = history.manifest.copies
    topics, log, transactions = evidence.lanes.topics, evidence.log, evidence.transactions
    inputs = len(visible_in(evidence, topics.index(source)))
    lost = missing_copies(evidence).count
    is_output = evidence.lanes.topic_of_partition[log.partition] == topics.index(target)
    seconds, batch_ms = _times(history, source)
    return Tally(
        input=inputs,
        lost=lost,
        repeated=int(np.count_nonzero(log.is_repeat & is_output)),
        out_of_order=order_violation(evidence).count,
        undone=len(undone(evidence)),
        torn=torn_transaction(evidence).count if (transactions.fate != Fate.PLAIN).any() else None,
        seconds=seconds,
        records_per_s=(inputs - lost) / seconds if seconds else 0.0,
        batch_ms=batch_ms,
    )


def undone(evidence: Evidence) -> np.ndarray:
    """The sent records (their numbers in `sends`) of transactions that are not committed."""
    transactions, slot = evidence.transactions, evidence.sends.slot
    return np.flatnonzero((transactions.fate[slot] != Fate.PLAIN) & ~transactions.is_committed[slot])


def _times(history: History, source: str) -> tuple[float, float]:
    """How long it all took in seconds, and the median of the batches in milliseconds."""
    inputs = [number for number, (topic, _) in enumerate(history.manifest.partitions) if topic == source]
    first_ns, last_ns = list[int](), list[int]()
    batches: list[float] = []
    for _, rows in parts_by_process(history):
        begun = rows[(rows["act"] == Act.SEND) & (rows["phase"] == Phase.INVOKE) & np.isin(rows["partition"], inputs)]
        if len(begun):
            first_ns.append(int(begun["time_ns"].min()))
        if (rows["act"] == Act.CONSUME).any():
            last_ns.append(int(rows["time_ns"].max()))
            batches += _finished_ms(rows)
    seconds = (max(last_ns) - min(first_ns)) / 1e9 if first_ns and last_ns else 0.0
    return max(0.0, seconds), float(np.median(batches)) if batches else float("nan")


def _finished_ms(rows: Rows) -> list[float]:
    """How long each batch of a worker took that it finished: it begins with BEGIN, or takes inputs without one."""
    act, phase = rows["act"], rows["phase"]
    is_plain_input = (act == Act.CONSUME) & (rows["transaction"] < 0)
    is_first = (act == Act.BEGIN) | (is_plain_input & ~np.concatenate(([False], is_plain_input[:-1])))
    is_end = ((act == Act.COMMIT) & (phase == Phase.OK)) | (
        (act == Act.POSITION) & (phase == Phase.OK) & (rows["transaction"] < 0)
    )
    starts = np.flatnonzero(is_first)
    found: list[float] = []
    for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(rows)], strict=True):
        if is_end[start:end].any():
            # A rewind after it notes where reading begins anew, and is no part of it.
            steps = rows[start:end][act[start:end] != Act.ASSIGN]
            found.append((int(steps["time_ns"].max()) - int(steps["time_ns"][0])) / 1e6)
    return found
