"""What must hold for a transaction coordinator, told by watching its records and answers from outside.

The model knows no rule of epochs or states of its own beyond these: it keeps who was given which identity, what was
decided, and what is open, and says when a record or an answer contradicts what came before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from coordinator_driver import Answer, Driver
from kio.schema.errors import ErrorCode

from semel.core.transactions import ProducerIdentity, TopicPartition, TransactionMetadata, TransactionStatus

S = TransactionStatus
NOTHING = ProducerIdentity(-1, -1)
FOLLOWS = {
    S.EMPTY: {S.EMPTY, S.ONGOING, S.PREPARE_ABORT},
    S.ONGOING: {S.ONGOING, S.PREPARE_COMMIT, S.PREPARE_ABORT},
    S.PREPARE_COMMIT: {S.COMPLETE_COMMIT},
    S.PREPARE_ABORT: {S.COMPLETE_ABORT},
    S.COMPLETE_COMMIT: {S.EMPTY, S.ONGOING, S.PREPARE_ABORT},
    S.COMPLETE_ABORT: {S.EMPTY, S.ONGOING, S.PREPARE_ABORT},
}
ERRORS = {
    "init": {ErrorCode.concurrent_transactions, ErrorCode.producer_fenced},
    "add": {
        ErrorCode.concurrent_transactions,
        ErrorCode.producer_fenced,
        ErrorCode.invalid_producer_id_mapping,
        ErrorCode.invalid_txn_state,  # to the owner of a kept transaction
    },
    "end": {
        ErrorCode.concurrent_transactions,
        ErrorCode.producer_fenced,
        ErrorCode.invalid_producer_id_mapping,
        ErrorCode.invalid_txn_state,
    },
}


@dataclass(frozen=True)
class Request:
    """One request of one client, as it can be sent again."""

    kind: Literal["init", "add", "end"]
    agent: str
    transactional_id: str
    identity: ProducerIdentity = NOTHING
    partitions: frozenset[TopicPartition] = frozenset()
    committed: bool = False
    client_version: int = 0
    two_phase: bool = False
    keep_prepared: bool = False

    def send(self, driver: Driver) -> Answer:
        name = self.transactional_id
        if self.kind == "init":
            return driver.init(
                self.identity,
                transactional_id=name,
                timeout_ms=1_000,
                two_phase=self.two_phase,
                keep_prepared=self.keep_prepared,
            )
        version = self.client_version
        if self.kind == "add":
            return driver.add(self.identity, self.partitions, transactional_id=name, client_version=version)
        return driver.end(self.identity, committed=self.committed, transactional_id=name, client_version=version)


@dataclass
class Model:
    """Watches one driver."""

    driver: Driver
    owners: dict[ProducerIdentity, str] = field(default_factory=dict[ProducerIdentity, str])
    """To whom each identity was given, whether or not the answer arrived."""
    producer_ids: set[int] = field(default_factory=set[int])
    created_by: dict[str, Request | None] = field(default_factory=dict[str, "Request | None"])
    """What made each transactional id known, first or after it was forgotten."""
    decided: dict[str, bool] = field(default_factory=dict[str, bool])
    """The last outcome that was logged, per transactional id."""
    open_since_ms: dict[str, int] = field(default_factory=dict[str, int])
    last_answered: dict[str, tuple[Request, Answer]] = field(default_factory=dict[str, tuple[Request, Answer]])
    """The last request that succeeded, while nothing else has been logged for its id since."""
    sending: Request | None = None

    def __post_init__(self) -> None:
        self.driver.observe = self.watch

    def watch(self, before: TransactionMetadata | None, after: TransactionMetadata) -> None:
        """A record is about to be replayed."""
        name = after.transactional_id
        self._watch_identity(before, after)
        if before is None:
            self.created_by[name] = self.sending
        assert after.status in (FOLLOWS[before.status] if before else {S.EMPTY})
        if self.sending and self.sending.kind != "init":
            assert before is not None
            assert before.owner == self.sending.identity, "only the owner of the present epoch may write"
            assert self.owners[before.owner] == self.sending.agent
        if after.status is S.ONGOING:
            self._watch_open(before, after)
        elif after.status in (S.PREPARE_COMMIT, S.PREPARE_ABORT):
            assert before is not None
            assert after.partitions == before.partitions, "each partition must get its marker"
            if self.sending is None or self.sending.kind == "init":
                assert after.producer_epoch > before.producer_epoch, (
                    "an abort by the coordinator shuts the producer out"
                )
            assert after.producer_id == before.producer_id, "the marker is of the producer that wrote the records"
            if before.is_kept:
                assert after.producer_epoch == before.producer_epoch + 1, "and shuts it out"
            self.open_since_ms.pop(name, None)
            self.decided[name] = after.status is S.PREPARE_COMMIT
        elif after.status in (S.COMPLETE_COMMIT, S.COMPLETE_ABORT):
            assert self.decided[name] is (after.status is S.COMPLETE_COMMIT), "a decided outcome never changes"
            return
        self.last_answered.pop(name, None)

    def _watch_open(self, before: TransactionMetadata | None, after: TransactionMetadata) -> None:
        """A transaction has begun, grown, or been taken over as it is."""
        name, is_init = after.transactional_id, self.sending is not None and self.sending.kind == "init"
        assert is_init == (before is not None and before.status is S.ONGOING and after.owner != before.owner) or (
            is_init and after.is_kept
        ), "only InitProducerId changes the owner, and only one that keeps leaves a transaction open"
        if is_init:
            assert before is not None
            kept = (before.identity, before.partitions, before.start_ms)
            assert (after.identity, after.partitions, after.start_ms) == kept, "what is kept stays as it was"
        if after.is_two_phase:
            self.open_since_ms.pop(name, None)
        else:
            self.open_since_ms.setdefault(name, self.driver.now_ms)

    def _watch_identity(self, before: TransactionMetadata | None, after: TransactionMetadata) -> None:
        producer_id, producer_epoch = after.owner
        assert 0 <= producer_epoch <= 32767
        if before is not None and before.owner.producer_id == producer_id:
            assert before.owner.producer_epoch <= producer_epoch <= before.owner.producer_epoch + 1, "epochs only rise"
            return
        assert producer_id not in self.producer_ids, "a producer id is used once"
        self.producer_ids.add(producer_id)
        assert producer_epoch == 0
        assert before is None or before.owner.producer_epoch >= 32766, "a new id only when the epochs are used up"

    def send(self, request: Request) -> Answer:
        self.sending = request
        try:
            answer = request.send(self.driver)
        finally:
            self.sending = None
        self._check(request, answer)
        return answer

    def _check(self, request: Request, answer: Answer) -> None:
        if isinstance(answer, ErrorCode) and answer is not ErrorCode.none:
            assert answer in ERRORS[request.kind], answer
            return
        metadata = self.driver.coordinator.get(request.transactional_id)
        assert metadata is not None
        if request.kind == "add":
            assert metadata.status is S.ONGOING
            assert request.partitions <= metadata.partitions
        if request.kind == "end":
            assert self.decided[request.transactional_id] is request.committed, "never the opposite of what was decided"
        if isinstance(answer, ProducerIdentity) and answer != NOTHING:
            self._grant(request, answer, metadata)
        self.last_answered[request.transactional_id] = (request, answer)

    def _grant(self, request: Request, answer: ProducerIdentity, metadata: TransactionMetadata) -> None:
        is_rotating = metadata.next_producer_id != -1 and not metadata.is_kept
        present = (metadata.next_producer_id, 0) if is_rotating else metadata.owner
        assert answer == present, "an answer is the present identity, never an older one"
        assert answer.producer_epoch < 32767, "32767 is kept for fencing"
        owner = self.owners.setdefault(answer, request.agent)
        assert owner == request.agent, "two owners of one epoch"

    def time_out(self) -> None:
        late = {name for name, since_ms in self.open_since_ms.items() if self.driver.now_ms - since_ms > 1_000}
        next_ms = self.driver.coordinator.next_deadline_ms()
        assert next_ms == (min(self.open_since_ms.values()) + 1_001 if self.open_since_ms else None)
        assert set(self.driver.time_out()) == late
        assert not late & set(self.open_since_ms)

    def expire(self) -> None:
        unfinished = {metadata.transactional_id for metadata in self.driver.coordinator.unfinished()}
        busy = set(self.open_since_ms) | unfinished
        for name in self.driver.expire():
            assert name not in busy
            self.decided.pop(name, None)
            self.last_answered.pop(name, None)
