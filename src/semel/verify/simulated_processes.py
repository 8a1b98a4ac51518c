"""Processes that use Semel's own client inside the simulation: what each life of one does, and how it ends.

A process may be killed wherever it waits, and another life follows it; two processes may share a transactional id. What
the client tells them goes into the ledger, where it is held against the logs.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Protocol

from kio.schema.errors import ErrorCode

from semel.client.cluster import Cluster
from semel.client.producer import Producer
from semel.client.sender import Stored
from semel.client.settings import parse_config
from semel.client.transaction_owner import Outcome
from semel.client.transaction_state import State
from semel.errors import Fenced, InvalidState, SemelError, TransactionAborted
from semel.verify.simulated_network import Network
from semel.verify.simulated_sockets import SimulatedMachine
from semel.verify.simulation_invariants import Checker
from semel.verify.simulation_ledger import Ledger, TopicPartition, Transaction, Violation
from semel.verify.virtual_time import VirtualTimeLoop

_GAPS = (ErrorCode.out_of_order_sequence_number, ErrorCode.unknown_producer_id)
_TIMESTAMP_MS = 1_700_000_000_000


class Surroundings(Protocol):
    """What a process sees of the world."""

    network: Network
    ledger: Ledger
    checker: Checker
    loop: VirtualTimeLoop
    power_cuts: int
    upheavals: int
    """How often leaders may have forgotten what a producer sent: for its idleness, or by a restart.

    A snapshot of the producers, as Kafka has it, holds the last batch of each only.
    """

    def elapsed_ms(self) -> float: ...

    def note(self, line: str) -> None: ...

    def wants_more(self) -> bool:
        """Whether transactions are still to be begun."""
        ...

    def is_copied(self, group_id: str) -> bool:
        """Whether a group has nothing left to copy."""
        ...

    @property
    def is_healing(self) -> bool: ...

    @property
    def is_over(self) -> bool: ...


class Process:
    """Life after life of one program, until it has nothing left to do."""

    def __init__(self, world: Surroundings, name: str, seed: int) -> None:
        self.world = world
        self.name = name
        self.chance = random.Random(seed)
        self.lives = self._upheavals = 0
        self._machine: SimulatedMachine | None = None

    @property
    def machine(self) -> SimulatedMachine:
        assert self._machine is not None, "only a living process asks"
        return self._machine

    async def run(self) -> None:
        loop = self.world.loop
        while not self.is_done():
            self.lives += 1
            self._upheavals = self.world.upheavals
            machine = self._machine = SimulatedMachine(
                self.world.network, self.name, lambda: self.world.elapsed_ms() / 1000, self._live
            )
            death = None
            if self.chance.random() < 0.3 and not self.world.is_healing:
                death = loop.call_later(self.chance.random() * 4, self._kill, machine)
            await machine.run()
            if death is not None:
                death.cancel()
            # One that was fenced for its successor does not come back at once, or the two would do nothing else.
            await asyncio.sleep(self.chance.choice((0.05, 0.3, 1)))

    def _kill(self, machine: SimulatedMachine) -> None:
        if not self.world.is_healing:
            self.world.note(f"{self.name} is killed")
            machine.thread.kill()

    def _live(self) -> None:
        try:
            self.live()
        except SemelError as error:
            self.note_failure("its process", error)

    def note_failure(self, what: str, error: SemelError) -> None:
        if isinstance(error, InvalidState):
            raise Violation(f"{self.name} did nothing illegal, and its client says: {error}") from error
        if getattr(error, "code", None) in _GAPS and self._upheavals == self.world.upheavals:
            raise Violation(f"{self.name} has left a gap of its own making: {error}") from error
        self.world.note(f"{self.name}: {what} fails with {error!r}")

    def pause(self, ms: float) -> None:
        self.machine.sleep(ms * (0.5 + self.chance.random()) / 1000)

    def settings(self) -> dict[str, object]:
        """Everything shorter than usual, so that every limit is met within a run."""
        chance = self.chance
        return {
            "bootstrap.servers": chance.choice(("broker:9092", "127.0.0.1:9092")),
            "client.id": self.name,
            "request.timeout.ms": 900,
            "socket.connection.setup.timeout.ms": 400,
            "retry.backoff.ms": 20,
            "retry.backoff.max.ms": 200,
            "default.api.timeout.ms": chance.choice((500, 3_000, 6_000)),
            "metadata.max.age.ms": 10_000,
        }

    def make_cluster(self) -> Cluster:
        return self.machine.make_cluster(parse_config(self.settings()).client)

    # What each program does.

    def is_done(self) -> bool:
        raise NotImplementedError

    def live(self) -> None:
        """One life, in blocking code. Ends by returning, by a SemelError, or killed."""
        raise NotImplementedError


class Writing(Process):
    """A process with a producer of its own."""

    _is_clean = True
    """Whether all that was sent so far was also waited for."""

    def make_producer(self, **more: object) -> Producer:
        machine, self._is_clean = self.machine, True
        settings = {
            **self.settings(),
            "delivery.timeout.ms": 8_000,
            "batch.size": self.chance.choice((120, 100_000)),
            "max.in.flight.requests.per.connection": self.chance.randint(1, 5),
            **more,
        }
        return Producer(
            settings,
            clock=machine.clock,
            sleep=machine.sleep,
            make_cluster=machine.make_cluster,
            start_thread=None,  # a simulation is deterministic
        )

    def send(self, producer: Producer, written: dict[str, TopicPartition], value: str, where: TopicPartition) -> None:
        was_clean, self._is_clean = self._is_clean, False
        key = bytes(self.chance.choice((0, 0, 0, 150)))  # so that of two batches the smaller may fit on a full disk
        producer.send(where[0], value.encode(), key=key, partition=where[1], timestamp_ms=_TIMESTAMP_MS)
        written[value], self._is_clean = where, was_clean

    def flush(self, producer: Producer, written: dict[str, TopicPartition]) -> None:
        """Flush, and see whether each record is where the client says."""
        power_cuts, was_clean, self._is_clean = self.world.power_cuts, self._is_clean, False
        stored: dict[TopicPartition, list[Stored]] = {}
        for one in producer.flush():
            stored.setdefault((one.topic, one.partition), []).append(one)
        self._is_clean = True
        if not was_clean:
            return  # among them may be some of before, which were not waited for
        for where in dict.fromkeys(written.values()):
            values = [value for value in written if written[value] == where]
            if sum(one.record_count for one in stored.get(where, ())) != len(values):
                raise Violation(f"{self.name} is told that all is stored: {stored.get(where)} of {values}")
            if power_cuts == self.world.power_cuts and all(one.base_offset >= 0 for one in stored[where]):
                self._check_offsets(where, values, stored[where])

    def _check_offsets(self, where: TopicPartition, values: list[str], stored: list[Stored]) -> None:
        told = [
            one.base_offset + number
            for one in sorted(stored, key=lambda one: one.base_offset)
            for number in range(one.record_count)
        ]
        for value, offset in zip(values, told, strict=True):
            if (place := self.world.checker.places.get(value)) != (where, offset):
                raise Violation(f"{self.name} is told that {value} is at {where}, offset {offset}; it is at {place}")


class PlainProcess(Writing):
    """Writes idempotently, without transactions."""

    def __init__(
        self, world: Surroundings, name: str, seed: int, partitions: Sequence[TopicPartition], rounds: int
    ) -> None:
        super().__init__(world, name, seed)
        self._partitions = partitions
        self._rounds_left = rounds
        self._last_number = 0

    def is_done(self) -> bool:
        return self._rounds_left <= 0

    def live(self) -> None:
        producer = self.make_producer(**{"delivery.timeout.ms": self.chance.choice((950, 8_000))})
        while not self.is_done():
            self._rounds_left -= 1
            self.pause(250)
            power_cuts = self.world.power_cuts
            written: dict[str, TopicPartition] = {}
            try:
                for where in self.chance.choices(self._partitions, k=self.chance.randint(1, 8)):
                    self._last_number += 1
                    self.send(producer, written, f"{self.name} life {self.lives}/{self._last_number}", where)
                self.flush(producer, written)
            except SemelError as error:  # some are stored and some are not; the producer goes on
                self.note_failure(f"to write {list(written)[:1]} and more", error)
                continue
            if power_cuts == self.world.power_cuts:
                self.world.ledger.plain.update(written)
        producer.close()


class TransactionalProcess(Writing):
    """Writes transaction after transaction, and asks what became of each."""

    def __init__(
        self, world: Surroundings, name: str, seed: int, transactional_id: str, partitions: Sequence[TopicPartition]
    ) -> None:
        super().__init__(world, name, seed)
        self.transactional_id = transactional_id
        self.transactions = 0
        self.current: Transaction | None = None
        self._partitions = partitions

    def is_done(self) -> bool:
        return not self.world.wants_more()

    def live(self) -> None:
        producer = self.begin_life()
        while not self.is_done():
            self.pause(40)
            if not self.transact(producer):
                return
        producer.close()

    def begin_life(self) -> Producer:
        timeout_ms = self.chance.choice((1_500, 4_000, 60_000))
        more = {"transactional.id": self.transactional_id, "transaction.timeout.ms": timeout_ms}
        producer = self.make_producer(**more)
        self.claim(producer)
        return producer

    def claim(self, producer: Producer) -> None:
        owner = f"{self.name} life {self.lives}"
        self.world.ledger.claim_identity(self.transactional_id, *producer.identity, owner)

    def fill(self, producer: Producer, transaction: Transaction, written: dict[str, TopicPartition]) -> None:
        """What one transaction is to hold."""
        wheres = self.chance.sample(self._partitions, self.chance.randint(1, min(3, len(self._partitions))))
        for number in range(self.chance.randint(1, 7)):
            self.send(producer, written, f"{transaction.key}/{number}", self.chance.choice(wheres))

    # The course of a transaction. Each of these returns whether this producer can go on.

    def transact(self, producer: Producer) -> bool:
        self.current = None
        try:
            producer.begin()
        except SemelError as error:
            self.note_failure("to begin", error)
            return self._check_the_dead(producer) if producer.state is State.DEAD else True
        self.claim(producer)
        self.transactions += 1
        self._is_clean = True
        transaction = self.current = self.world.ledger.begin(f"{self.name}.{self.transactions}")
        written: dict[str, TopicPartition] = {}
        try:
            self.fill(producer, transaction, written)
            if self.chance.random() < 0.4:
                self.flush(producer, written)
            if self.chance.random() < 0.05:
                self.pause(2_500)  # its time-out may pass, and another take over
            if self.chance.random() < 0.15:
                return self._abort(producer, transaction)
            self.world.ledger.request_commit(transaction, written)
            producer.commit(timeout_ms=self.chance.choice((None, 300)))
        except SemelError as error:
            self.note_failure(transaction.key, error)
            return self._after_failure(producer, transaction, error)
        self._told(producer, transaction, Outcome.COMMITTED)
        return True

    def _told(self, producer: Producer, transaction: Transaction, outcome: Outcome) -> None:
        self.world.note(f"{transaction.key} {outcome.value}")
        self.world.ledger.answer(transaction, "commit" if outcome is Outcome.COMMITTED else "abort")
        if producer.state is not State.DEAD:
            self.claim(producer)

    def _after_failure(self, producer: Producer, transaction: Transaction, error: SemelError) -> bool:
        if isinstance(error, Fenced | TransactionAborted):  # both say that nothing of it will be seen
            self.world.ledger.answer(transaction, "abort")
        if producer.state is State.DEAD or isinstance(error, Fenced):
            return self._check_the_dead(producer)
        if producer.state is State.UNKNOWN:
            return self._resolve(producer, transaction)
        return self._abort(producer, transaction)

    def _abort(self, producer: Producer, transaction: Transaction) -> bool:
        for _ in range(3):
            try:
                producer.abort()
            except SemelError as error:
                self.note_failure(f"the abort of {transaction.key}", error)
                if producer.state is State.DEAD:
                    return self._check_the_dead(producer)
                self.pause(100)
            else:
                self._told(producer, transaction, Outcome.ABORTED)
                return True
        return False

    def _resolve(self, producer: Producer, transaction: Transaction) -> bool:
        for _ in range(4):
            try:
                outcome = producer.resolve()
            except SemelError as error:
                self.note_failure(f"to resolve {transaction.key}", error)
                if producer.state is State.DEAD:
                    return self._check_the_dead(producer)
                if producer.state is not State.UNKNOWN:
                    raise Violation(f"{transaction.key} is still unknown, and its producer {producer.state}") from error
                self.pause(300)
            else:
                self._told(producer, transaction, outcome)
                return self._check_the_dead(producer) if producer.state is State.DEAD else True
        return False

    def _check_the_dead(self, producer: Producer) -> bool:
        """A fenced producer tries to go on all the same: nothing of it may get through."""
        for attempt in (
            producer.begin,
            lambda: producer.send(self._partitions[0][0], f"{self.name}.fenced/0".encode()),
            producer.flush,
            producer.commit,
            producer.abort,
        ):
            try:
                attempt()
            except SemelError:
                continue
            raise Violation(f"{self.name} was fenced, and goes on")
        return False
