"""A database and a Kafka in memory, for the real course of a block: every call may die, lose its answer, or stop.

The coordinator is the embedded broker's own (`semel.core.transactions`). The log, the leader's fencing and the database
are a few lines each, as obvious as they can be. What is not here: sockets, encoding, SQL, several coordinators.

What happens at each call is drawn from the seed: nothing, a crash, an answer that is lost (the call may have been
carried out, now or later), a timeout of Kafka's transaction, or a pause in which another program of the same name
lives a whole life. The paused one goes on afterwards as a zombie.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from semel.bridges.both.course import block
from semel.bridges.both.decision import Decision, Place, StoredBatch
from semel.bridges.both.kafka_side import KafkaSide
from semel.bridges.both.recovery import EndAnswer, MarkerSeen, OwnerSeen, lowest_epoch, read_marker
from semel.bridges.both.store import CommitLost, Row, Store, overtaken
from semel.client.ownership import Owner, ProducerIdentity
from semel.core.refusal import Refused
from semel.core.transactions import Decision as CoreDecision
from semel.core.transactions import TransactionCoordinator, TransactionSettings, marker_of
from semel.errors import (
    CommitUnknown,
    ConnectionLost,
    DatabaseError,
    Fenced,
    InvalidState,
    RequestTimedOut,
    SemelError,
    TransactionAborted,
)
from semel.records.control import ControlMarker

NAME = "shop"
TIMEOUT_MS = 1_000
PARTITIONS = 2


class Crash(BaseException):
    """kill -9."""


# -- Kafka ---------------------------------------------------------------------------------------------------------


@dataclass
class Entry:
    """A record of an order, or a marker."""

    producer_id: int
    producer_epoch: int
    order: int = 0
    decision: str = ""
    marker: str = ""


@dataclass
class Partition:
    entries: list[Entry] = field(default_factory=list[Entry])
    start: int = 0
    """Retention has deleted what is before it."""

    def committed(self) -> list[int]:
        """What a reader of committed records sees, with markers that are not written yet as open transactions."""
        seen: list[int] = []
        open_orders: dict[int, list[int]] = {}
        for entry in self.entries:
            if not entry.marker:
                open_orders.setdefault(entry.producer_id, []).append(entry.order)
                continue
            orders = open_orders.pop(entry.producer_id, [])
            seen += orders if entry.marker == "commit" else []
        return seen


class Kafka:
    """One coordinator, some partitions, and requests that arrive late."""

    def __init__(self, protocol: int) -> None:
        self.protocol = protocol
        self.now_ms = 0
        self.coordinator = TransactionCoordinator(TransactionSettings(transaction_version=protocol))
        self.partitions = [Partition() for _ in range(PARTITIONS)]
        self.late: list[Callable[[], None]] = []
        self._next_producer_id = 0

    def new_producer_id(self) -> int:
        self._next_producer_id += 1
        return self._next_producer_id

    def carry_out(self, decision: CoreDecision[Any]) -> Any:
        """Log what was decided, write markers, complete."""
        if decision.record is not None:
            self.coordinator.replay(decision.record)
        if decision.needs_markers:
            assert decision.record is not None
            marker = marker_of(decision.record)
            for _, index in decision.record.partitions:
                kind = "commit" if marker.committed else "abort"
                self.partitions[index].entries.append(Entry(marker.producer_id, marker.producer_epoch, marker=kind))
            self.coordinator.replay(self.coordinator.decide_complete(NAME, now_ms=self.now_ms).record)  # type: ignore[arg-type]
        if decision.refusal is not None:
            raise Refused(decision.refusal, "again")
        return decision.response

    def init_producer_id(self) -> ProducerIdentity:
        for _ in range(3):
            try:
                found = self.carry_out(
                    self.coordinator.decide_init_producer_id(
                        NAME, TIMEOUT_MS, -1, -1, now_ms=self.now_ms, new_producer_id=self.new_producer_id
                    )
                )
                return ProducerIdentity(*found)
            except Refused as refused:
                if refused.code.name != "concurrent_transactions":
                    raise
        raise AssertionError("InitProducerId does not come to an end")

    def end(self, identity: ProducerIdentity, protocol: int, *, commit: bool) -> ProducerIdentity:
        producer_id, producer_epoch = identity
        found = self.carry_out(
            self.coordinator.decide_end(
                NAME,
                producer_id,
                producer_epoch,
                commit,
                now_ms=self.now_ms,
                client_version=2 if protocol == 2 else 0,
                new_producer_id=self.new_producer_id,
            )
        )
        return ProducerIdentity(*found) if found.producer_id >= 0 else identity

    def append(self, identity: ProducerIdentity, index: int, order: int, decision: str) -> int:
        known = self.coordinator.get(NAME)
        assert known is not None
        partition = self.partitions[index]
        latest = max((e.producer_epoch for e in partition.entries if e.producer_id == identity.producer_id), default=-1)
        if identity.producer_epoch < latest:
            raise _fenced()
        try:
            self.carry_out(
                self.coordinator.decide_add_partitions(
                    NAME,
                    identity.producer_id,
                    identity.producer_epoch,
                    [("t", index)],
                    now_ms=self.now_ms,
                    client_version=2 if self.protocol == 2 else 0,
                )
            )
        except Refused as refused:
            raise _fenced() from refused
        partition.entries.append(Entry(*identity, order, decision))
        return len(partition.entries) - 1

    def pass_timeout(self) -> None:
        self.now_ms += TIMEOUT_MS + 1
        for decision in self.coordinator.decide_timeouts(now_ms=self.now_ms, new_producer_id=self.new_producer_id):
            self.carry_out(decision)

    def deliver_late(self) -> None:
        late, self.late = self.late, []
        for request in late:
            request()


def _fenced() -> Fenced:
    return Fenced("Another producer has taken over.", is_fatal=True)


# -- the database --------------------------------------------------------------------------------------------------


@dataclass
class Tables:
    orders: frozenset[int] = frozenset()
    records: frozenset[tuple[str, int, StoredBatch]] = frozenset()
    claim: str | None = None
    decision: str | None = None


class Database:
    """What is committed, and the lock of the one row that matters."""

    def __init__(self) -> None:
        self.tables = Tables()
        self.committed: list[int] = []
        """Orders as they were committed."""
        self.locked_by: SimulatedStore | None = None


class SimulatedStore(Store):
    """Read committed, as a Postgres with one row lock. A lock that another holds is an error at once."""

    kind = "postgres"

    def __init__(self, database: Database, happen: Callable[[str], str]) -> None:
        self.database = database
        self._happen = happen
        self._orders: set[int] | None = None
        self._records: set[tuple[str, int, StoredBatch]] = set()
        self._changes: dict[str, str | None] = {}
        self._dropped_records: set[str] = set()
        self.is_dead = False

    place = "here"  # type: ignore[assignment]

    def check(self) -> None:
        self._alive()

    def make_tables(self, *, create: bool) -> None:
        pass

    def _alive(self) -> None:
        if self.is_dead:
            raise DatabaseError("The connection is gone.", is_transient=True)

    def insert(self, order: int) -> None:
        self._alive()
        assert self._orders is not None
        self._orders.add(order)

    def begin(self) -> None:
        self._alive()
        self._orders, self._records, self._changes, self._dropped_records = set(), set(), {}, set()

    def end_block(self) -> None:
        self._alive()

    def _lock(self) -> None:
        if self.database.locked_by not in (None, self):
            raise DatabaseError("Another transaction holds the row.", is_transient=True)
        self.database.locked_by = self

    def _apply(self) -> None:
        tables = self.database.tables
        assert self._orders is not None
        self.database.committed += sorted(self._orders)
        records = frozenset(r for r in tables.records | self._records if r[0] not in self._dropped_records)
        self.database.tables = replace(tables, orders=tables.orders | self._orders, records=records, **self._changes)
        self._release()

    def _release(self) -> None:
        self._orders = None
        if self.database.locked_by is self:
            self.database.locked_by = None

    def die(self) -> None:
        """The server notices that the connection is gone, and rolls back."""
        self.is_dead = True
        self._release()

    def commit(self) -> None:
        self._alive()
        match self._happen("database commit"):
            case "lost, done":
                self._apply()
                self.is_dead = True
                raise CommitLost("lost")
            case "lost, not done":
                self.die()
                raise CommitLost("lost")
            case "failed":
                self._release()
                raise DatabaseError("A constraint failed at the end.")
            case _:
                self._apply()

    def rollback(self, reason: BaseException | None) -> None:
        self._release()

    def reopen(self) -> Store:
        if self._happen("reopen") == "failed":
            raise DatabaseError("No connection.", is_transient=True)
        return SimulatedStore(self.database, self._happen)

    def close(self) -> None:
        self._release()

    def look(self, name: str) -> Row | None:
        tables = self.database.tables
        if tables.claim is None:
            return None
        return Row(tables.claim, None if tables.decision is None else Decision.decode(tables.decision))

    def keep(self, decision_id: str, batches: Sequence[StoredBatch]) -> None:
        self._records = {(decision_id, number, batch) for number, batch in enumerate(batches)}

    def decide(self, name: str, token: str, decision: Decision) -> None:
        self._alive()
        self._lock()
        tables = self.database.tables
        if tables.claim != token or tables.decision is not None:
            raise overtaken(name)
        self._changes = {"decision": decision.encode()}
        self._happen("decision written")

    @contextmanager
    def _own(self) -> Iterator[None]:
        self.begin()
        try:
            self._lock()
            yield
        except BaseException:
            self._release()
            raise
        self.commit()

    def claim(self, name: str, token: str) -> Decision | None:
        with self._own():
            self._changes = {"claim": token}
            row = self.look(name)
        return None if row is None else row.decision

    def look_locked(self, name: str) -> Row | None:
        with self._own():
            return self.look(name)

    def batches(self, decision_id: str) -> list[StoredBatch]:
        found = sorted((number, batch) for kept, number, batch in self.database.tables.records if kept == decision_id)
        return [batch for _, batch in found]

    def decide_again(self, name: str, token: str, old: Decision, new: Decision) -> None:
        with self._own():
            tables = self.database.tables
            if tables.claim != token or tables.decision != old.encode():
                raise overtaken(name)
            self._changes = {"decision": new.encode()}

    def forget(self, name: str, decision: Decision) -> None:
        with self._own():
            if self.database.tables.decision == decision.encode():
                self._changes = {"decision": None}
                self._dropped_records = {decision.id}

    def _execute(self, statement: str, *values: object) -> Any:
        raise NotImplementedError

    _execute_many = _has_tables = _begin_own = _execute  # type: ignore[assignment]


# -- a producer ----------------------------------------------------------------------------------------------------


class SimulatedProducer(KafkaSide):
    """As Semel's producer behaves: an identity for each transaction, three outcomes, no commit on a guess."""

    name = NAME
    cluster_id = "c"

    def __init__(self, kafka: Kafka, happen: Callable[[str], str], token: str) -> None:
        self.kafka = kafka
        self.token = token
        self.places: set[str] = set()
        self.state = "ready"
        self._happen = happen
        self._ids = 0
        self.identity = kafka.init_producer_id()

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    def new_id(self) -> str:
        self._ids += 1
        return f"{self.token}-{self._ids}"

    def _renew(self) -> None:
        """The next identity, unless another producer has come."""
        known = self.kafka.coordinator.get(NAME)
        assert known is not None
        if tuple(known.identity) not in (tuple(self.identity), tuple(self.identity.following)):
            self.state = "dead"
            raise _fenced()
        self.identity = self.kafka.init_producer_id()
        self.state = "ready"

    def write(self, decision_id: str, batches: Sequence[StoredBatch]) -> Decision:
        if self.state != "ready":
            raise _fenced() if self.state == "dead" else InvalidState(self.state)
        self.state = "open"
        first: dict[int, int] = {}
        try:
            for batch in batches:
                self._happen("write")
                offset = self.kafka.append(self.identity, batch.partition, int(batch.data), decision_id)
                first.setdefault(batch.partition, offset)
        except Fenced:
            self.state = "dead" if self._is_taken_over() else "doomed"
            raise
        places = tuple(Place("t", index, offset) for index, offset in sorted(first.items()))
        return Decision(decision_id, self.cluster_id, self.identity, self.kafka.protocol, places)

    def _is_taken_over(self) -> bool:
        known = self.kafka.coordinator.get(NAME)
        assert known is not None
        return tuple(known.identity) not in (tuple(self.identity), tuple(self.identity.following))

    def commit(self) -> None:
        match self._happen("commit"):
            case "unreachable":
                self.state = "doomed"
                raise ConnectionLost("nothing was sent")
            case "lost, not done":
                self.state = "unknown"
                raise CommitUnknown("lost")
            case "lost, later":
                self.state = "unknown"
                self.kafka.late.append(self._late_end(self.identity))
                raise CommitUnknown("lost")
            case "lost, done":
                self._try_end()
                self.state = "unknown"
                raise CommitUnknown("lost")
            case _:
                pass
        try:
            following = self.kafka.end(self.identity, self.kafka.protocol, commit=True)
        except Refused as refused:
            self.state = "dead" if self._is_taken_over() else "doomed"
            raise TransactionAborted("refused", code=refused.code) from refused
        self.state = "ready"
        if following == self.identity:  # protocol 1: an epoch for each transaction all the same
            self._renew()
        else:
            self.identity = following

    def _try_end(self) -> None:
        self._late_end(self.identity)()

    def _late_end(self, identity: ProducerIdentity) -> Callable[[], None]:
        def arrive() -> None:
            try:
                self.kafka.end(identity, self.kafka.protocol, commit=True)
            except Refused:
                return

        return arrive

    def abort_after(self, error: BaseException) -> None:
        if self.state in ("open", "doomed"):
            try:
                self.settle()
            except SemelError as second:
                error.add_note(str(second))

    def settle(self) -> None:
        if self.state == "dead":
            raise _fenced()
        if self.state == "unknown" and self._happen("resolve") == "unreachable":
            raise RequestTimedOut("no answer")
        if self.state != "ready":
            self._renew()  # InitProducerId aborts what is open

    def check_owner(self) -> None:
        if self._is_taken_over():
            raise _fenced()

    def send_end(self, decision: Decision) -> EndAnswer:
        match self._happen("end"):
            case "lost, later":
                self.kafka.late.append(self._late_end(decision.identity))
                return EndAnswer.UNANSWERED
            case "unreachable":
                return EndAnswer.UNANSWERED
            case _:
                pass
        try:
            self.kafka.end(decision.identity, decision.protocol, commit=True)
        except Refused:
            return EndAnswer.REFUSED
        return EndAnswer.ACCEPTED

    def read_markers(self, decision: Decision) -> MarkerSeen:
        return read_markers(self.kafka, decision)

    def owner(self, decision: Decision) -> Owner | OwnerSeen:
        known = self.kafka.coordinator.get(NAME)
        if known is None:
            return OwnerSeen.UNKNOWN
        return Owner(ProducerIdentity(*known.identity), known.status.title)


