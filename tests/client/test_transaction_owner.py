"""What a transactional producer may say after a commit that was refused or lost. The coordinator is scripted."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kio.schema.errors import ErrorCode

from semel.client import transaction_owner
from semel.client.cluster import Cluster
from semel.client.config import ProducerConfig
from semel.client.ownership import Owner, ProducerIdentity
from semel.client.partitions import TopicPartition
from semel.client.retry import Patience
from semel.client.sender import Sender, Stored
from semel.client.transaction_owner import Outcome, TransactionOwner
from semel.client.transaction_state import State
from semel.client.transactions import GroupMember, TransactionCalls
from semel.errors import CommitUnknown, ConnectionLost, Fenced, KafkaError, TransactionAborted

MINE = ProducerIdentity(7, 3)


class Coordinator:
    """Takes the place of `TransactionCalls`' requests; each answer is a value or an exception."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.init: list[Any] = [MINE]
        self.end: list[Any] = []
        self.owner: list[Any] = []
        for name, script in (("init_producer_id", self.init), ("end", self.end), ("owner", self.owner)):
            patch.setattr(TransactionCalls, name, lambda *_, script=script, **__: _next(script))


def _next(script: list[Any]) -> Any:
    answer = script.pop(0)
    if isinstance(answer, BaseException):
        raise answer
    return answer


def open_transaction(protocol: int) -> TransactionOwner:
    """A producer that has written to `t-0` at offset 5 and is about to commit."""
    stub = SimpleNamespace(
        transaction_protocol=protocol,
        speaks=lambda api, version: False,
        config=SimpleNamespace(api_timeout_ms=10),
        patience=lambda budget_ms=None: Patience(budget_ms or 0, 1, 1),
        clock=time.monotonic,
    )
    cluster = cast(Cluster, stub)
    owner = TransactionOwner(cluster, Sender(cluster, ProducerConfig(transactional_id="id")), "id", 60_000)
    owner.begin()
    owner.note_sending()
    owner.note_stored([Stored("t", 0, 5, 1)])
    return owner


def lose_commit(coordinator: Coordinator, owner: TransactionOwner) -> None:
    coordinator.end.append(ConnectionLost("gone"))
    with pytest.raises(CommitUnknown):
        owner.commit(None)


def test_a_refused_commit_can_be_aborted_though_nobody_can_be_asked_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection was lost between the refusal and the question: the producer must not stay half-way."""
    coordinator = Coordinator(monkeypatch)
    owner = open_transaction(2)
    coordinator.end.append(Fenced("fenced", code=ErrorCode.producer_fenced, is_fatal=True))
    coordinator.owner.append(ConnectionLost("gone"))
    with pytest.raises(TransactionAborted):
        owner.commit(None)
    assert owner.state is State.DOOMED


@pytest.mark.parametrize(("protocol", "epoch"), [(1, 3), (2, 4)])
def test_a_lost_commit_is_not_told_by_the_marker_of_an_earlier_transaction(
    protocol: int, epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protocol 1 ends a transaction under its own epoch, protocol 2 under the next; lower ones are of before."""
    asked: list[int] = []

    def find_marker(*_: Any, producer_epoch_min: int, **__: Any) -> Any:
        asked.append(producer_epoch_min)
        return SimpleNamespace(kind="abort")

    monkeypatch.setattr(transaction_owner, "find_marker", find_marker)
    coordinator = Coordinator(monkeypatch)
    owner = open_transaction(protocol)
    lose_commit(coordinator, owner)
    coordinator.owner.append(Owner(MINE.following, "CompleteAbort"))
    coordinator.init.append(ProducerIdentity(7, 5))
    assert owner.resolve() is Outcome.ABORTED
    assert (asked, owner.state) == ([epoch], State.READY)


def test_resolve_can_be_called_again_until_it_has_told_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """It found the marker and then lost the coordinator: an outcome that nobody was told must not be forgotten."""
    monkeypatch.setattr(transaction_owner, "find_marker", lambda *_, **__: SimpleNamespace(kind="commit"))
    coordinator = Coordinator(monkeypatch)
    owner = open_transaction(2)
    lose_commit(coordinator, owner)
    coordinator.owner += [Owner(MINE.following, "CompleteCommit")] * 2
    coordinator.init += [ConnectionLost("gone"), ProducerIdentity(7, 5)]
    with pytest.raises(ConnectionLost):
        owner.resolve()
    assert owner.state is State.UNKNOWN
    assert owner.resolve() is Outcome.COMMITTED
    assert owner.state is State.READY


def test_resolve_tells_the_outcome_though_the_coordinator_has_forgotten_the_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """It forgets only what is settled, so the marker says it; but this producer cannot go on."""
    monkeypatch.setattr(transaction_owner, "find_marker", lambda *_, **__: SimpleNamespace(kind="commit"))
    coordinator = Coordinator(monkeypatch)
    owner = open_transaction(2)
    lose_commit(coordinator, owner)
    coordinator.owner.append(Fenced("forgotten", code=ErrorCode.invalid_producer_id_mapping, is_fatal=True))
    assert owner.resolve() is Outcome.COMMITTED
    assert owner.state is State.DEAD


