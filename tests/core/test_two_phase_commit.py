"""Two-phase commit (KIP-939) at the coordinator, case by case. No release of Apache Kafka carries all of it out yet, so
expected is what the KIP says, and where it leaves something open, what keeps a prepared transaction whole."""

from __future__ import annotations

import pytest
from coordinator_driver import Driver, identity_of
from kio.schema.errors import ErrorCode

from semel.core.transactions import (
    Marker,
    ProducerIdentity,
    TransactionMetadata,
    TransactionSettings,
    TransactionStatus,
    marker_of,
)

DAY_MS = 86_400_000


def make() -> Driver:
    return Driver(TransactionSettings(two_phase_commit=True))


def prepared(driver: Driver) -> ProducerIdentity:
    """A two-phase transaction that is open."""
    identity = identity_of(driver.init(two_phase=True))
    assert driver.add(identity) is ErrorCode.none
    return identity


def keep(driver: Driver, identity: tuple[int, int] = (-1, -1)) -> ProducerIdentity:
    return identity_of(driver.init(identity, two_phase=True, keep_prepared=True))


def at_epochs(driver: Driver, epoch: int, next_epoch: int = -1) -> ProducerIdentity:
    """An open two-phase transaction of producer 7, kept by `next_epoch` if that is given."""
    driver.append(TransactionMetadata("id", 7, 7, producer_epoch=epoch, timeout_ms=2**31 - 1))
    driver.append(
        TransactionMetadata(
            "id",
            7,
            7,
            next_producer_id=-1 if next_epoch < 0 else 7,
            next_producer_epoch=next_epoch,
            producer_epoch=epoch,
            timeout_ms=2**31 - 1,
            status=TransactionStatus.ONGOING,
            partitions=frozenset({("t", 0)}),
            start_ms=0,
        )
    )
    return ProducerIdentity(7, epoch if next_epoch < 0 else next_epoch)


def test_no_timeout_ends_a_two_phase_transaction() -> None:
    """KIP-939: only a decision does, however late, and transaction.max.timeout.ms is not asked."""
    driver = make()
    identity = identity_of(driver.init(two_phase=True, timeout_ms=2**31 - 1))
    driver.add(identity)
    driver.now_ms += 1_000 * DAY_MS
    assert driver.coordinator.next_deadline_ms() is None
    assert driver.time_out() == []
    driver.restart()
    assert driver.time_out() == []
    assert driver.end(identity, committed=True) == (identity.producer_id, 1)


def test_a_cluster_that_does_not_allow_it_says_so_and_changes_nothing() -> None:
    """`transaction.two.phase.commit.enable` is false unless somebody sets it; and it takes protocol 2."""
    driver = Driver()
    assert driver.init(two_phase=True) is ErrorCode.transactional_id_authorization_failed
    assert driver.init(keep_prepared=True) == (1001, 0)
    older = Driver(TransactionSettings(transaction_version=1, two_phase_commit=True))
    assert older.init(two_phase=True) is ErrorCode.unsupported_version
    assert older.init(keep_prepared=True) is ErrorCode.unsupported_version
    assert older.init() == (1001, 0)


def test_a_new_owner_keeps_what_is_open_and_is_told_whose_it_was() -> None:
    """The epoch is raised for the owner alone: the records still carry the old one, by which a decision names them."""
    driver = make()
    first = prepared(driver)
    owner = keep(driver)
    assert owner == (first.producer_id, 1)
    assert driver.state() == ("Ongoing", *first)
    assert keep(driver) == (first.producer_id, 2)
    assert driver.state() == ("Ongoing", *first)


@pytest.mark.parametrize("committed", [True, False])
def test_the_new_owner_ends_what_it_kept(committed: bool) -> None:
    """Markers have the epoch after the transaction's, and the next transaction the one after the owner's."""
    driver = make()
    first = prepared(driver)
    keep(driver)
    keep(driver)
    owner = keep(driver)
    following = driver.end(owner, committed=committed)
    assert following == (first.producer_id, 4)
    [decided] = driver.coordinator.unfinished()
    assert marker_of(decided) == Marker(first.producer_id, 1, committed)
    assert driver.end(owner, committed=committed) is ErrorCode.concurrent_transactions
    driver.restart()
    driver.complete()
    assert driver.end(owner, committed=committed) == following
    assert driver.end(owner, committed=not committed) is ErrorCode.invalid_txn_state
    assert driver.state() == ("CompleteCommit" if committed else "CompleteAbort", first.producer_id, 4)
    assert driver.add(identity_of(following)) is ErrorCode.none


