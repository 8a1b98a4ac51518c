"""A little Kafka that does everything right, with clients at which everything goes wrong: it makes clean histories.

Writers with and without transactions, answers that get lost, commits that turn out either way, processes that are
killed between any two steps, copiers (or makers of totals) with positions that take over from each other, readers that
are assigned anew. Each process is a generator; a seed decides which of them takes the next step.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import numpy as np

from semel.verify.history import ROW, Act, Aggregate, History, Manifest, Phase, Process

Steps = Generator[None, None, None]
Transaction = tuple[int, int]


@dataclass(frozen=True)
class Payload:
    origin: int
    sequence: int
    writer: int
    transaction: int
    value: int


@dataclass
class Entry:
    payload: Payload | None  # None is a marker
    transaction: Transaction | None


@dataclass
class Broker:
    logs: list[list[Entry]]
    ended: dict[Transaction, bool] = field(default_factory=dict[Transaction, bool])
    positions: dict[int, int] = field(default_factory=dict[int, int])
    waiting: dict[Transaction, dict[int, int]] = field(default_factory=dict[Transaction, dict[int, int]])
    owners: dict[int, Transaction] = field(default_factory=dict[int, Transaction])

    def append(self, partition: int, payload: Payload, transaction: Transaction | None) -> int:
        self.logs[partition].append(Entry(payload, transaction))
        return len(self.logs[partition]) - 1

    def end(self, transaction: Transaction, *, commit: bool) -> None:
        if transaction in self.ended:
            return
        self.ended[transaction] = commit
        for log in self.logs:
            if any(entry.transaction == transaction for entry in log):
                log.append(Entry(None, transaction))
        if commit:
            self.positions |= self.waiting.get(transaction, {})
        self.owners = {partition: owner for partition, owner in self.owners.items() if owner != transaction}

    def last_stable_offset(self, partition: int) -> int:
        log = self.logs[partition]
        is_open = (n for n, entry in enumerate(log) if entry.transaction and entry.transaction not in self.ended)
        return next(is_open, len(log))

    def fetch(self, partition: int, position: int, *, committed: bool) -> Iterator[tuple[int, Payload]]:
        log = self.logs[partition]
        end = self.last_stable_offset(partition) if committed else len(log)
        for offset in range(position, end):
            entry = log[offset]
            if entry.payload and (not committed or entry.transaction is None or self.ended[entry.transaction]):
                yield offset, entry.payload


class LittleKafka:
    """One run. `history` is what it leaves behind."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.kind = rng.choice(("copy", "copy", "keyed", "foreign", "count", "sum", "transfers"))
        self.inputs = list(range(rng.choice((1, 2, 3))))
        self.outputs = [len(self.inputs) + n for n in range(rng.choice((1, 2)))]
        self.broker = Broker([[] for _ in (*self.inputs, *self.outputs)])
        self.processes: list[Process] = []
        self.rows: list[list[tuple[int, ...]]] = []
        self.now = 1000
        self.alive: list[tuple[int, Steps]] = []
        self.later: list[tuple[Transaction, bool]] = []
        self.totals: dict[int, tuple[int, int]] = {}
        self.sequences: dict[int, int] = {}
        self._run()

    @property
    def history(self) -> History:
        partitions = [("orders", n) for n in range(len(self.inputs))] + [
            ("results", n) for n in range(len(self.outputs))
        ]
        manifest = Manifest(partitions, self.processes)
        if self.kind in ("copy", "keyed", "foreign"):
            manifest.copies = [("orders", "results")]
        if self.kind == "keyed":
            manifest.keyed_topics = ["orders", "results"]
        if self.kind == "transfers":
            manifest.zero_sum_topics = ["orders"]
        if self.kind in ("count", "sum"):
            manifest.aggregates = [Aggregate("orders", "results", self.kind)]  # type: ignore[arg-type]
        return History(manifest, [np.array(rows, ROW) for rows in self.rows])

    def _run(self) -> None:
        rng = self.rng
        for _ in range(rng.randint(1, 3)):
            self._start("writer", self._writer)
        for isolation in rng.choices(("read_committed", "read_uncommitted"), k=rng.randint(0, 2)):
            self._start("reader", self._reader, isolation)
        if self.kind not in ("transfers", "foreign"):
            for _ in range(rng.randint(1, 2)):
                self._start("copier", self._copier)
        while self.alive:
            number, process = self.alive[rng.randrange(len(self.alive))]
            self._settle_some()
            is_killed = self.processes[number].role == "writer" and rng.random() < 0.02
            if is_killed or not self._step(process):
                process.close()
                self.alive = [one for one in self.alive if one[0] != number]
                self._abandon(number)
        self._settle_all()
        self._finish_pipeline()
        self._judge()

    def _step(self, process: Steps) -> bool:
        return next(process, self) is not self

    def _abandon(self, process: int) -> None:
        """Whatever a process left open is aborted by time-out."""
        for transaction in self._open():
            if transaction[0] == process and transaction not in [one for one, _ in self.later]:
                self.later.append((transaction, False))

    def _open(self) -> set[Transaction]:
        found = {entry.transaction for log in self.broker.logs for entry in log if entry.transaction}
        return (found | set(self.broker.waiting) | set(self.broker.owners.values())) - set(self.broker.ended)

    def _settle_some(self) -> None:
        if self.later and self.rng.random() < 0.2:
            transaction, commit = self.later.pop(self.rng.randrange(len(self.later)))
            self.broker.end(transaction, commit=commit)

    def _settle_all(self) -> None:
        for transaction, commit in self.later:
            self.broker.end(transaction, commit=commit)
        for transaction in sorted(self._open()):
            self.broker.end(transaction, commit=False)

    # Processes.

    def _start(self, name: str, steps: object, isolation: str = "read_committed") -> None:
        number = len(self.processes)
        role = {"writer": "writer", "copier": "writer"}.get(name, name)
        self.processes.append(Process(number, f"{name}-{number}", role, isolation))  # type: ignore[arg-type]
        self.rows.append([])
        self.alive.append((number, steps(number)))  # type: ignore[operator]

    def _note(self, process: int, act: Act, phase: Phase, **columns: int) -> None:
        self.now += self.rng.randint(1, 5)
        row = dict.fromkeys(ROW.names or (), -1) | {"time_ns": self.now, "process": process} | columns
        self.rows[process].append((*(row[name] for name in (ROW.names or ())[:-2]), act, phase))

    def _writer(self, me: int) -> Steps:
        rng = self.rng
        tells, chooses = rng.random() < 0.7, rng.random() < 0.15
        again: list[tuple[int, Payload]] = []
        number = 0
        for _ in range(rng.randint(2, 5)):
            yield
            if self.kind != "transfers" and rng.random() < 0.3 and not again:
                yield from self._send_plain(me, self._new_records(me, -1), chooses)
                continue
            records = again or self._new_records(me, number)
            records = [(p, Payload(one.origin, one.sequence, me, number, one.value)) for p, one in records]
            self._note(me, Act.BEGIN, Phase.OK, transaction=number)
            yield from self._send(me, number, records, tells=tells, chooses=chooses)
            outcome = yield from self._end(me, number)
            # Who is told that it is aborted sends the same once more; who does not know must not.
            again = records if outcome == "aborted" and rng.random() < 0.7 else []
            number += 1

    def _new_records(self, me: int, transaction: int) -> list[tuple[int, Payload]]:
        rng = self.rng
        amount = rng.randint(1, 9)
        values = {"transfers": [amount, -amount]}.get(self.kind, [rng.randint(0, 3) for _ in range(rng.randint(1, 4))])
        records: list[tuple[int, Payload]] = []
        for value in values:
            sequence = self.sequences[me] = self.sequences.get(me, -1) + 1
            partition = self.inputs[value % len(self.inputs)] if self.kind == "keyed" else rng.choice(self.inputs)
            records.append((partition, Payload(me, sequence, me, transaction, value)))
        return records

    def _send(
        self, me: int, number: int, records: list[tuple[int, Payload]], *, tells: bool, chooses: bool = False
    ) -> Steps:
        offsets: list[int] = []
        for partition, payload in records:
            columns = self._columns(payload) | {"partition": -1 if chooses else partition}
            self._note(me, Act.SEND, Phase.INVOKE, **columns)
            yield
        for partition, payload in records:
            offsets.append(self.broker.append(partition, payload, (me, number)))
            yield
        for (partition, payload), offset in zip(records, offsets, strict=True):
            if tells:
                columns = self._columns(payload) | {"partition": partition, "offset": offset}
                self._note(me, Act.SEND, Phase.OK, **columns)

    def _send_plain(self, me: int, records: list[tuple[int, Payload]], chooses: bool) -> Steps:
        for partition, payload in records:
            columns = self._columns(payload) | {"partition": -1 if chooses else partition}
            self._note(me, Act.SEND, Phase.INVOKE, **columns)
            yield
            phase = self.rng.choice((Phase.OK, Phase.OK, Phase.OK, Phase.FAIL, Phase.UNKNOWN, Phase.INVOKE))
            offset = -1
            if phase is Phase.OK or (phase is not Phase.FAIL and self.rng.random() < 0.5):
                offset = self.broker.append(partition, payload, None)
                yield
            if phase is Phase.OK:
                self._note(me, Act.SEND, phase, **columns | {"partition": partition, "offset": offset})
            elif phase is not Phase.INVOKE:
                self._note(me, Act.SEND, phase, **columns)

    def _end(self, me: int, number: int) -> Generator[None, None, str]:
        rng, transaction = self.rng, (me, number)
        choice = rng.choice(("ok", "ok", "ok", "ok", "abort", "give up", "refused", "unknown", "silent"))
        if choice in ("abort", "give up"):
            self._note(me, Act.ABORT, Phase.INVOKE, transaction=number)
            yield
            self.broker.end(transaction, commit=False)
            if choice == "abort":
                self._note(me, Act.ABORT, Phase.OK, transaction=number)
            return "aborted"
        self._note(me, Act.COMMIT, Phase.INVOKE, transaction=number)
        if rng.random() < 0.1:
            self.later.append((transaction, rng.random() < 0.5))
            choice = "silent"
        yield
        if choice == "ok":
            self.broker.end(transaction, commit=True)
            yield
            self._note(me, Act.COMMIT, Phase.OK, transaction=number)
            return "committed"
        if choice == "refused":
            self.broker.end(transaction, commit=False)
            self._note(me, Act.COMMIT, Phase.FAIL, transaction=number)
            return "aborted"
        if transaction not in [one for one, _ in self.later]:
            self.later.append((transaction, rng.random() < 0.5))
        if choice == "unknown":
            self._note(me, Act.COMMIT, Phase.UNKNOWN, transaction=number)
        if rng.random() < 0.3:
            self._note(me, Act.ABORT, Phase.OK, transaction=number)
        # The next transaction of the same id cannot begin before this one is settled.
        while transaction not in self.broker.ended:
            yield
        return "unknown"

    def _reader(self, me: int) -> Steps:
        rng = self.rng
        committed = self.processes[me].isolation == "read_committed"
        positions: dict[int, int] = {}
        for _ in range(rng.randint(3, 12)):
            yield
            partition = rng.randrange(len(self.broker.logs))
            if partition not in positions or rng.random() < 0.15:
                positions[partition] = rng.randint(0, len(self.broker.logs[partition]))
                self._note(me, Act.ASSIGN, Phase.OK, partition=partition, offset=positions[partition])
                yield
            read = list(self.broker.fetch(partition, positions[partition], committed=committed))
            for offset, payload in read[: rng.randint(1, 8)]:
                self._note(me, Act.READ, Phase.OK, partition=partition, offset=offset, **self._columns(payload))
                positions[partition] = offset + 1

    def _copier(self, me: int) -> Steps:
        rng = self.rng
        for number in range(rng.randint(2, 5)):
            yield
            free = [partition for partition in self.inputs if partition not in self.broker.owners]
            if self.kind in ("count", "sum") and len(free) < len(self.inputs):
                continue
            mine = free if self.kind in ("count", "sum") else rng.sample(free, rng.randint(0, len(free)))
            if mine:
                yield from self._copy(me, number, mine, most=rng.randint(1, 6))
                yield from self._end(me, number)

    def _copy(self, me: int, number: int, mine: list[int], most: int) -> Steps:
        """One transaction up to where it would end."""
        for partition in mine:
            self.broker.owners[partition] = (me, number)
        self._note(me, Act.BEGIN, Phase.OK, transaction=number)
        records: list[tuple[int, Payload]] = []
        state = self._totals_so_far() if self.kind in ("count", "sum") else {}
        for partition in mine:
            position = self.broker.positions.get(partition, 0)
            for offset, payload in list(self.broker.fetch(partition, position, committed=True))[:most]:
                named = {"origin": payload.origin, "sequence": payload.sequence, "writer": payload.writer}
                columns = named | {"partition": partition, "offset": offset, "transaction": number}
                self._note(me, Act.CONSUME, Phase.OK, **columns)
                records.append(self._result(me, number, payload, state))
                position = offset + 1
            self._note(me, Act.POSITION, Phase.OK, partition=partition, offset=position, transaction=number)
            self.broker.waiting.setdefault((me, number), {})[partition] = position
            yield
        yield from self._send(me, number, records, tells=self.rng.random() < 0.7)

    def _totals_so_far(self) -> dict[int, tuple[int, int]]:
        """The state of a pipeline is what it has committed."""
        state: dict[int, tuple[int, int]] = {}
        for partition in self.outputs:
            for _, payload in self.broker.fetch(partition, 0, committed=True):
                state[payload.origin] = (payload.value, payload.sequence)
        return state

    def _result(self, me: int, number: int, payload: Payload, state: dict[int, tuple[int, int]]) -> tuple[int, Payload]:
        if self.kind in ("count", "sum"):
            total, updates = state.get(payload.origin, (0, -1))
            total += payload.value if self.kind == "sum" else 1
            state[payload.origin] = (total, updates + 1)
            partition = self.outputs[payload.origin % len(self.outputs)]
            return partition, Payload(payload.origin, updates + 1, me, number, total)
        partition = self.outputs[payload.value % len(self.outputs)]
        return partition, Payload(payload.origin, payload.sequence, me, number, payload.value)

    def _finish_pipeline(self) -> None:
        if self.kind == "foreign":
            for partition in self.inputs:
                for _, payload in self.broker.fetch(partition, 0, committed=True):
                    self.broker.append(self.rng.choice(self.outputs), payload, None)
        elif self.kind != "transfers":
            self._start("copier", lambda me: self._copy(me, 0, self.inputs, most=10**6))
            number, steps = self.alive.pop()
            for _ in steps:
                pass
            self._note(number, Act.COMMIT, Phase.INVOKE, transaction=0)
            self.broker.end((number, 0), commit=True)
            self._note(number, Act.COMMIT, Phase.OK, transaction=0)

    def _judge(self) -> None:
        self._start("judge", lambda me: iter(()))
        me, _ = self.alive.pop()
        for partition, log in enumerate(self.broker.logs):
            stable = self.broker.last_stable_offset(partition)
            self._note(me, Act.ENDS, Phase.OK, partition=partition, offset=stable, value=len(log))
            self._note(me, Act.ASSIGN, Phase.OK, partition=partition, offset=0)
            for offset, payload in self.broker.fetch(partition, 0, committed=True):
                self._note(me, Act.READ, Phase.OK, partition=partition, offset=offset, **self._columns(payload))

    def _columns(self, payload: Payload) -> dict[str, int]:
        return dict(vars(payload))
