"""Each workload with each client library on the embedded broker, judged by plain counting of what can be read."""

from __future__ import annotations

import itertools
import os
import random
import threading
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest
from workload_runs import (
    WAIT_S,
    Run,
    assert_acknowledged_are_visible,
    assert_whole_transactions,
    chosen,
    count,
    wait_until,
)

from semel import Broker, Producer
from semel.errors import ConfigError
from semel.verify.clients.libraries import LIBRARIES
from semel.verify.history import Act, Manifest, Phase
from semel.verify.payload import Payload, encode
from semel.verify.workloads.options import Options
from semel.verify.workloads.registry import WORKLOADS, make_workload
from semel.verify.workloads.workload import Workload

pytestmark = pytest.mark.chaos  # processes by the hundred

# Every workload with Semel's client, and every client with the copier; all of them where there is time.
PAIRS = [
    (workload, library)
    for workload, library in itertools.product(WORKLOADS, LIBRARIES)
    if os.environ.get("SEMEL_WHOLE") or library == "semel" or workload == "copier"
]


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker(fsync="never", config={"group.min.session.timeout.ms": 1_000}) as broker:
        yield broker


def new_run(broker: Broker, folder: Path, workload: str, library: str, rng: random.Random, **options: object) -> Run:
    chosen_options = {"partitions": 3, "sources": 1, "batch_records_max": 20, "session_timeout_ms": 2_000, **options}
    made = make_workload(workload, f"run-{uuid.uuid4().hex[:8]}", Options.from_mapping(chosen_options))
    return Run(broker, folder, made, library, seed=rng.randrange(1 << 30))


def assert_right(run: Run) -> None:
    """What the workload is about."""
    {"copier": copied_once, "bank": adds_up, "list-append": read_only_committed, "counters": counted_once}[
        run.workload.name
    ](run)


def topics_of(workload: Workload) -> list[str]:
    return list(workload.topics())


def copied_once(run: Run) -> None:
    source, target = topics_of(run.workload)
    sent = [(one.origin, one.sequence, one.value) for _, one in run.visible(source)]
    copied = [(one.origin, one.sequence, one.value) for _, one in run.visible(target)]
    assert len(sent) == len(set(sent)) > 0
    assert Counter(copied) == Counter(sent)
    last: dict[tuple[int, int], int] = {}
    for origin, sequence, key in copied:  # a key is in one partition, whose records come in their order
        assert last.get((origin, key), -1) < sequence
        last[origin, key] = sequence


def adds_up(run: Run) -> None:
    sums: dict[tuple[int, int], int] = defaultdict(int)
    for _, one in run.visible(topics_of(run.workload)[0]):
        sums[one.writer, one.transaction] += one.value
    assert sums
    assert set(sums.values()) == {0}


def read_only_committed(run: Run) -> None:
    [topic] = run.plan.topics
    there = {(offset, one.partition, one.origin, one.sequence) for offset, one in run.visible(topic)}
    consumed = 0
    for spec in run.specs:
        rows = chosen(run.rows(spec.number), Act.CONSUME, Phase.OK)
        taken = rows[["offset", "partition", "origin", "sequence"]].tolist()
        assert len(taken) == len(set(taken))
        assert set(taken) <= there
        consumed += len(taken)
    assert consumed > 0


def counted_once(run: Run) -> None:
    source, target = topics_of(run.workload)
    running: dict[int, int] = defaultdict(int)
    expected: dict[tuple[int, int], int] = {}
    for _, one in run.visible(source):  # a key is in one partition
        running[one.origin] += one.value
        expected[one.origin, one.sequence] = running[one.origin]
    totals = [((one.origin, one.sequence), one.value) for _, one in run.visible(target)]
    assert len(totals) == len(expected) > 0
    assert dict(totals) == expected


@pytest.mark.parametrize(("workload", "library"), PAIRS)
def test_a_workload_runs_to_its_end_and_all_adds_up(
    workload: str, library: str, broker: Broker, tmp_path: Path, rng: random.Random
) -> None:
    """Transactions, half of them aborted on purpose: what is visible is what was committed, and readers saw it all."""
    run = new_run(broker, tmp_path, workload, library, rng, records=250, abort_fraction=0.5)
    run.live_to_the_end()
    fates = assert_whole_transactions(run)
    assert fates["committed"] > 0
    assert fates["aborted"] > 0
    assert fates["unknown"] == 0
    assert_acknowledged_are_visible(run)
    assert_right(run)


