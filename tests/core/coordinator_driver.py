"""A coordinator with a log of bytes in front of it, as a broker runs it: decide, append, replay, answer.

Each call returns what the client would see: an error code, or what the success carries. On every call it checks that
deciding changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from kio.schema.errors import ErrorCode

from semel.core.refusal import Refused
from semel.core.transaction_records import (
    TransactionTombstone,
    decode_transaction,
    encode_tombstone,
    encode_transaction,
)
from semel.core.transactions import (
    Decision,
    ProducerIdentity,
    TopicPartition,
    TransactionCoordinator,
    TransactionMetadata,
    TransactionSettings,
)

_T = TypeVar("_T")
Answer = ErrorCode | ProducerIdentity


class Driver:
    """One broker. `observe` sees every record, with what it replaces, before it is replayed."""

    def __init__(self, settings: TransactionSettings | None = None) -> None:
        self.settings = settings or TransactionSettings()
        self.coordinator = TransactionCoordinator(self.settings)
        self.log: list[tuple[bytes, bytes | None]] = []
        self.now_ms = 1_000_000
        self.producer_ids_given = 1_000
        self.observe: Callable[[TransactionMetadata | None, TransactionMetadata], None] = lambda before, after: None

    def new_producer_id(self) -> int:
        self.producer_ids_given += 1
        return self.producer_ids_given

    def init(
        self,
        identity: tuple[int, int] = (-1, -1),
        *,
        transactional_id: str = "id",
        timeout_ms: int = 60_000,
        two_phase: bool = False,
        keep_prepared: bool = False,
    ) -> Answer:
        return self._run(
            lambda: self.coordinator.decide_init_producer_id(
                transactional_id,
                timeout_ms,
                *identity,
                now_ms=self.now_ms,
                new_producer_id=self.new_producer_id,
                two_phase=two_phase,
                keep_prepared=keep_prepared,
            )
        )

    def add(
        self,
        identity: tuple[int, int],
        partitions: Iterable[TopicPartition] = (("t", 0),),
        *,
        transactional_id: str = "id",
        client_version: int = 2,
    ) -> ErrorCode:
        answer = self._run(
            lambda: self.coordinator.decide_add_partitions(
                transactional_id, *identity, list(partitions), now_ms=self.now_ms, client_version=client_version
            )
        )
        return ErrorCode.none if answer is None else answer

    def verify(
        self, identity: tuple[int, int], partitions: Iterable[TopicPartition], *, transactional_id: str = "id"
    ) -> ErrorCode | list[ErrorCode]:
        asked = list(partitions)
        codes = self._unchanged(lambda: self.coordinator.decide_verify_partitions(transactional_id, *identity, asked))
        return codes if isinstance(codes, ErrorCode) else [codes[partition] for partition in asked]

    def end(
        self, identity: tuple[int, int], *, committed: bool, transactional_id: str = "id", client_version: int = 2
    ) -> Answer:
        return self._run(
            lambda: self.coordinator.decide_end(
                transactional_id,
                *identity,
                committed,
                now_ms=self.now_ms,
                client_version=client_version,
                new_producer_id=self.new_producer_id,
            )
        )

    def complete(self) -> None:
        """All markers are written, for all transactions that wait for them."""
        for metadata in self.coordinator.unfinished():
            decision = self.coordinator.decide_complete(metadata.transactional_id, now_ms=self.now_ms)
            assert decision.record is not None
            assert not decision.needs_markers
            self.append(decision.record)

    def time_out(self) -> list[str]:
        answer = self._unchanged(
            lambda: self.coordinator.decide_timeouts(now_ms=self.now_ms, new_producer_id=self.new_producer_id)
        )
        assert isinstance(answer, list)
        for decision in answer:
            assert decision.record is not None
            assert decision.needs_markers
            self.append(decision.record)
        return [decision.record.transactional_id for decision in answer if decision.record]

    def expire(self) -> list[str]:
        names = self.coordinator.decide_expirations(now_ms=self.now_ms)
        for name in names:
            self.log.append(encode_tombstone(name))
            self.coordinator.replay_tombstone(name)
        return names

    def append(self, record: TransactionMetadata) -> None:
        self.observe(self.coordinator.get(record.transactional_id), record)
        self.log.append(encode_transaction(record, transaction_version=self.settings.transaction_version))
        self.coordinator.replay(record)

    def restart(self, *, compacted: bool = False) -> None:
        """A new process: nothing is left but the log."""
        self.coordinator = TransactionCoordinator(self.settings)
        entries = list(dict(self.log).items()) if compacted else self.log
        for key, value in entries:
            record = decode_transaction(key, value)
            if isinstance(record, TransactionTombstone):
                self.coordinator.replay_tombstone(record.transactional_id)
            else:
                assert record is not None
                self.coordinator.replay(record)

    def state(self, transactional_id: str = "id") -> tuple[str, int, int]:
        metadata = self.coordinator.get(transactional_id)
        assert metadata is not None
        return (metadata.status.title, metadata.producer_id, metadata.producer_epoch)

    def _run(self, decide: Callable[[], Decision[_T]]) -> _T | ErrorCode:
        decision = self._unchanged(decide)
        if isinstance(decision, ErrorCode):
            return decision
        if decision.record is not None:
            assert decision.needs_markers == decision.record.status.title.startswith("Prepare")
            self.append(decision.record)
        return decision.response if decision.refusal is None else decision.refusal

    def _unchanged(self, decide: Callable[[], _T]) -> _T | ErrorCode:
        before = self._everything()
        try:
            return decide()
        except Refused as refused:
            return refused.code
        finally:
            assert self._everything() == before, "deciding changed something"

    def _everything(self) -> tuple[object, ...]:
        return (list(self.coordinator), self.coordinator.unfinished(), self.coordinator.next_deadline_ms())


def identity_of(answer: Answer) -> ProducerIdentity:
    assert isinstance(answer, ProducerIdentity), answer
    return answer
