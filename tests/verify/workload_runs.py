"""Runs of a workload for tests: its processes (or threads), and what is plainly counted of it at the end."""

from __future__ import annotations

import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from semel import Admin, Broker, Fetcher, TopicPartition
from semel.verify.clients.libraries import open_clients
from semel.verify.history import ROW, Act, Phase, Rows, read_rows
from semel.verify.payload import Payload, decode_many
from semel.verify.worker import Exit, spawn_worker, stop_worker
from semel.verify.workloads.life import Life, WorkerSpec
from semel.verify.workloads.workload import WorkerPlan, Workload

WAIT_S = 60.0


def wait_until(condition: Callable[[], bool], what: Callable[[], object] | str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_S} s: {what if isinstance(what, str) else what()}"
        time.sleep(0.05)


@dataclass
class Run:
    """One workload on one broker, with the lives that were started so far."""

    broker: Broker
    folder: Path
    workload: Workload
    library: str
    seed: int
    client_settings: dict[str, object] = field(default_factory=dict[str, object])
    specs: list[WorkerSpec] = field(default_factory=list[WorkerSpec])

    def __post_init__(self) -> None:
        self.plan = self.workload.plan(self.library)
        with Admin(self.settings) as admin:
            for topic, partitions in self.plan.topics.items():
                admin.create_topics(topic, partitions=partitions)

    @property
    def settings(self) -> dict[str, object]:
        return {"bootstrap.servers": self.broker.bootstrap}

    def workers(self, *kinds: str) -> list[WorkerPlan]:
        return [worker for worker in self.plan.workers if worker.role.kind in kinds]

    def next_spec(self, worker: WorkerPlan, life: int = 0) -> WorkerSpec:
        spec = self.plan.spec(
            worker,
            folder=self.folder,
            number=len(self.specs),
            bootstrap=self.broker.bootstrap,
            seed=self.seed,
            life=life,
            settings=self.client_settings,
        )
        self.specs.append(spec)
        return spec

    def rows(self, number: int) -> Rows:
        path = self.folder / f"{number}.rows"
        parts = list(read_rows(path)) if path.exists() else []
        return np.concatenate(parts) if parts else np.empty(0, ROW)

    def committed(self, number: int) -> int:
        return count(self.rows(number), Act.COMMIT, Phase.OK)

    def log(self, number: int) -> str:
        path = self.folder / f"{number}.log"
        return path.read_text() if path.exists() else ""

    # In threads of this process.

    def live_in_thread(self, spec: WorkerSpec, stopping: threading.Event) -> threading.Thread:
        def run() -> None:
            life = Life(spec, stopping, open_clients)
            try:
                self.workload.live(life)
            finally:
                life.history.close()
                life.clients.close()

        thread = threading.Thread(target=run, name=spec.name, daemon=True)
        thread.start()
        return thread

    def live_to_the_end(self) -> None:
        """All workers, until those that have a number of records to send are done and the others have taken it all."""
        stopping = threading.Event()
        threads = {worker.name: self.live_in_thread(self.next_spec(worker), stopping) for worker in self.plan.workers}
        sending = self.workers("source") or self.workers("worker")
        for worker in sending:
            threads[worker.name].join(WAIT_S)
            assert not threads[worker.name].is_alive(), worker.name
        wait_until(lambda: not self.workload.backlog(self.settings), "no backlog")
        stopping.set()
        for name, thread in threads.items():
            thread.join(WAIT_S)
            assert not thread.is_alive(), name

    # As processes.

    @contextmanager
    def process(self, spec: WorkerSpec) -> Iterator[subprocess.Popen[bytes]]:
        process = spawn_worker(spec)
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def stop(self, spec: WorkerSpec, process: subprocess.Popen[bytes]) -> None:
        assert stop_worker(process, WAIT_S) == Exit.DONE, self.log(spec.number)

    # What became of it.

    def visible(self, topic: str) -> list[tuple[int, Payload]]:
        """Offset and payload of each committed record, by partition; waits until no transaction is open."""
        places = [TopicPartition(topic, index) for index in range(self.plan.topics[topic])]
        with Fetcher({**self.settings, "isolation.level": "read_uncommitted"}) as fetcher:
            ends = fetcher.offsets_for(places, "latest")
        records: list[tuple[int, Payload]] = []
        with Fetcher(self.settings) as fetcher:
            fetcher.assign(dict.fromkeys(places, 0))
            for table in fetcher.read_until(ends, stall_ms=30_000):
                found = decode_many(table.column("value").combine_chunks())
                assert found.is_sound.all()
                columns = [getattr(found, name).tolist() for name in Payload._fields]
                payloads = map(Payload, *columns)
                records += zip(table.column("offset").to_pylist(), payloads, strict=True)
        return records


def count(rows: Rows, act: Act, phase: Phase) -> int:
    return int(((rows["act"] == act) & (rows["phase"] == phase)).sum())


def chosen(rows: Rows, act: Act, *phases: Phase) -> Rows:
    return rows[(rows["act"] == act) & np.isin(rows["phase"], phases)]


def assert_whole_transactions(run: Run) -> Counter[str]:
    """Each transaction is there as a whole if it was committed, and not at all if it was not; returns how many."""
    topics = {number: topic for number, (topic, _) in enumerate(run.workload.partitions())}
    visible: dict[tuple[int, int], Counter[tuple[int, int, int]]] = defaultdict(Counter)
    for topic in run.plan.topics:
        for _, one in run.visible(topic):
            assert topics[one.partition] == topic
            if one.transaction >= 0:
                visible[one.writer, one.transaction][one.partition, one.origin, one.sequence] += 1
    fates: Counter[str] = Counter()
    for spec in run.specs:
        rows = run.rows(spec.number)
        asked = set(chosen(rows, Act.COMMIT, Phase.INVOKE)["transaction"].tolist())
        done = set(chosen(rows, Act.COMMIT, Phase.OK)["transaction"].tolist())
        failed = set(chosen(rows, Act.COMMIT, Phase.FAIL)["transaction"].tolist())
        aborted = set(chosen(rows, Act.ABORT, Phase.INVOKE, Phase.OK)["transaction"].tolist())
        sent: dict[int, Counter[tuple[int, int, int]]] = defaultdict(Counter)
        sends = chosen(rows, Act.SEND, Phase.INVOKE)
        for number, *record in sends[["transaction", "partition", "origin", "sequence"]].tolist():
            if number >= 0:
                sent[number][*record] += 1
        for number, records in sent.items():
            seen = visible.pop((spec.number, number), Counter())
            if number in done:
                assert seen == records, f"{spec.name}, transaction {number}"
                fates["committed"] += 1
            elif number not in asked or number in failed or number in aborted:
                assert seen == Counter(), f"{spec.name}, transaction {number}"
                fates["aborted"] += 1
            else:
                assert seen in (records, Counter()), f"{spec.name}, transaction {number}"
                fates["unknown"] += 1
    assert not visible, "records of transactions that nobody has begun"
    return fates


def assert_acknowledged_are_visible(run: Run) -> None:
    """What a source was told is stored is where it was told."""
    visible = [record for topic in run.plan.topics for record in run.visible(topic)]
    stored = {(one.partition, offset, one.origin, one.sequence) for offset, one in visible}
    for spec in run.specs:
        rows = chosen(run.rows(spec.number), Act.SEND, Phase.OK)
        rows = rows[(rows["transaction"] < 0) & (rows["offset"] >= 0)]
        told = set(rows[["partition", "offset", "origin", "sequence"]].tolist())
        assert told <= stored