@pytest.mark.parametrize(("workload", "library"), PAIRS)
def test_a_worker_is_killed_and_replaced_and_all_adds_up(
    workload: str, library: str, broker: Broker, tmp_path: Path, rng: random.Random
) -> None:
    """SIGKILL in the middle of its transactions: the next life goes on where the last commit was."""
    run = new_run(broker, tmp_path, workload, library, rng, rate=400, readers=0, abort_fraction=0.2)
    with ExitStack() as stack:
        started = {
            worker.name: (one := run.next_spec(worker), stack.enter_context(run.process(one)))
            for worker in run.plan.workers
        }
        first = run.workers("worker")[0]
        killed_spec, killed = started.pop(first.name)
        wait_until(lambda: run.committed(killed_spec.number) >= 2, lambda: run.log(killed_spec.number))
        killed.kill()
        spec = run.next_spec(first, life=1)
        started[first.name] = (spec, stack.enter_context(run.process(spec)))
        wait_until(lambda: run.committed(spec.number) >= 2, lambda: run.log(spec.number))
        for source in run.workers("source"):
            run.stop(*started.pop(source.name))
        wait_until(lambda: not run.workload.backlog(run.settings), "no backlog")
        for last in started.values():
            run.stop(*last)
    assert_whole_transactions(run)
    assert_acknowledged_are_visible(run)
    assert_right(run)


def test_members_of_a_group_copy_with_aiokafka_as_long_as_nothing_goes_wrong(
    broker: Broker, tmp_path: Path, rng: random.Random
) -> None:
    """What is not safe with this library can be chosen all the same, to be shown."""
    run = new_run(broker, tmp_path, "copier", "aiokafka", rng, records=250, workers=1, assignment="group")
    run.live_to_the_end()
    assert_whole_transactions(run)
    assert_right(run)


@pytest.mark.parametrize("library", ["confluent-kafka", "kafka-python"])
def test_partitions_can_be_shared_without_a_group(
    library: str, broker: Broker, tmp_path: Path, rng: random.Random
) -> None:
    """Fencing by the transactional id alone, with a library that has groups too."""
    run = new_run(broker, tmp_path, "copier", library, rng, records=250, assignment="manual", abort_fraction=0.5)
    run.live_to_the_end()
    assert_whole_transactions(run)
    assert_right(run)


def test_members_of_a_group_of_the_newer_protocol_copy_too(broker: Broker, tmp_path: Path, rng: random.Random) -> None:
    """KIP-848, as the user's settings ask for it; only one of the libraries has it."""
    run = new_run(broker, tmp_path, "copier", "confluent-kafka", rng, records=250, abort_fraction=0.5)
    run.client_settings["group.protocol"] = "consumer"
    run.live_to_the_end()
    assert_whole_transactions(run)
    assert_right(run)


