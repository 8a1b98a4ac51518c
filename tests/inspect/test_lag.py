"""True lag against a slow model: a log is a list of offsets, each looked at one by one."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from semel.client.visibility import AbortedTransaction
from semel.inspect.lag import LagCount, TrueLag, needs_records
from semel.inspect.outcomes import Outcomes
from semel.records import BatchHeader, ControlMarker

HISTORIES = 10_000
_TRANSACTIONAL, _CONTROL = 0x10, 0x20


@dataclass
class Transaction:
    """A producer's transaction in one partition."""

    producer_id: int
    first_offset: int
    kind: str | None = None
    marker_offset: int = -1


@dataclass
class History:
    """A log as it was written, and what each offset is."""

    headers: list[BatchHeader] = field(default_factory=list[BatchHeader])
    markers: dict[int, ControlMarker] = field(default_factory=dict[int, ControlMarker])
    owners: dict[int, Transaction | None] = field(default_factory=dict[int, "Transaction | None"])
    """The transaction of each offset that holds a record, None for those outside of any."""
    transactions: list[Transaction] = field(default_factory=list[Transaction])
    end: int = 0

    @property
    def last_stable_offset(self) -> int:
        return min((one.first_offset for one in self.transactions if one.kind is None), default=self.end)

    def write(self, rng: random.Random, producer_id: int, transaction: Transaction | None, epoch: int) -> None:
        size = rng.randint(1, 6)
        is_compacted = rng.random() < 0.2
        kept = [n for n in range(size) if not is_compacted or rng.random() < 0.5]
        for number in kept:
            self.owners[self.end + number] = transaction
        attributes = 0 if transaction is None else _TRANSACTIONAL
        self._append(size, len(kept), attributes, producer_id, epoch)

    def mark(self, transaction: Transaction, kind: str, epoch: int) -> None:
        transaction.kind, transaction.marker_offset = kind, self.end
        self.markers[self.end] = ControlMarker(kind, 0, transaction.producer_id, epoch, self.end)  # type: ignore[arg-type]
        self._append(1, 1, _TRANSACTIONAL | _CONTROL, transaction.producer_id, epoch)

    def _append(self, size: int, records: int, attributes: int, producer_id: int, epoch: int) -> None:
        header = BatchHeader(
            self.end,
            100,
            0,
            2,
            0,
            attributes,
            size - 1,
            0,
            0,
            producer_id,
            epoch,
            -1 if producer_id < 0 else 0,
            records,
        )
        self.headers.append(header)
        self.end += size


def make_history(rng: random.Random) -> History:
    history = History()
    open_ones: dict[int, Transaction] = {}
    for _ in range(rng.randint(0, 25)):
        producer_id = rng.choice([7, 7, 8, 9, -1])
        epoch = rng.randint(0, 3)
        if producer_id < 0 or (rng.random() < 0.1 and producer_id not in open_ones):
            history.write(rng, producer_id, None, epoch)
        elif producer_id in open_ones and rng.random() < 0.5:
            history.mark(open_ones.pop(producer_id), rng.choice(["commit", "abort"]), epoch)
        else:
            if producer_id not in open_ones:
                open_ones[producer_id] = Transaction(producer_id, history.end)
                history.transactions.append(open_ones[producer_id])
            history.write(rng, producer_id, open_ones[producer_id], epoch)
    return history


def slow_lag(history: History, start: int) -> TrueLag:
    """Offset by offset, from what is known of each transaction."""
    counts = dict.fromkeys(("readable", "waiting", "open", "aborted", "markers"), 0)
    for offset in range(start, history.end):
        if offset in history.markers:
            counts["markers"] += 1
        elif offset in history.owners:
            owner = history.owners[offset]
            if owner is not None and owner.kind != "commit":
                counts["open" if owner.kind is None else "aborted"] += 1
            else:
                counts["readable" if offset < history.last_stable_offset else "waiting"] += 1
    return TrueLag(history.end - start, **counts)


def fast_lag(history: History, start: int, answer_batches: int, stop: int | None = None) -> TrueLag:
    """As the reader does it: answers to `read_committed` up to the last stable offset, then markers."""
    stable = history.last_stable_offset
    count = LagCount(start=start, last_stable_offset=stable, high_watermark=history.end)
    outcomes = Outcomes()
    position = start
    due = [header for header in history.headers if header.last_offset >= start]
    for number, header in enumerate(due if stop is None else due[:stop]):
        told = None
        read_marker = lambda header=header: history.markers.get(header.base_offset)  # noqa: E731
        if header.base_offset < stable:
            if number % answer_batches == 0:
                outcomes.begin_answer(_aborted_since(history, max(start, header.base_offset)))
            batch, decided = outcomes.take_stable(header, read_marker), []
        else:
            batch, decided = outcomes.take_beyond(header, read_marker)
        if needs_records(batch, start):
            told = sum(offset in history.owners for offset in range(start, header.last_offset + 1))
        count.add(batch, decided=decided, record_count=told)
        position = header.last_offset + 1
    return count.result(looked_up_to=history.end if stop is None else position)


def _aborted_since(history: History, offset: int) -> list[AbortedTransaction]:
    """What a broker lists: the aborted ones whose marker is at this offset or later."""
    return [
        AbortedTransaction(one.producer_id, one.first_offset)
        for one in history.transactions
        if one.kind == "abort" and one.marker_offset >= offset
    ]


def test_true_lag_equals_a_model_that_looks_at_each_offset(rng: random.Random) -> None:
    """J1: 10,000 random histories with commits, aborts, open transactions, plain records and compacted batches."""
    differs_from_naive = 0
    for number in range(HISTORIES):
        history = make_history(rng)
        start = rng.randint(0, history.end)

        found = fast_lag(history, start, rng.randint(1, 4))

        assert found == slow_lag(history, start), f"history {number} from {start}: {history}"
        assert found.is_exact
        differs_from_naive += found.readable != found.naive
    assert differs_from_naive > HISTORIES / 2


def test_a_lag_that_was_cut_short_brackets_the_true_one(rng: random.Random) -> None:
    """What was not looked at is told: the true lag lies between `readable` and `at_most`."""
    cut_short = 0
    for _ in range(HISTORIES // 5):
        history = make_history(rng)
        start = rng.randint(0, history.end)
        whole = slow_lag(history, start)

        found = fast_lag(history, start, 2, stop=rng.randint(0, 4))

        assert found.readable <= whole.readable <= found.at_most
        cut_short += not found.is_exact
        if found.is_exact:
            assert found == whole
    assert cut_short > 100
