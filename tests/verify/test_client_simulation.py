"""Semel's own client in the seeded simulation: what it says is true, a seed is the same each time, bugs are found."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from functools import cache

import pytest
from client_mutants import FOUND_BY, MUTANTS, Mutant

from semel.client.early_writes import EarlyWrites
from semel.verify.simulated_threads import SimulatedThread
from semel.verify.simulation import Outcome, main, run_seed
from semel.verify.virtual_time import VirtualTimeLoop

TRANSACTIONS = 60
SEEDS = range(1, 9)
_BLOCK = 4


@cache
def run_once(seed: int) -> Outcome:
    """A seed without any bug planted, for the tests that only look at what happened in it."""
    return run_seed(seed, TRANSACTIONS)


@pytest.mark.parametrize("first", SEEDS[::_BLOCK])
def test_what_the_client_says_is_true_in_every_seed(first: int) -> None:
    """Committed is visible whole, aborted never, unknown is resolved rightly; nothing lost, repeated or reordered."""
    outcomes = [run_once(seed) for seed in range(first, first + _BLOCK)]
    assert {outcome.seed: outcome.violation for outcome in outcomes if outcome.violation} == {}
    lines = [line for outcome in outcomes for line in outcome.trace]
    for name in ("writer0", "writer1", "filler", "mover", "pump"):
        assert any(f" {name}" in line and line.endswith(" committed") for line in lines), name
    assert any("is killed" in line for line in lines)


def test_a_producer_that_looks_before_every_first_write_is_as_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is in such a hurry here as to look for the last markers; made to, what it is told must still be true."""
    looked: list[float] = []

    def always(_: EarlyWrites, now_s: float) -> bool:
        looked.append(now_s)
        return True

    monkeypatch.setattr(EarlyWrites, "is_likely", always)
    outcomes = [run_seed(seed, TRANSACTIONS) for seed in (101, 102, 103)]
    assert {outcome.seed: outcome.violation for outcome in outcomes if outcome.violation} == {}
    assert len(looked) > len(outcomes) * 10


def test_the_hard_cases_come_up() -> None:
    """Lost commits that are resolved either way, fencing, aborts by time-out: a proof that never met them is none."""
    lines = [line for seed in SEEDS for line in run_once(seed).trace]
    for sight in ("fails with CommitUnknown", "fails with Fenced", "fails with TransactionAborted", "request lost"):
        assert any(sight in line for line in lines), sight
    resolved = {f"{name} {outcome}" for outcome in ("committed", "aborted") for name in _in_doubt(lines)}
    assert {" ".join(line.split()[1:]) for line in lines} & resolved


def _in_doubt(lines: list[str]) -> set[str]:
    """The transactions whose commit was not answered."""
    return {line.split()[2] for line in lines if "fails with CommitUnknown" in line}


def test_a_run_of_full_size_has_the_transactions_asked_for() -> None:
    """200 transactions at least, and many of them committed."""
    outcome = run_seed(3, 200)
    assert outcome.violation is None
    assert outcome.transactions >= 200
    assert outcome.committed > 80