@pytest.mark.parametrize("writing", ["transactions", "idempotent", "plain"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_sources_write_in_each_of_their_ways(
    library: str, writing: str, broker: Broker, tmp_path: Path, rng: random.Random
) -> None:
    """With a broker that is there, every record is stored once, or not at all if its transaction was aborted."""
    run = new_run(broker, tmp_path, "copier", library, rng, records=300, writing=writing, abort_fraction=0.5)
    [source] = run.workers("source")
    run.live_in_thread(run.next_spec(source), threading.Event()).join(WAIT_S)
    rows = run.rows(0)
    assert count(rows, Act.SEND, Phase.INVOKE) == count(rows, Act.SEND, Phase.OK) == 300
    sent = Counter(chosen(rows, Act.SEND, Phase.OK)[["offset", "partition", "origin", "sequence"]].tolist())
    seen = Counter(
        (offset, one.partition, one.origin, one.sequence) for offset, one in run.visible(topics_of(run.workload)[0])
    )
    assert max(sent.values()) == 1
    assert seen <= sent
    if writing == "transactions":
        assert assert_whole_transactions(run)["aborted"] > 0
    else:
        assert seen == sent


@pytest.mark.parametrize("acks", ["0", "1"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_sources_can_ask_for_less(library: str, acks: str, broker: Broker, tmp_path: Path, rng: random.Random) -> None:
    """acks=0 is told nothing and takes it for done; a broker that is there has stored it all the same."""
    run = new_run(broker, tmp_path, "copier", library, rng, records=100, writing="plain", acks=acks)
    [source] = run.workers("source")
    run.live_in_thread(run.next_spec(source), threading.Event()).join(WAIT_S)
    told = chosen(run.rows(0), Act.SEND, Phase.OK)
    assert len(told) == 100
    assert set((told["offset"] >= 0).tolist()) == {acks == "1"}
    wait_until(lambda: len(run.visible(topics_of(run.workload)[0])) == 100, "all 100 records are there")


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_reader_notes_what_it_reads_and_what_is_damaged(
    library: str, broker: Broker, tmp_path: Path, rng: random.Random
) -> None:
    """READ is ok for a sound payload, and fails for other bytes and for a payload that was sent somewhere else."""
    run = new_run(broker, tmp_path, "bank", library, rng)
    [topic] = run.plan.topics
    sound = Payload(origin=5, sequence=6, writer=7, transaction=8, value=-9, partition=1)
    with Producer(run.settings) as producer:
        for value in (encode(sound, 64), b"noise", encode(sound._replace(partition=2), 80), encode(sound)[:-1]):
            producer.send(topic, value, partition=1)
    stopping = threading.Event()
    [reader] = run.workers("reader")
    thread = run.live_in_thread(run.next_spec(reader), stopping)
    wait_until(lambda: count(run.rows(0), Act.READ, Phase.FAIL) == 3, "three reads have failed")
    stopping.set()
    thread.join(WAIT_S)
    rows = run.rows(0)
    assert sorted(chosen(rows, Act.ASSIGN, Phase.OK)[["partition", "offset"]].tolist()) == [(0, 0), (1, 0), (2, 0)]
    [read] = chosen(rows, Act.READ, Phase.OK)[["partition", "offset", "writer", "transaction", "value"]].tolist()
    assert read == (1, 0, 7, 8, -9)
    failed = chosen(rows, Act.READ, Phase.FAIL)[["partition", "offset", "origin", "sequence"]].tolist()
    assert sorted(failed) == [(1, 1, -1, -1), (1, 2, 5, 6), (1, 3, -1, -1)]


def test_only_an_uncommitted_reader_sees_what_was_aborted(broker: Broker, tmp_path: Path, rng: random.Random) -> None:
    """Both readers read the same partitions at the same time."""
    run = new_run(broker, tmp_path, "bank", "semel", rng, records=200, uncommitted_readers=1, abort_fraction=0.5)
    stopping = threading.Event()
    specs = {worker.name: run.next_spec(worker) for worker in run.plan.workers}
    threads = [run.live_in_thread(spec, stopping) for spec in specs.values()]
    sent = lambda: sum(count(run.rows(specs[f"teller-{n}"].number), Act.SEND, Phase.INVOKE) for n in (0, 1))  # noqa: E731
    unsafe, safe = specs["uncommitted-reader-0"].number, specs["reader-0"].number
    wait_until(lambda: sent() >= 400 and count(run.rows(unsafe), Act.READ, Phase.OK) == sent(), "all of it was read")
    stopping.set()
    for thread in threads:
        thread.join(WAIT_S)
    fates = assert_whole_transactions(run)
    assert fates["aborted"] > 0
    assert count(run.rows(safe), Act.READ, Phase.OK) < count(run.rows(unsafe), Act.READ, Phase.OK)


def test_a_plan_tells_all_that_a_supervisor_needs(tmp_path: Path) -> None:
    """Topics, manifest, processes, specs that survive the file, and what the libraries cannot do."""
    workload = make_workload("copier", "run", Options(partitions=2, sources=1, workers=2, uncommitted_readers=1))
    plan = workload.plan("confluent-kafka", {"reader": "aiokafka"})
    assert plan.topics == {"run-in": 2, "run-out": 2}
    assert plan.manifest() == Manifest(
        [("run-in", 0), ("run-in", 1), ("run-out", 0), ("run-out", 1)],
        copies=[("run-in", "run-out")],
        keyed_topics=["run-in", "run-out"],
    )
    assert [(worker.name, worker.library) for worker in plan.workers] == [
        ("source-0", "confluent-kafka"),
        ("copier-0", "confluent-kafka"),
        ("copier-1", "confluent-kafka"),
        ("reader-0", "aiokafka"),
        ("uncommitted-reader-0", "confluent-kafka"),
    ]
    process = plan.process(plan.workers[-1], number=4, life=2)
    assert (process.name, process.role, process.isolation) == ("uncommitted-reader-0/2", "reader", "read_uncommitted")
    spec = plan.spec(plan.workers[2], folder=tmp_path, number=2, bootstrap="127.0.0.1:1", seed=3, life=4)
    spec.save()
    assert type(spec).load(spec.path) == spec
    assert (spec.index, spec.count, spec.options) == (1, 2, asdict(workload.options))
    assert {name for name, _ in plan.gaps()} == {"aiokafka"}


def test_what_makes_no_sense_is_said_before_anything_runs() -> None:
    """Names and sizes are checked when the plan is made."""
    with pytest.raises(ConfigError, match="copier, bank, list-append, counters"):
        make_workload("nothing", "run")
    with pytest.raises(ConfigError, match="semel, confluent-kafka, kafka-python, aiokafka"):
        make_workload("bank", "run").plan("librdkafka")
    with pytest.raises(ConfigError, match="no role teller: it has source, copier, reader"):
        make_workload("copier", "run").plan("semel", {"teller": "confluent-kafka"})
    with pytest.raises(ConfigError, match="at least 2"):
        make_workload("bank", "run", Options(partitions=1))
    for wrong in ({"acks": "1"}, {"record_bytes": 3}, {"abort_fraction": 1.0}, {"workers": 0}, {"unheard": 1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Options.from_mapping(wrong)