@pytest.mark.parametrize("protocol", [1, 2])
def test_a_commit_that_is_refused_before_its_time_waits_for_the_successor_and_is_fenced(
    protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator has ended it for a new owner, which has its epoch a moment later: that was no time-out."""
    coordinator = Coordinator(monkeypatch)
    owner = open_transaction(protocol)
    coordinator.end.append(KafkaError("refused", code=ErrorCode.invalid_txn_state, is_fatal=True))
    coordinator.owner += [Owner(MINE.following, "PrepareAbort"), Owner(MINE.following, "CompleteAbort")]
    coordinator.owner += [Owner(MINE.following.following, "Empty")] * 2
    with pytest.raises(Fenced, match="has taken over"):
        owner.commit(None)
    assert owner.state is State.DEAD


def test_a_commit_that_is_refused_before_its_time_goes_on_if_nobody_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumped, or an administrator: the producer is not told that it was slow, and may begin again."""
    monkeypatch.setattr(transaction_owner, "_SUCCESSOR_MS", 20)
    coordinator = Coordinator(monkeypatch)
    owner = open_transaction(2)
    coordinator.end += [KafkaError("refused", code=ErrorCode.invalid_txn_state, is_fatal=True), MINE.following]
    coordinator.owner += [Owner(MINE.following, "CompleteAbort")] * 100
    with pytest.raises(TransactionAborted, match=r"it was told to, before transaction\.timeout\.ms"):
        owner.commit(None)
    owner.abort()
    assert owner.state is State.READY


def test_a_doomed_transaction_that_a_successor_has_ended_is_not_aborted_as_if_nothing_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On protocol 2 its abort would be taken for a repeat, and the producer would write on beside its successor."""
    coordinator = Coordinator(monkeypatch)
    owner = open_transaction(2)
    with pytest.raises(TransactionAborted), owner.doomed_by_failure():
        raise TransactionAborted("a leader knows a higher epoch", code=ErrorCode.invalid_producer_epoch)
    coordinator.owner += [Owner(MINE.following, "CompleteAbort"), *[Owner(MINE.following.following, "Empty")] * 2]
    with pytest.raises(Fenced, match="has taken over"):
        owner.abort()
    assert owner.state is State.DEAD


@pytest.mark.parametrize("protocol", [1, 2])
@pytest.mark.parametrize("is_taken_over", [False, True])
def test_offsets_that_are_refused_after_a_timeout_leave_a_producer_that_can_go_on(
    monkeypatch: pytest.MonkeyPatch, protocol: int, is_taken_over: bool
) -> None:
    """The coordinator's own abort raises the epoch as a newer owner does; only the latter is the end."""
    coordinator = Coordinator(monkeypatch)
    owner = open_transaction(protocol)
    refusal = Fenced("a newer epoch", code=ErrorCode.invalid_producer_epoch, is_fatal=True)
    monkeypatch.setattr(TransactionCalls, "commit_offsets", lambda *_: _next([refusal]))
    epoch = MINE.producer_epoch + (2 if is_taken_over else 1)
    monkeypatch.setattr(transaction_owner, "_SUCCESSOR_MS", 20)
    coordinator.owner += [Owner(ProducerIdentity(MINE.producer_id, epoch), "CompleteAbort")] * 100
    with pytest.raises(Fenced if is_taken_over else TransactionAborted):
        owner.send_offsets({TopicPartition("in", 0): 5}, GroupMember("group"))
    assert owner.state is (State.DEAD if is_taken_over else State.DOOMED)


def test_on_protocol_1_the_next_transaction_costs_one_look_at_the_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is left to wait for, who was seen once is not asked for again: the script has no second answer."""
    coordinator = Coordinator(monkeypatch)
    owner = open_transaction(1)
    coordinator.end.append(MINE)
    owner.commit(None)
    coordinator.owner.append(Owner(MINE, "CompleteCommit"))
    coordinator.init.append(MINE.following)
    owner.begin()
    assert (owner.state, coordinator.owner, coordinator.init) == (State.OPEN, [], [])


def test_on_protocol_1_an_abort_looks_before_it_and_once_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look finds it open and ours, the abort is asked for, and the second look finds it done."""
    coordinator = Coordinator(monkeypatch)
    owner = open_transaction(1)
    monkeypatch.setattr(Patience, "is_spent", False)
    coordinator.owner += [Owner(MINE, "Ongoing"), Owner(MINE.following, "CompleteAbort")]
    coordinator.init += [
        KafkaError("under way", code=ErrorCode.concurrent_transactions),
        MINE.following.following,
    ]
    owner.abort()
    assert (owner.state, coordinator.owner, coordinator.init) == (State.READY, [], [])


@pytest.mark.parametrize(
    ("second", "state"),
    [
        (Fenced("forgotten", code=ErrorCode.invalid_producer_id_mapping, is_fatal=True), State.DEAD),
        (ConnectionLost("gone"), State.DOOMED),
    ],
)
def test_a_refused_write_does_not_leave_the_transaction_open_when_nobody_can_tell_why(
    second: Exception, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed 2 of 30 transactions: the id had expired, the question failed as well, and the producer could go on."""
    coordinator = Coordinator(monkeypatch)
    owner = open_transaction(1)
    coordinator.owner.append(second)
    with pytest.raises(type(second)), owner.doomed_by_failure():
        raise Fenced("refused", code=ErrorCode.invalid_producer_id_mapping, is_fatal=True)
    assert owner.state is state