def test_threads_do_not_make_a_run_differ() -> None:
    """The same events and bytes in another process, with another order of hashes."""
    program = f"from semel.verify.simulation import run_seed; print(run_seed(7, {TRANSACTIONS}).digest)"
    again = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    before = set(threading.enumerate())
    one, two = run_once(7), run_seed(7, TRANSACTIONS)
    assert one.trace == two.trace
    assert {one.digest, two.digest} == {again.strip()}
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("process_id", [7, 123_456])
def test_the_number_of_the_process_makes_no_difference(process_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands in the lock file, whose length once decided what else a full disk had room for."""
    monkeypatch.setattr(os, "getpid", lambda: process_id)
    assert run_seed(7, TRANSACTIONS).digest == run_once(7).digest


@pytest.mark.parametrize("seed", [2, 5])
def test_reading_only_what_is_new_finds_what_reading_everything_finds(seed: int) -> None:
    """The oracle reads all logs from their beginning after every event, and is content as well."""
    thorough = run_seed(seed, 30, thorough=True)
    assert thorough.violation is None
    assert thorough.digest == run_seed(seed, 30).digest


@pytest.mark.parametrize("name", ["a_repeat_gets_a_new_sequence", "a_lost_answer_counts_as_a_commit"])
def test_a_bug_is_found_at_the_same_event_by_both_ways_of_reading(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick way neither misses it nor notices it later than the oracle."""
    next(mutant for mutant in MUTANTS if mutant.__name__ == name)(monkeypatch)
    seed = next(seed for seed in range(1, 37) if run_seed(seed, 30).violation)
    quick, thorough = run_seed(seed, 30), run_seed(seed, 30, thorough=True)
    assert quick.violation == thorough.violation
    assert quick.trace == thorough.trace


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_bug_planted_in_the_client_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that cannot fail proves nothing: each of these bugs breaks an invariant within a few dozen seeds."""
    mutant(monkeypatch)
    assert any(run_seed(seed, TRANSACTIONS).violation for seed in [FOUND_BY.get(mutant, SEEDS[0]), *range(1, 37)])


def test_a_broker_that_died_in_a_write_answers_nobody() -> None:
    """Its other tasks went on for a moment, and a client was told what no log had shown yet."""
    assert run_seed(12, 200).violation is None


def test_late_copies_of_offsets_do_not_make_a_transaction_torn() -> None:
    """Before the epoch is raised, copies of AddOffsetsToTxn and TxnOffsetCommit began another transaction; that one was
    aborted, and the one whose offsets they repeat had been committed."""
    assert run_seed(5981, 200).violation is None


def test_the_command_names_the_size_of_a_failing_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A seed alone would run another world: one line repeats what failed."""
    next(mutant for mutant in MUTANTS if mutant.__name__ == "the_dead_are_not_dead")(monkeypatch)
    assert main(["--seed", "1", "--transactions", "30"]) == 1
    assert "python -m semel.verify.simulation --seed 1 --transactions 30 --trace" in capsys.readouterr().err


def test_processes_share_the_seeds_and_tell_of_them_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    """Two processes print what one prints, trace for trace; only the time that it took differs."""
    printed: list[list[str]] = []
    for jobs in ("1", "2"):
        assert main(["--seeds", "4", "--from", "5", "--trace", "--jobs", jobs]) == 0
        printed.append(capfd.readouterr().out.splitlines())
    assert printed[0][:-1] == printed[1][:-1]
    assert [lines[-1].startswith("4 seeds, ") and lines[-1].endswith(" seeds an hour") for lines in printed] == [
        True
    ] * 2


@pytest.mark.chaos
def test_hundreds_of_seeds_of_full_size_hold() -> None:
    """300 seeds (SEMEL_SIMULATION_SEEDS for fewer), 200 transactions and more in each, by the command, on all cores."""
    seeds = int(os.environ.get("SEMEL_SIMULATION_SEEDS", "300"))
    command = [sys.executable, "-m", "semel.verify.simulation", "--seeds", str(seeds), "--transactions", "200"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1_800)
    assert (done.returncode, done.stderr) == (0, "")
    counted = re.search(rf"^{seeds} seeds, ([\d,]+) transactions, 0 failures", done.stdout, re.MULTILINE)
    assert counted is not None
    assert int(counted[1].replace(",", "")) >= seeds * 200


@pytest.mark.chaos
def test_ctrl_c_ends_all_processes_in_good_order() -> None:
    """It says how far it has come, and leaves nobody behind."""
    command = [sys.executable, "-m", "semel.verify.simulation", "--seeds", "100000", "--jobs", "2", "--trace"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        running.stdout.readline()
        running.send_signal(signal.SIGINT)
        output, errors = running.communicate(timeout=120)
    assert running.returncode == 130
    assert output.endswith(" seeds an hour\n")
    assert errors == "stopped\n"


@pytest.mark.chaos
def test_whoever_kills_it_kills_its_processes_too() -> None:
    """`kill -9` of the command gives nobody time to tell the others: they notice by themselves."""
    command = [sys.executable, "-m", "semel.verify.simulation", "--seeds", "100000", "--jobs", "2", "--trace"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        running.stdout.readline()
        running.kill()
        running.communicate(timeout=60)  # the pipe ends with the last process that has it


def test_a_killed_thread_ends_where_it_waits() -> None:
    """What stands behind the wait is never done, not even by code that catches every exception."""
    loop, done = VirtualTimeLoop(), list[str]()

    def work() -> None:
        try:
            done.append("begun")
            thread.sleep(10)
            done.append("slept")
        except Exception:
            done.append("caught")
        finally:
            thread.sleep(10)
            done.append("cleaned up")

    thread = SimulatedThread(loop, work)
    loop.call_later(5, thread.kill)
    loop.run_until_complete(thread.run())
    assert (done, loop.time()) == (["begun"], 5.0)
    loop.close()


def test_threads_take_turns() -> None:
    """Two of them that wait for each other see each step of the other, in virtual time."""
    loop, steps = VirtualTimeLoop(), list[str]()

    def ping() -> None:
        for number in range(3):
            thread_a.sleep(1)
            steps.append(f"ping {number}")
            thread_b.wake()

    def pong() -> None:
        for number in range(3):
            assert thread_b.wait_until(lambda count=number: steps.count(f"ping {count}") == 1, 60)
            steps.append(f"pong {number}")

    thread_a, thread_b = SimulatedThread(loop, ping), SimulatedThread(loop, pong)
    tasks = [loop.create_task(thread_b.run()), loop.create_task(thread_a.run())]
    for task in tasks:
        loop.run_until_complete(task)
    assert steps == [f"{who} {number}" for number in range(3) for who in ("ping", "pong")]
    loop.close()


def test_an_error_of_a_thread_reaches_the_loop() -> None:
    """A violation that a client's thread finds ends the run."""
    loop = VirtualTimeLoop()

    def work() -> None:
        raise AssertionError("not so")

    with pytest.raises(AssertionError, match="not so"):
        loop.run_until_complete(SimulatedThread(loop, work).run())
    loop.close()
