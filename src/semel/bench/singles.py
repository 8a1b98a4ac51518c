"""Transactions of one record: Semel beside the Java client, on the same broker, in turns.

Two jobs: to write a record and commit, with a producer alone; and to read a record, write it and commit it with its
offset, with a session. The Java client is a program of its own (`java/OneRecordTransactions.java`, run straight from
its source on the jars of Apache Kafka), with the compiler of a real deployment, and warm before it is measured.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from semel.client.producer import Outcome, Producer
from semel.errors import SemelError
from semel.processes import spawn
from semel.session.session import Session
from semel.testing.apache_kafka import LATEST, kafka_jars
from semel.testing.kafka_node import FULL_SPEED
from semel.testing.maven import java_command

Job = Literal["produce", "copy"]
Timed = Callable[[int], float]
"""Does a job so many times, and tells the seconds that it took."""
Client = Mapping[Job, Timed]

JOBS: Final[tuple[Job, ...]] = ("produce", "copy")
VALUE: Final = b"x" * 100
_PROGRAM: Final = Path(__file__).parent / "java" / "OneRecordTransactions.java"


class JavaClientFailed(SemelError):
    """The Java client's program ended; the message is what it wrote."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    turn: int = 30
    """Transactions in a turn: few, so that a slow moment of the machine falls on all of them."""
    warm_up_turns: int = 30
    turns: int = 40

    @property
    def records(self) -> int:
        """How many each of them reads."""
        return self.turn * (self.warm_up_turns + self.turns)


def measure_rates(clients: Mapping[str, Client], sizes: Sizes) -> dict[tuple[str, Job], float]:
    """Transactions a second by client and job, over all turns after those that warm up."""
    seconds: dict[tuple[str, Job], float] = {(name, job): 0.0 for job in JOBS for name in clients}
    for job in JOBS:
        for turn in range(sizes.warm_up_turns + sizes.turns):
            for name, client in clients.items():
                took_s = client[job](sizes.turn)
                if turn >= sizes.warm_up_turns:
                    seconds[name, job] += took_s
    return {case: sizes.turn * sizes.turns / took_s for case, took_s in seconds.items()}


@contextmanager
def semel_client(bootstrap: str, source: str, target: str) -> Iterator[Client]:
    """A producer and a session of this process."""
    name = f"bench-{time.time_ns()}"
    with (
        Producer(bootstrap_servers=bootstrap, transactional_id=f"{name}-producer") as producer,
        Session(bootstrap=bootstrap, group=name, topics=[source], name=name, transaction_records_max=1) as session,
    ):

        def produce() -> None:
            producer.begin()
            producer.send(target, VALUE, partition=0)
            producer.commit()

        def copy() -> None:
            outcome = None
            while outcome is not Outcome.COMMITTED:
                with session.transaction() as transaction:
                    for row in transaction.rows():
                        assert row.value is not None
                        transaction.send(target, row.value.upper(), key=row.key)
                outcome = transaction.outcome

        yield {"produce": _timed(produce), "copy": _timed(copy)}


def _timed(job: Callable[[], None]) -> Timed:
    def run(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            job()
        return time.perf_counter() - started

    return run


@contextmanager
def java_client(bootstrap: str, source: str, target: str) -> Iterator[Client]:
    """The same of the Java client: it lives until the block ends, so that it stays warm."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="semel-bench-")))
        log = folder / "java.log"
        command = [java_command(), *FULL_SPEED, "-XX:-UsePerfData", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"]
        command += ["-cp", f"{kafka_jars(LATEST)}/*", str(_PROGRAM)]
        command += [bootstrap, f"bench-java-{time.time_ns()}", source, target]
        process = spawn(command, folder=folder, output=log, pipes=True)
        stack.callback(process.wait)
        stack.callback(process.kill)
        assert process.stdin is not None
        assert process.stdout is not None
        to, answers = stack.enter_context(process.stdin), stack.enter_context(process.stdout)

        def ask(job: Job, count: int) -> float:
            try:
                to.write(f"{job} {count}\n".encode())
                to.flush()
                return float(answers.readline())
            except (BrokenPipeError, ValueError):
                raise JavaClientFailed(f"The Java client ended:\n{log.read_text()[-2_000:]}") from None

        yield {"produce": lambda count: ask("produce", count), "copy": lambda count: ask("copy", count)}
