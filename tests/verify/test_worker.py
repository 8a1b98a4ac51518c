"""Worker processes: how they end, what they survive, and that their history is written before what it announces."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from workload_runs import WAIT_S, Run, assert_whole_transactions, count, wait_until

from semel import Broker
from semel.errors import ConfigError
from semel.verify.clients import libraries
from semel.verify.clients.face import Surroundings
from semel.verify.clients.libraries import LIBRARIES, open_clients
from semel.verify.history import Act, Phase
from semel.verify.worker import Exit, ask_to_stop, command
from semel.verify.workloads.options import Options
from semel.verify.workloads.registry import make_workload

pytestmark = pytest.mark.chaos  # processes by the dozen


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker(fsync="never") as broker:
        yield broker


def new_run(broker: Broker, folder: Path, library: str, rng: random.Random, workload: str = "bank") -> Run:
    options = Options(partitions=2, sources=1, workers=1, readers=1, batch_records_max=10, rate=200.0)
    made = make_workload(workload, f"run-{uuid.uuid4().hex[:8]}", options)
    return Run(broker, folder, made, library, seed=rng.randrange(1 << 30))


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_next_life_fences_the_one_before(library: str, broker: Broker, tmp_path: Path, rng: random.Random) -> None:
    """The older process ends by itself with the code for it, does not take the id back, and nothing is torn."""
    run = new_run(broker, tmp_path, library, rng)
    [teller] = run.workers("worker")
    with run.process(run.next_spec(teller)) as older:
        wait_until(lambda: run.committed(0) >= 2, lambda: run.log(0))
        with run.process(run.next_spec(teller, life=1)) as newer:
            assert older.wait(WAIT_S) == Exit.FENCED, run.log(0)
            wait_until(lambda: run.committed(1) >= 2, lambda: run.log(1))
            run.stop(run.specs[1], newer)
    assert "transactional" in run.log(0)
    assert_whole_transactions(run)


@pytest.mark.parametrize("library", LIBRARIES)
def test_workers_live_through_a_broker_that_is_killed_and_comes_back(
    library: str, tmp_path: Path, rng: random.Random
) -> None:
    """Source, copier and reader go on by themselves; what became unknown meanwhile is whole or not there at all."""
    with Broker() as broker:
        run = new_run(broker, tmp_path, library, rng, workload="copier")
        specs = [run.next_spec(worker) for worker in run.plan.workers]
        source, copier, reader = (spec.number for spec in specs)
        with ExitStack() as stack:
            running = [stack.enter_context(run.process(spec)) for spec in specs]
            wait_until(lambda: run.committed(copier) >= 2, lambda: run.log(copier))
            broker.kill()
            time.sleep(0.5)  # an outage has to last a while
            broker.restart()
            restarted_ns = time.monotonic_ns()

            def is_at_work(number: int, act: Act) -> bool:
                rows = run.rows(number)
                return count(rows[rows["time_ns"] > restarted_ns], act, Phase.OK) >= 2

            wait_until(lambda: is_at_work(source, Act.SEND), lambda: run.log(source))
            wait_until(lambda: is_at_work(copier, Act.COMMIT), lambda: run.log(copier))
            wait_until(lambda: is_at_work(reader, Act.READ), lambda: run.log(reader))
            run.stop(specs[source], running[source])
            wait_until(lambda: not run.workload.backlog(run.settings), "no backlog")
            run.stop(specs[copier], running[copier])
            run.stop(specs[reader], running[reader])
        assert_whole_transactions(run)
        written, copied = (
            sorted((one.origin, one.sequence) for _, one in run.visible(topic)) for topic in run.plan.topics
        )
        assert copied == written
        assert len(set(written)) == len(written) > 0


def test_a_worker_ends_in_order_by_sigterm_and_by_the_end_of_its_input(
    broker: Broker, tmp_path: Path, rng: random.Random
) -> None:
    """Its last transaction is ended, and its history tells how."""
    run = new_run(broker, tmp_path, "semel", rng)
    [teller] = run.workers("worker")
    ways: list[Callable[[Any], None]] = [ask_to_stop, subprocess.Popen.terminate, lambda one: one.stdin.close()]
    for life, end in enumerate(ways):
        with run.process(spec := run.next_spec(teller, life=life)) as process:
            wait_until(lambda: run.committed(spec.number) >= 2, lambda: run.log(spec.number))
            end(process)
            assert process.wait(WAIT_S) == Exit.DONE, run.log(spec.number)
        rows = run.rows(spec.number)
        assert count(rows, Act.BEGIN, Phase.OK) == count(rows, Act.COMMIT, Phase.OK) + count(rows, Act.ABORT, Phase.OK)


def test_a_worker_dies_with_its_parent(broker: Broker, tmp_path: Path, rng: random.Random) -> None:
    """A supervisor that is killed leaves no load behind."""
    run = new_run(broker, tmp_path, "semel", rng)
    [teller] = run.workers("worker")
    spec = run.next_spec(teller)
    spec.save()
    program = (
        "import sys, time; from pathlib import Path; from semel.verify.worker import WorkerSpec, spawn_worker\n"
        "print(spawn_worker(WorkerSpec.load(Path(sys.argv[1]))).pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(spec.path)], stdout=subprocess.PIPE) as parent:
        try:
            assert parent.stdout is not None
            process_id = int(parent.stdout.readline())
            wait_until(lambda: run.committed(0) >= 1, lambda: run.log(0))
        finally:
            parent.kill()
    wait_until(lambda: not is_running(process_id), f"process {process_id} has ended")


def is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{process_id}/status")
    return not status.exists() or "State:\tZ" not in status.read_text()  # nobody may have waited for it yet


def test_what_it_was_told_wrong_is_said_and_has_a_code_of_its_own(
    broker: Broker, tmp_path: Path, rng: random.Random
) -> None:
    """A supervisor does not start it again and again."""
    run = new_run(broker, tmp_path, "semel", rng)
    good = run.next_spec(run.workers("worker")[0])
    wrong = [
        (replace(good, library="librdkafka"), "semel, confluent-kafka, kafka-python, aiokafka"),
        (replace(good, workload="nothing"), "copier, bank, list-append, counters"),
        (replace(good, settings={"securty.protocol": "SSL"}), "did you mean security.protocol"),
    ]
    for spec, told in wrong:
        spec.save()
        done = subprocess.run(
            command(spec), input="go on\n", capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        assert (done.returncode, told in done.stderr) == (Exit.MISCONFIGURED, True), done.stderr


def test_a_library_that_is_not_installed_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Semel itself needs none of the others."""

    def no_module(name: str) -> ModuleType:
        raise ModuleNotFoundError("No module named 'confluent_kafka'", name="confluent_kafka")

    monkeypatch.setattr(libraries, "import_module", no_module)
    with pytest.raises(ConfigError, match="pip install confluent-kafka"):
        open_clients("confluent-kafka", Surroundings("127.0.0.1:1", [], "test"))


def test_settings_that_a_library_has_no_name_for_are_refused() -> None:
    """Better than to connect without them."""
    for name in ("kafka-python", "aiokafka"):
        clients = open_clients(name, Surroundings("127.0.0.1:1", [("t", 0)], "test", settings={"linger.ms": 5}))
        with pytest.raises(ConfigError, match=r"linger\.ms cannot be passed on"):
            clients.plain_writer(idempotent=True, acks="all")
        clients.close()


@pytest.mark.parametrize("library", LIBRARIES)
def test_idempotent_writing_with_fewer_acks_is_refused(library: str) -> None:
    """The two contradict each other, whatever the library would make of it."""
    clients = open_clients(library, Surroundings("127.0.0.1:1", [("t", 0)], "test"))
    with pytest.raises(ConfigError, match="acks=1 contradicts"):
        clients.plain_writer(idempotent=True, acks="1")
    clients.close()