def test_the_owner_of_a_kept_transaction_can_only_end_it() -> None:
    """It was prepared: what comes in afterwards would be decided about without anybody having agreed to it."""
    driver = make()
    prepared(driver)
    owner = keep(driver)
    assert driver.add(owner, [("t", 1)]) is ErrorCode.invalid_txn_state
    assert driver.verify(owner, [("t", 0)]) is ErrorCode.invalid_txn_state


def test_who_had_it_before_can_neither_end_nor_write_nor_abort() -> None:
    """A zombie must not undo or extend what its successor has found."""
    driver = make()
    first = prepared(driver)
    keep(driver)
    assert driver.end(first, committed=True) is ErrorCode.producer_fenced
    assert driver.end(first, committed=False) is ErrorCode.producer_fenced
    assert driver.add(first, [("t", 1)]) is ErrorCode.producer_fenced
    assert driver.init(first) is ErrorCode.producer_fenced
    assert driver.init(first, two_phase=True, keep_prepared=True) is ErrorCode.producer_fenced
    assert driver.end((9, 0), committed=True) is ErrorCode.invalid_producer_id_mapping


def test_a_repeat_of_keeping_finds_its_answer() -> None:
    """Its answer was lost; over a restart too."""
    driver = make()
    first = prepared(driver)
    owner = keep(driver, first)
    assert owner == (first.producer_id, 1)
    driver.restart()
    assert keep(driver, first) == owner


def test_without_keeping_what_is_prepared_is_aborted() -> None:
    """That is how an operator forces it to an end; the delayed end by one that kept it finds a later epoch."""
    driver = make()
    first = prepared(driver)
    owner = keep(driver)
    assert driver.init() is ErrorCode.concurrent_transactions
    [decided] = driver.coordinator.unfinished()
    assert marker_of(decided) == Marker(first.producer_id, 1, False)
    driver.complete()
    assert driver.init() == (first.producer_id, 3)
    assert driver.end(owner, committed=True) is ErrorCode.producer_fenced


def test_keeping_alone_leaves_the_timeout_as_it_was() -> None:
    """The one who keeps may not know of two-phase commit: what is prepared must not time out on him."""
    driver = make()
    prepared(driver)
    identity_of(driver.init(keep_prepared=True, timeout_ms=1))
    driver.now_ms += DAY_MS
    assert driver.time_out() == []
    plain = Driver()
    identity = identity_of(plain.init(timeout_ms=1_000))
    plain.add(identity)
    identity_of(plain.init(keep_prepared=True))
    plain.now_ms += 1_001
    assert plain.time_out() == ["id"]


def test_keeping_where_nothing_is_open_is_an_ordinary_start() -> None:
    """There is nothing to be told then."""
    driver = make()
    assert keep(driver) == (1001, 0)
    assert keep(driver) == (1001, 1)
    assert driver.state() == ("Empty", 1001, 1)


def test_a_client_of_protocol_1_cannot_end_what_was_kept() -> None:
    """Its answer has no room for the next identity."""
    driver = make()
    prepared(driver)
    owner = keep(driver)
    assert driver.end(owner, committed=True, client_version=0) is ErrorCode.invalid_txn_state


def test_the_last_epoch_of_the_owner_is_followed_by_a_new_producer_id() -> None:
    """While the transaction keeps its own; the repeat of the one who got the new id is known by the old."""
    driver = make()
    last = at_epochs(driver, 100, next_epoch=32_766)
    owner = keep(driver, last)
    assert owner == (1001, 0)
    assert driver.state() == ("Ongoing", 7, 100)
    assert keep(driver, last) == owner
    assert driver.end(owner, committed=True) == (1001, 1)
    [decided] = driver.coordinator.unfinished()
    assert marker_of(decided) == Marker(7, 101, True)
    driver.complete()
    assert driver.state() == ("CompleteCommit", 1001, 1)


def test_an_end_that_uses_up_the_epochs_of_the_owner_brings_the_next_producer_id() -> None:
    """And a repeat of it finds the same."""
    driver = make()
    owner = at_epochs(driver, 100, next_epoch=32_766)
    following = driver.end(owner, committed=True)
    assert following == (1001, 0)
    driver.complete()
    assert driver.end(owner, committed=True) == following
    assert driver.state() == ("CompleteCommit", 1001, 0)


def test_a_transaction_under_the_last_epoch_can_be_kept() -> None:
    """Its markers carry the one that is given to nobody."""
    driver = make()
    first = at_epochs(driver, 32_766)
    owner = keep(driver)
    assert owner == (1001, 0)
    assert driver.end(owner, committed=True) == (1001, 1)
    [decided] = driver.coordinator.unfinished()
    assert marker_of(decided) == Marker(first.producer_id, 32_767, True)
