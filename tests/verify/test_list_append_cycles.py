"""Circles of dependencies (G1c) in the lists of `list-append`: none on a sound cluster, found where reads are dirty."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from planted_bugs_of_client import a_program_reads_what_is_not_committed
from workload_runs import Run, chosen

from semel import Broker
from semel.verify.checker import check
from semel.verify.history import Act, History, Phase, Process
from semel.verify.judge import Judge
from semel.verify.verdict import Verdict
from semel.verify.workloads.options import Options
from semel.verify.workloads.registry import make_workload

pytestmark = pytest.mark.chaos

BUSY = Options(partitions=2, workers=3, readers=0, batch_records_max=10, records=400)


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker(fsync="never") as made:
        yield made


def play(broker: Broker, folder: Path, rng: random.Random, patch: pytest.MonkeyPatch | None = None) -> Run:
    """Three appenders at the same time, to the end; with a patch they read what is not committed."""
    run = Run(
        broker, folder, make_workload("list-append", f"run-{uuid.uuid4().hex[:8]}", BUSY), "semel", rng.getrandbits(30)
    )
    if patch is not None:
        a_program_reads_what_is_not_committed(patch)
    run.live_to_the_end()
    if patch is not None:
        patch.undo()
    return run


def judged(run: Run) -> Verdict:
    manifest = run.plan.manifest()
    workers = {worker.name: worker for worker in run.plan.workers}
    manifest.processes += [run.plan.process(workers[spec.name], number=spec.number) for spec in run.specs]
    number = len(run.specs)
    manifest.processes.append(Process(number, "judge", "judge"))
    manifest.save(run.folder / "manifest.json")
    judge = Judge(
        run.folder / f"{number}.rows", number=number, bootstrap=run.broker.bootstrap, partitions=manifest.partitions
    )
    assert judge.wait_stable(10)
    judge.read_all()
    judge.close()
    return check(History.in_folder(run.folder))


def reads_after_sends(run: Run) -> int:
    """How many transactions have read something when all their records were stored."""
    found = 0
    for spec in run.specs:
        rows = run.rows(spec.number)
        stored, taken = chosen(rows, Act.SEND, Phase.OK), chosen(rows, Act.CONSUME, Phase.OK)
        for number in np.unique(taken["transaction"]).tolist():
            sent_ns = stored["time_ns"][stored["transaction"] == number]
            read_ns = taken["time_ns"][taken["transaction"] == number]
            found += bool(len(sent_ns)) and bool(read_ns.max() > sent_ns.max())
    return found


def test_transactions_that_read_after_they_have_written_are_in_no_circle(
    broker: Broker, tmp_path: Path, rng: random.Random
) -> None:
    """There is something to decide: many have read with their own records stored, and nothing is found."""
    run = play(broker, tmp_path, rng)
    verdict = judged(run)
    assert verdict.is_clean, verdict.to_json()
    assert reads_after_sends(run) > 10


def test_dirty_reads_of_transactions_at_the_same_time_are_found_as_a_circle(
    broker: Broker, tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has read what the other had written and not committed, in the workload as it runs."""
    run = play(broker, tmp_path, rng, monkeypatch)
    found = {anomaly.name: anomaly for anomaly in judged(run).anomalies}
    assert "g1c" in found, found.keys()
    assert "wrote what was taken by" in found["g1c"].witnesses[0].lines[0]
