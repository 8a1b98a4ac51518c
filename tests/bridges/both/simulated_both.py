"""A database and a Kafka in memory, for the real course of a block: every call may die, lose its answer, or stop.

The coordinator is the embedded broker's own (`semel.core.transactions`). The log, the leader's fencing and the database
are a few lines each, as obvious as they can be. What is not here: sockets, encoding, SQL, several coordinators.

What happens at each call is drawn from the seed: nothing, a crash, an answer that is lost (the call may have been
carried out, now or later), a timeout of Kafka's transaction, or a pause in which another program of the same name
lives a whole life. The paused one goes on afterwards as a zombie.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from simulated_database import Database, SimulatedStore
from simulated_kafka import NAME, PARTITIONS, Kafka, SimulatedInquiry, SimulatedProducer

from semel.bridges.both.course import block, finish_by_hand
from semel.bridges.both.decision import StoredBatch
from semel.bridges.both.recovery import Step
from semel.errors import InvalidState, SemelError


class Crash(BaseException):
    """kill -9."""


WEIGHTS = {
    "database commit": ("lost, done", "lost, not done", "failed"),
    "reopen": ("failed",),
    "commit": ("unreachable", "lost, not done", "lost, later", "lost, done"),
    "end": ("lost, later", "unreachable"),
    "resolve": ("unreachable",),
    "end prepared": ("unreachable", "lost, done"),
}


class World:
    """One run: programs that place orders, one after the other or one inside another's pause."""

    def __init__(self, seed: int, protocol: int, *, two_phase: bool = False) -> None:
        self.rng = random.Random(seed)
        self.kafka = Kafka(protocol, two_phase=two_phase)
        self.database = Database()
        self.is_quiet = False
        self.events: list[str] = []
        self._depth = 0
        self._lives = 0
        self._next_order = 0
        self.by_hand: set[Step | None] = set()
        self.torn: list[int] = []
        """Orders whose record was visible while their row was not there."""

    def happen(self, where: str) -> str:
        """What goes wrong at this call, if anything."""
        self.look()
        if self.is_quiet:
            return "nothing"
        drawn = self.rng.random()
        if drawn < 0.04:
            self.note(f"crash at {where}")
            raise Crash
        if drawn < 0.09:
            self.note(f"timeout at {where}")
            self.kafka.pass_timeout()
        elif drawn < 0.13:
            self.kafka.deliver_late()
        elif drawn < 0.17 and self._depth < 2:
            self.note(f"pause at {where}")
            self.live()
            self.note("wakes")
        if where in WEIGHTS and self.rng.random() < 0.2:
            what = self.rng.choice(WEIGHTS[where])
            self.note(f"{where}: {what}")
            return what
        return "nothing"

    def life(self) -> Callable[[str], str]:
        """What happens at the calls of one program. Once it is dead, nothing that it tries is done any more."""
        is_dead = False

        def happen(where: str) -> str:
            nonlocal is_dead
            if is_dead:
                raise Crash
            try:
                return self.happen(where)
            except Crash:
                is_dead = True
                raise

        return happen

    def note(self, what: str) -> None:
        self.events.append(f"{'  ' * self._depth}{what}")

    def look(self) -> None:
        """An outsider, at any time: no record may be visible whose row is not there."""
        visible = {order for partition in self.kafka.partitions for order in partition.committed()}
        self.torn += sorted(visible - self.database.tables.orders)

    def live(self) -> None:
        """The life of one program: some orders, until it ends or dies. Or somebody recovers by hand."""
        if not self.is_quiet and self.rng.random() < 0.2:
            self.recover_by_hand()
            return
        self._depth += 1
        self._lives += 1
        token = f"program {self._lives}"
        stores: list[SimulatedStore] = []
        happen = self.life()
        try:
            producer = SimulatedProducer(self.kafka, happen, token)
            for _ in range(self.rng.randint(1, 3)):
                store = SimulatedStore(self.database, happen)
                stores.append(store)
                self.place(store, producer, happen)
        except Crash:
            pass
        except SemelError as error:
            self.note(f"{token} ends: {type(error).__name__}")
        finally:
            for store in stores:
                store.die()
            self._depth -= 1

    def place(self, store: SimulatedStore, producer: SimulatedProducer, happen: Callable[[str], str]) -> None:
        self._next_order += 1
        order = self._next_order
        self.note(f"{producer.token} begins order {order}")
        batches = [StoredBatch("t", index, 1, str(order).encode()) for index in range(PARTITIONS)]
        with block(store, producer, lambda: batches):
            store.insert(order)
            if happen("in the block") == "nothing" and not self.is_quiet and self.rng.random() < 0.1:
                raise InvalidState("the user's own error")

    def recover_by_hand(self) -> None:
        self._depth += 1
        happen = self.life()
        store = SimulatedStore(self.database, happen)
        try:
            done = finish_by_hand(store, SimulatedInquiry(self.kafka, happen), NAME)
            self.note(f"by hand: {None if done is None else done.name}")
            self.by_hand.add(done)
        except Crash:
            self.note("dies")
        except SemelError as error:
            self.note(f"by hand: {type(error).__name__}")
        finally:
            store.die()
            self._depth -= 1

    def end_in_peace(self) -> None:
        """Late requests arrive, and a last program lives whose calls all work. It recovers before it begins."""
        self.kafka.deliver_late()
        self.is_quiet = True
        self.live()
        self.kafka.deliver_late()
        self.look()

    def verdict(self) -> list[str]:
        """What an outsider finds wrong at the end."""
        found = [f"order {order} was visible in Kafka without its row" for order in self.torn]
        tables = self.database.tables
        for index, partition in enumerate(self.kafka.partitions):
            visible = partition.committed()
            if visible != self.database.committed:
                found.append(f"partition {index} has {visible}, and the database {self.database.committed}")
        if tables.decision is not None or tables.records:
            found.append("a decision or records are left over")
        return found
