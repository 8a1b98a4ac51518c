"""A seeded simulation of the broker: real handlers and storage, simulated clients, network, disk and time.

`python -m semel.verify.simulation --seeds 10000` tries that many seeds; a seed that breaks an invariant is printed with
the command that runs it again. One seed is one run, the same each time and on every machine. With `--transactions 200`
a run has so many at least, and Semel's own client takes part in it. The seeds are shared among processes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from semel.verify.simulated_host import BrokerLog
from semel.verify.simulated_world import World
from semel.verify.simulation_jobs import run_all
from semel.verify.simulation_ledger import Violation
from semel.verify.virtual_time import VirtualTimeLoop


@dataclass(slots=True)
class Outcome:
    """What became of one seed."""

    seed: int
    violation: str | None
    digest: str
    trace: list[str] = field(repr=False, default_factory=list[str])
    transactions: int = 0
    committed: int = 0
    restarts: int = 0


def run_seed(seed: int, transactions: int | None = None, *, thorough: bool = False) -> Outcome:
    """One run. With a number of transactions, so many at least, and processes that use Semel's own client take part.

    `thorough` reads all logs anew after every event, where the usual run takes up what is new in them: the slow oracle
    of the quick way.

    >>> run_seed(1).violation is None
    True
    """
    loop = VirtualTimeLoop()
    with _broker_log() as log, _no_garbage_collection():
        world = World(seed, loop, transactions, thorough=thorough)
        loop.set_exception_handler(lambda _, context: world.note_stray(context.get("exception")))
        violation = None
        try:
            loop.run_until_complete(_until_failure(world))
        except Violation as error:
            violation = f"{error}\n{log.last}".strip()
        except Exception:
            violation = f"{traceback.format_exc()}\n{log.last}".strip()
        finally:
            _end_all(loop)
    digest = hashlib.sha256("\n".join(world.trace).encode())
    for path in world.host.disk.paths():
        digest.update(path.encode() + world.host.disk.content(path))
    begun = world.ledger.transactions.values()
    committed = sum(one.outcome == "commit" for one in begun)
    return Outcome(seed, violation, digest.hexdigest(), world.trace, len(begun), committed, world.restarts)


async def _until_failure(world: World) -> None:
    body = world.loop.create_task(world.live())
    await asyncio.wait([body, world.failed], return_when=asyncio.FIRST_COMPLETED)
    if world.failed.done():
        body.cancel()
        await asyncio.wait([body])
        world.failed.result()
    world.failed.cancel()
    body.result()


def _end_all(loop: VirtualTimeLoop) -> None:
    # What is left waits for brokers that are dead. Nobody sees in which order it ends.
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left))
    loop.close()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A run is over before there is much garbage, and looking for it takes a sixth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _broker_log() -> Iterator[BrokerLog]:
    """Keep thousands of expected warnings to ourselves."""
    logger, log = logging.getLogger("semel.broker"), BrokerLog()
    before = (logger.propagate, logger.level)
    logger.addHandler(log)
    logger.propagate = False
    logger.setLevel(logging.ERROR)
    try:
        yield log
    finally:
        logger.removeHandler(log)
        logger.propagate, level = before
        logger.setLevel(level)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m semel.verify.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to try")
    parser.add_argument("--from", type=int, default=1, dest="first", help="the first of them")
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument(
        "--transactions", type=int, help="so many in each seed at least, and Semel's own client takes part in them"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="how many processes share the seeds (default: all cores)"
    )
    parser.add_argument("--thorough", action="store_true", help="read all logs anew after every event (slow)")
    parser.add_argument("--trace", action="store_true", help="print every event")
    options = parser.parse_args(arguments)
    seeds = range(options.first, options.first + options.seeds) if options.seed is None else [options.seed]
    run = partial(run_briefly, options.transactions, options.thorough, options.trace)
    report = _Report(options, len(seeds))
    try:
        for outcome in run_all(run, seeds, options.jobs):
            report.take(outcome)
    except KeyboardInterrupt:
        report.progress()
        print("stopped", file=sys.stderr)
        return 130
    return 1 if report.failures else 0


class _Report:
    """Tells of one seed after the other, in their order, whoever has run them."""

    def __init__(self, options: argparse.Namespace, count: int) -> None:
        self.failures = 0
        self._options = options
        self._count = count
        self._done = self._transactions = 0
        self._started = time.monotonic()

    def take(self, outcome: Outcome) -> None:
        self._done += 1
        self._transactions += outcome.transactions
        if self._options.trace:
            print("\n".join(outcome.trace))
        if outcome.violation is not None:
            self.failures += 1
            size = "" if self._options.transactions is None else f" --transactions {self._options.transactions}"
            print(f"seed {outcome.seed}: {outcome.violation}", file=sys.stderr)
            print(
                f"run it again: python -m semel.verify.simulation --seed {outcome.seed}{size} --trace",
                file=sys.stderr,
                flush=True,
            )
        if self._done % 100 == 0 or self._done == self._count:
            self.progress()

    def progress(self) -> None:
        spent_s = time.monotonic() - self._started
        print(
            f"{self._done} seeds, {self._transactions:,} transactions, {self.failures} failures, {spent_s:.0f} s, "
            f"{3600 * self._done / max(spent_s, 0.001):,.0f} seeds an hour",
            flush=True,
        )


def run_briefly(transactions: int | None, thorough: bool, trace: bool, seed: int) -> Outcome:
    """One run, with its trace only where it is asked for: it would have to be brought over from another process."""
    outcome = run_seed(seed, transactions, thorough=thorough)
    if not trace:
        outcome.trace.clear()
    return outcome


if __name__ == "__main__":
    sys.exit(main())