def read_markers(kafka: Kafka, decision: Decision) -> MarkerSeen:
    """As the real one: the first marker that can be its, in any partition that was written."""
    seen = MarkerSeen.LOST
    for place in decision.places:
        partition = kafka.partitions[place.partition]
        if place.offset < partition.start:
            continue
        marker = next(
            (
                ControlMarker(e.marker, 0, e.producer_id, e.producer_epoch, offset)  # type: ignore[arg-type]
                for offset, e in enumerate(partition.entries)
                if offset >= place.offset
                and e.marker
                and e.producer_id == decision.identity.producer_id
                and e.producer_epoch >= lowest_epoch(decision)
            ),
            None,
        )
        found = read_marker(decision, marker)
        if found in (MarkerSeen.COMMIT, MarkerSeen.ABORT):
            return found
        if found is MarkerSeen.NOT_YET:
            seen = found
    return seen


# -- the world -----------------------------------------------------------------------------------------------------

WEIGHTS = {
    "database commit": ("lost, done", "lost, not done", "failed"),
    "reopen": ("failed",),
    "commit": ("unreachable", "lost, not done", "lost, later", "lost, done"),
    "end": ("lost, later", "unreachable"),
    "resolve": ("unreachable",),
}


class World:
    """One run: programs that place orders, one after the other or one inside another's pause."""

    def __init__(self, seed: int, protocol: int) -> None:
        self.rng = random.Random(seed)
        self.kafka = Kafka(protocol)
        self.database = Database()
        self.is_quiet = False
        self.events: list[str] = []
        self._depth = 0
        self._lives = 0
        self._next_order = 0
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

    def note(self, what: str) -> None:
        self.events.append(f"{'  ' * self._depth}{what}")

    def look(self) -> None:
        """An outsider, at any time: no record may be visible whose row is not there."""
        visible = {order for partition in self.kafka.partitions for order in partition.committed()}
        self.torn += sorted(visible - self.database.tables.orders)

    def live(self) -> None:
        """The life of one program: some orders, until it ends or dies."""
        self._depth += 1
        self._lives += 1
        token = f"program {self._lives}"
        stores: list[SimulatedStore] = []
        try:
            producer = SimulatedProducer(self.kafka, self.happen, token)
            for _ in range(self.rng.randint(1, 3)):
                store = SimulatedStore(self.database, self.happen)
                stores.append(store)
                self.place(store, producer)
        except Crash:
            pass
        except SemelError as error:
            self.note(f"{token} ends: {type(error).__name__}")
        finally:
            for store in stores:
                store.die()
            self._depth -= 1

    def place(self, store: SimulatedStore, producer: SimulatedProducer) -> None:
        self._next_order += 1
        order = self._next_order
        self.note(f"{producer.token} begins order {order}")
        batches = [StoredBatch("t", index, 1, str(order).encode()) for index in range(PARTITIONS)]
        with block(store, producer, lambda: batches):
            store.insert(order)
            if self.happen("in the block") == "nothing" and not self.is_quiet and self.rng.random() < 0.1:
                raise InvalidState("the user's own error")

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
