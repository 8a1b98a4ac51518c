"""Semel's own client in the seeded simulation: what it says is true, a seed is the same each time, bugs are found."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import cache

import pytest
from client_mutants import FOUND_BY, MUTANTS, Mutant

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
    one, two = run_once(7), run_seed(7, TRANSACTIONS)
    assert one.trace == two.trace
    assert {one.digest, two.digest} == {again.strip()}
    assert threading.active_count() == 1


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_bug_planted_in_the_client_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that cannot fail proves nothing: each of these bugs breaks an invariant within a few dozen seeds."""
    mutant(monkeypatch)
    assert any(run_seed(seed, TRANSACTIONS).violation for seed in [FOUND_BY.get(mutant, SEEDS[0]), *range(1, 37)])


def test_the_command_names_the_size_of_a_failing_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A seed alone would run another world: one line repeats what failed."""
    next(mutant for mutant in MUTANTS if mutant.__name__ == "the_dead_are_not_dead")(monkeypatch)
    assert main(["--seed", "1", "--transactions", "30"]) == 1
    assert "python -m semel.verify.simulation --seed 1 --transactions 30 --trace" in capsys.readouterr().err


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
