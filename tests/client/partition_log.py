"""A made-up partition for tests: random interleaved transactions, and a slow, obvious answer to who may read what."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from semel.client.visibility import AbortedTransaction
from semel.records import encode_control_batch
from semel.records.reference import Record, encode_batch


@dataclass
class Transaction:
    """One producer's transaction in this partition; `outcome` is None while it is open."""

    producer_id: int
    first_offset: int
    outcome: str | None = None
    marker_offset: int | None = None


@dataclass
class StoredRecord:
    offset: int
    value: bytes
    transaction: Transaction | None


@dataclass
class PartitionLog:
    """Batches as bytes with their offsets, beside every record on its own."""

    batches: list[tuple[int, int, bytes]] = field(default_factory=list)
    """First offset, last offset, bytes."""
    records: list[StoredRecord] = field(default_factory=list)
    transactions: list[Transaction] = field(default_factory=list)
    end_offset: int = 0

    @property
    def last_stable_offset(self) -> int:
        return min((t.first_offset for t in self.transactions if t.outcome is None), default=self.end_offset)

    def visible(self, start: int, end: int, *, read_committed: bool) -> list[tuple[int, bytes]]:
        """Record by record: within the range, and committed if that is asked for."""
        found = []
        for record in self.records:
            if not start <= record.offset < end:
                continue
            if read_committed:
                if record.offset >= self.last_stable_offset:
                    continue
                if record.transaction is not None and record.transaction.outcome != "commit":
                    continue
            found.append((record.offset, record.value))
        return found

    def serve(self, offset: int, bytes_max: int, *, read_committed: bool) -> tuple[bytes, list[AbortedTransaction]]:
        """What a broker answers: from the batch with `offset` on, at least one, cut anywhere at the limit."""
        stop = self.last_stable_offset if read_committed else self.end_offset
        wanted = [batch for batch in self.batches if batch[1] >= offset and batch[0] < stop]
        data = b"".join(batch for _, _, batch in wanted)
        if wanted:
            data = data[: max(bytes_max, len(wanted[0][2]))]
        # As brokers list them: whatever overlaps, in the order of their ends.
        ended = sorted((t for t in self.transactions if t.outcome == "abort"), key=lambda t: t.marker_offset or 0)
        overlapping = [t for t in ended if t.marker_offset is not None and t.marker_offset >= offset]
        return data, [AbortedTransaction(t.producer_id, t.first_offset) for t in overlapping if t.first_offset < stop]


def random_log(chance: random.Random, steps: int) -> PartitionLog:
    """Producers write, commit and abort in any order; compaction has taken some records and emptied some batches."""
    log = PartitionLog()
    is_open: dict[int, Transaction] = {}
    for _ in range(steps):
        producer_id = chance.randrange(4)
        what = chance.random()
        if producer_id in is_open and what < 0.3:
            end_transaction(log, is_open.pop(producer_id), chance.choice(["commit", "abort"]))
        elif what < 0.85:
            if producer_id not in is_open:
                is_open[producer_id] = Transaction(producer_id, log.end_offset)
                log.transactions.append(is_open[producer_id])
            append(log, chance, is_open[producer_id])
        else:
            append(log, chance, None)
    for transaction in list(is_open.values()):
        if chance.random() < 0.7:
            end_transaction(log, transaction, chance.choice(["commit", "abort"]))
    return log


def append(log: PartitionLog, chance: random.Random, transaction: Transaction | None) -> None:
    base, last = log.end_offset, log.end_offset + chance.randrange(5)
    # Compaction takes records out of batches. The last one stays here, since the codec reads the last offset off it,
    # except in a batch of one, which is left empty.
    is_emptied = base == last and chance.random() < 0.3
    kept = [] if is_emptied else [offset for offset in range(base, last) if chance.random() < 0.8] + [last]
    batch = encode_batch(
        [Record(offset, 1_000 + offset, None, b"value-%d" % offset) for offset in kept],
        base_offset=base,
        producer_id=transaction.producer_id if transaction else chance.choice([-1, 9]),
        transactional=transaction is not None,
    )
    log.batches.append((base, last, batch))
    log.records += [StoredRecord(offset, b"value-%d" % offset, transaction) for offset in kept]
    log.end_offset = last + 1


def end_transaction(log: PartitionLog, transaction: Transaction, outcome: str) -> None:
    transaction.outcome, transaction.marker_offset = outcome, log.end_offset
    batch = encode_control_batch(
        "commit" if outcome == "commit" else "abort",
        producer_id=transaction.producer_id,
        producer_epoch=0,
        coordinator_epoch=0,
        timestamp_ms=1_000,
        base_offset=log.end_offset,
    )
    log.batches.append((log.end_offset, log.end_offset, batch))
    log.end_offset += 1
