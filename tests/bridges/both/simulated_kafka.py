"""A Kafka in memory: the embedded broker's own coordinator, partitions as lists, and a producer as Semel's behaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from semel.bridges.both.decision import Decision, Place, StoredBatch
from semel.bridges.both.kafka_side import Inquiry, KafkaSide
from semel.bridges.both.recovery import EndAnswer, MarkerSeen, OwnerSeen, lowest_epoch, read_marker
from semel.client.ownership import NOBODY, Owner, ProducerIdentity
from semel.core.refusal import Refused
from semel.core.transactions import Decision as CoreDecision
from semel.core.transactions import TransactionCoordinator, TransactionSettings, marker_of
from semel.errors import (
    CommitUnknown,
    ConnectionLost,
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

    def __init__(self, protocol: int, *, two_phase: bool = False) -> None:
        self.protocol = protocol
        self.two_phase = two_phase
        self.now_ms = 0
        self.coordinator = TransactionCoordinator(
            TransactionSettings(transaction_version=protocol, two_phase_commit=two_phase)
        )
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

    def keep_prepared(
        self, identity: ProducerIdentity = NOBODY, *, two_phase: bool = False
    ) -> tuple[ProducerIdentity, ProducerIdentity | None]:
        decision = self.coordinator.decide_init_producer_id(
            NAME,
            TIMEOUT_MS,
            *identity,
            now_ms=self.now_ms,
            new_producer_id=self.new_producer_id,
            two_phase=two_phase,
            keep_prepared=True,
        )
        found = self.carry_out(decision)
        record = decision.record
        assert record is not None
        return ProducerIdentity(*found), ProducerIdentity(
            *record.identity
        ) if record.status.title == "Ongoing" else None

    def init_producer_id(self, *, two_phase: bool = False) -> ProducerIdentity:
        for _ in range(3):
            try:
                found = self.carry_out(
                    self.coordinator.decide_init_producer_id(
                        NAME,
                        TIMEOUT_MS,
                        -1,
                        -1,
                        now_ms=self.now_ms,
                        new_producer_id=self.new_producer_id,
                        two_phase=two_phase,
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


class SimulatedInquiry(Inquiry):
    """Questions about an earlier transaction, by whoever asks."""

    cluster_id = "c"

    def __init__(self, kafka: Kafka, happen: Callable[[str], str]) -> None:
        self.kafka = kafka
        self._happen = happen

    def _late_end(self, identity: ProducerIdentity) -> Callable[[], None]:
        def arrive() -> None:
            try:
                self.kafka.end(identity, self.kafka.protocol, commit=True)
            except Refused:
                return

        return arrive

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
        self._happen("markers")
        return read_markers(self.kafka, decision)

    def owner(self, decision: Decision) -> Owner | OwnerSeen:
        known = self.kafka.coordinator.get(NAME)
        if known is None:
            return OwnerSeen.UNKNOWN
        return Owner(ProducerIdentity(*known.identity), known.status.title, known.timeout_ms)


class SimulatedProducer(SimulatedInquiry, KafkaSide):
    """As Semel's producer behaves: an identity for each transaction, three outcomes, no commit on a guess."""

    name = NAME

    def __init__(self, kafka: Kafka, happen: Callable[[str], str], token: str) -> None:
        super().__init__(kafka, happen)
        self.token = token
        self.places: set[str] = set()
        self.state = "ready"
        self._ids = 0
        self._is_two_phase = False
        self.prepared: ProducerIdentity | None = None
        if kafka.two_phase:
            self.identity, self.prepared = kafka.keep_prepared()
            known = kafka.coordinator.get(NAME)
            if self.prepared is None or (known is not None and known.is_two_phase):
                return
        self.identity, self.prepared = kafka.init_producer_id(), None

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
        self.identity = self.kafka.init_producer_id(two_phase=self._is_two_phase)
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

    def abort_after(self, error: BaseException) -> None:
        self._happen("abort")
        if self.state in ("open", "doomed"):
            try:
                self.settle()
            except SemelError as second:
                error.add_note(str(second))

    def settle(self) -> None:
        self._happen("settle")
        if self.state == "dead":
            raise _fenced()
        if self.state == "unknown" and self._happen("resolve") == "unreachable":
            raise RequestTimedOut("no answer")
        if self.state != "ready":
            self._renew()  # InitProducerId aborts what is open

    def check_owner(self) -> None:
        self._happen("check owner")
        if self.kafka.two_phase and not self._is_two_phase and self.state == "ready":
            self._become_two_phase()
            return
        if self.prepared is None and self._is_taken_over():
            raise _fenced()

    def _become_two_phase(self) -> None:
        try:
            self.identity, self.prepared = self.kafka.keep_prepared(self.identity, two_phase=True)
        except Refused as refused:
            self.state = "dead"
            raise _fenced() from refused
        self._is_two_phase = True

    def end_prepared(self, decision: Decision | None) -> bool:
        if self.prepared is None:
            return False
        is_decided = decision is not None and decision.identity == self.prepared
        what = self._happen("end prepared")
        if what == "unreachable":
            raise ConnectionLost("nothing was sent")
        try:
            following = self.kafka.end(self.identity, 2, commit=is_decided)
        except Refused as refused:
            self.state = "dead"
            raise _fenced() from refused
        if what == "lost, done":
            raise RequestTimedOut("no answer")
        self.identity, self.prepared = following, None
        return is_decided


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
