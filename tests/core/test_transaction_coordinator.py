"""The transaction coordinator, case by case. Expected is what Apache Kafka 4.3 did, unless a test says otherwise."""

from __future__ import annotations

import pytest
from coordinator_driver import Driver, identity_of
from kio.schema.errors import ErrorCode

from semel.broker.pacing import finish_now
from semel.core.coordinator_hash import coordinator_partition, java_string_hash
from semel.core.refusal import Refused
from semel.core.transaction_listing import describe_transaction, list_transactions
from semel.core.transactions import (
    Marker,
    ProducerIdentity,
    TransactionMetadata,
    TransactionSettings,
    TransactionStatus,
    marker_of,
)
from semel.errors import InvalidState

NOTHING = ProducerIdentity(-1, -1)
PROTOCOLS = pytest.mark.parametrize("client_version", [0, 2])
FEATURES = pytest.mark.parametrize("feature", [0, 1, 2])
OUTCOMES = pytest.mark.parametrize("committed", [True, False])


def make(feature: int = 2) -> Driver:
    return Driver(TransactionSettings(transaction_version=feature))


def opened(driver: Driver, *, client_version: int = 2) -> ProducerIdentity:
    identity = identity_of(driver.init())
    assert driver.add(identity, client_version=client_version) is ErrorCode.none
    return identity


def raised(identity: ProducerIdentity, by: int = 1) -> ProducerIdentity:
    return ProducerIdentity(identity.producer_id, identity.producer_epoch + by)


def at_epoch(driver: Driver, epoch: int, *, last_epoch: int = -1) -> ProducerIdentity:
    """A transactional id at rest with this epoch."""
    driver.append(
        TransactionMetadata(
            "id", 7, 7, producer_epoch=epoch, last_producer_epoch=last_epoch, timeout_ms=60_000, last_update_ms=0
        )
    )
    return ProducerIdentity(7, epoch)


# InitProducerId


@FEATURES
def test_a_new_id_begins_with_epoch_0_and_each_incarnation_raises_it(feature: int) -> None:
    """B4: the newest incarnation has the highest epoch of the same producer id."""
    driver = make(feature)
    first = identity_of(driver.init())
    assert first.producer_epoch == 0
    assert driver.init() == raised(first)
    assert driver.init() == raised(first, 2)
    assert driver.init(transactional_id="other") == (first.producer_id + 1, 0)


def test_an_unknown_id_that_brings_an_identity_gets_a_new_one() -> None:
    """KIP-360: a producer whose id has expired goes on under a new producer id."""
    assert make().init((12_345, 7)) == (1_001, 0)


@pytest.mark.parametrize("timeout_ms", [-1, 0, 900_001])
def test_a_timeout_out_of_range_is_refused(timeout_ms: int) -> None:
    """The broker's maximum bounds how long a transaction can hold back its readers."""
    assert make().init(timeout_ms=timeout_ms) is ErrorCode.invalid_transaction_timeout


@pytest.mark.parametrize("half", [(5, -1), (-1, 5)])
def test_half_an_identity_is_an_invalid_request(half: tuple[int, int]) -> None:
    """Neither a new incarnation nor an owner."""
    assert make().init(half) is ErrorCode.invalid_request


def test_an_empty_transactional_id_is_an_invalid_request() -> None:
    """As Kafka, on every path."""
    driver = make()
    assert driver.init(transactional_id="") is ErrorCode.invalid_request
    assert driver.add((1, 1), transactional_id="") is ErrorCode.invalid_request
    assert driver.verify((1, 1), [("t", 0)], transactional_id="") is ErrorCode.invalid_request
    assert driver.end((1, 1), committed=True, transactional_id="") is ErrorCode.invalid_request


@FEATURES
def test_an_owner_raises_its_epoch_and_finds_the_answer_of_a_repeat(feature: int) -> None:
    """KIP-360: a lost answer to InitProducerId costs nothing, however often it is asked for again."""
    driver = make(feature)
    first = identity_of(driver.init())
    assert driver.init(first) == raised(first)
    assert driver.init(first) == raised(first)
    assert driver.init(first) == raised(first)
    assert driver.init(raised(first)) == raised(first, 2)
    assert driver.init(first) is ErrorCode.producer_fenced


@FEATURES
def test_a_new_incarnation_leaves_no_answer_to_the_old_ones(feature: int) -> None:
    """B4: the last epoch is forgotten, so a repeat by the old owner is fenced and not taken for the new owner's."""
    driver = make(feature)
    old = identity_of(driver.init())
    new = identity_of(driver.init())
    assert driver.init(old) is ErrorCode.producer_fenced
    assert driver.init((new.producer_id + 5, 0)) is ErrorCode.producer_fenced
    assert driver.state() == ("Empty", *new)


@FEATURES
def test_an_open_transaction_is_aborted_first_and_the_new_owner_gets_the_epoch_after_the_next(feature: int) -> None:
    """B4: the markers carry e+1, the new owner gets e+2."""
    driver = make(feature)
    old = opened(driver)
    assert driver.init() is ErrorCode.concurrent_transactions
    assert driver.state() == ("PrepareAbort", *raised(old))
    (unfinished,) = driver.coordinator.unfinished()
    assert marker_of(unfinished) == Marker(*raised(old), committed=False)
    assert unfinished.partitions == {("t", 0)}
    assert driver.init() is ErrorCode.concurrent_transactions
    driver.complete()
    assert driver.state() == ("CompleteAbort", *raised(old))
    assert driver.init() == raised(old, 2)
    assert driver.init(old) is ErrorCode.producer_fenced
    assert driver.init(raised(old)) is ErrorCode.producer_fenced
    for committed in (True, False):
        assert driver.end(old, committed=committed) is ErrorCode.producer_fenced


@FEATURES
def test_while_a_transaction_is_open_the_epoch_of_the_asker_is_not_compared(feature: int) -> None:
    """Kafka's way, on 2.5, 3.9 and 4.3: a fenced producer aborts the transaction of its successor."""
    driver = make(feature)
    old = identity_of(driver.init())
    new = opened(driver)
    assert driver.init(old) is ErrorCode.concurrent_transactions
    assert driver.state() == ("PrepareAbort", *raised(new))
    driver.complete()
    assert driver.init(old) is ErrorCode.producer_fenced


@FEATURES
def test_an_owner_that_asks_while_its_transaction_is_open_comes_again(feature: int) -> None:
    """On protocol 2 an abort by the coordinator counts as a raise of the owner's epoch; on protocol 1 it fences."""
    driver = make(feature)
    identity = opened(driver)
    assert driver.init(identity) is ErrorCode.concurrent_transactions
    driver.complete()
    expected = raised(identity) if feature == 2 else ErrorCode.producer_fenced
    assert driver.init(identity) == expected
    assert driver.init(identity) == expected
    assert driver.state() == ("Empty" if feature == 2 else "CompleteAbort", *raised(identity))


@pytest.mark.parametrize("client_version", [0, 2])
@OUTCOMES
def test_while_markers_are_written_every_request_waits(client_version: int, committed: bool) -> None:
    """A PREPARE state lets nobody in but the repeat of its own end, which waits too."""
    driver = make()
    identity = opened(driver, client_version=client_version)
    driver.end(identity, committed=committed, client_version=client_version)
    owner = raised(identity) if client_version == 2 else identity
    assert driver.init() is ErrorCode.concurrent_transactions
    assert driver.init(identity) is ErrorCode.concurrent_transactions
    assert driver.add(owner) is ErrorCode.concurrent_transactions
    assert driver.verify(owner, [("t", 0)]) is ErrorCode.concurrent_transactions
    assert driver.end(identity, committed=committed, client_version=client_version) is ErrorCode.concurrent_transactions
    wrong = driver.end(identity, committed=not committed, client_version=client_version)
    assert wrong is ErrorCode.invalid_txn_state


# AddPartitionsToTxn


@PROTOCOLS
def test_partitions_open_a_transaction_and_those_in_it_are_not_logged_again(client_version: int) -> None:
    """The first partitions start its time; a repeat is answered without a record."""
    driver = make()
    identity = identity_of(driver.init())
    assert driver.add(identity, [("t", 0), ("u", 1)], client_version=client_version) is ErrorCode.none
    start_ms = driver.now_ms
    logged = len(driver.log)
    driver.now_ms += 5
    assert driver.add(identity, [("u", 1)], client_version=client_version) is ErrorCode.none
    assert len(driver.log) == logged
    assert driver.add(identity, [("u", 2)], client_version=client_version) is ErrorCode.none
    assert len(driver.log) == logged + 1
    metadata = driver.coordinator.get("id")
    assert metadata is not None
    assert metadata.partitions == {("t", 0), ("u", 1), ("u", 2)}
    assert metadata.start_ms == start_ms
    assert metadata.client_transaction_version == client_version


def test_partitions_of_a_stranger_are_refused() -> None:
    """An unknown id, another producer id, an older and a higher epoch."""
    driver = make()
    assert driver.add((1, 1)) is ErrorCode.invalid_producer_id_mapping
    identity = identity_of(driver.init())
    assert driver.add((identity.producer_id + 1, 0)) is ErrorCode.invalid_producer_id_mapping
    assert driver.add(raised(identity, -1)) is ErrorCode.producer_fenced
    assert driver.add(raised(identity)) is ErrorCode.producer_fenced


def test_a_write_is_verified_against_the_partitions_that_were_added() -> None:
    """KIP-890: a late write of a client of protocol 1 does not open a transaction that nobody ends."""
    driver = make()
    assert driver.verify((1, 1), [("t", 0)]) is ErrorCode.invalid_producer_id_mapping
    identity = opened(driver, client_version=0)
    codes = driver.verify(identity, [("t", 0), ("t", 1)])
    assert codes == [ErrorCode.none, ErrorCode.transaction_abortable]
    old_client = driver.coordinator.decide_verify_partitions(
        "id", *identity, [("t", 1)], code_if_missing=ErrorCode.invalid_txn_state
    )
    assert old_client == {("t", 1): ErrorCode.invalid_txn_state}
    assert driver.verify(raised(identity), [("t", 0)]) is ErrorCode.producer_fenced
    driver.end(identity, committed=True, client_version=0)
    driver.complete()
    assert driver.verify(identity, [("t", 0)]) == [ErrorCode.transaction_abortable]


# EndTxn


@OUTCOMES
def test_protocol_2_raises_the_epoch_and_repeats_its_answer(committed: bool) -> None:
    """B7: EndTxn 5 answers with the next identity, again and again; the opposite outcome is refused."""
    driver = make()
    identity = opened(driver)
    assert driver.end(identity, committed=committed) == raised(identity)
    (unfinished,) = driver.coordinator.unfinished()
    assert marker_of(unfinished) == Marker(*raised(identity), committed=committed)
    driver.complete()
    assert driver.state() == ("CompleteCommit" if committed else "CompleteAbort", *raised(identity))
    for _ in range(3):
        assert driver.end(identity, committed=committed) == raised(identity)
        assert driver.end(identity, committed=not committed) is ErrorCode.invalid_txn_state
    assert driver.add(identity) is ErrorCode.producer_fenced
    assert driver.add(raised(identity)) is ErrorCode.none
    assert driver.end(identity, committed=committed) is ErrorCode.producer_fenced


@FEATURES
@OUTCOMES
def test_protocol_1_leaves_the_epoch_in_place(committed: bool, feature: int) -> None:
    """B7: the same answers for clients of protocol 1, whatever the broker's own."""
    driver = make(feature)
    identity = opened(driver, client_version=0)
    assert driver.end(identity, committed=committed, client_version=0) == NOTHING
    (unfinished,) = driver.coordinator.unfinished()
    assert marker_of(unfinished) == Marker(*identity, committed=committed)
    driver.complete()
    assert driver.state() == ("CompleteCommit" if committed else "CompleteAbort", *identity)
    assert driver.end(identity, committed=committed, client_version=0) == NOTHING
    assert driver.end(identity, committed=not committed, client_version=0) is ErrorCode.invalid_txn_state
    assert driver.end(raised(identity), committed=committed, client_version=0) is ErrorCode.producer_fenced
    assert driver.end(raised(identity, -1), committed=committed, client_version=0) is ErrorCode.producer_fenced


@pytest.mark.parametrize("feature", [0, 1])
def test_a_broker_of_protocol_1_takes_a_newer_request_for_its_own(feature: int) -> None:
    """With transaction.version below 2 no end of a transaction raises an epoch."""
    driver = make(feature)
    identity = opened(driver)
    assert driver.end(identity, committed=True) == NOTHING
    assert driver.state() == ("PrepareCommit", *identity)


@pytest.mark.parametrize(
    ("status", "abort", "commit", "repeated_abort", "repeated_commit"),
    [
        ("Empty", "end", "state", "fenced", "fenced"),
        ("Ongoing", "end", "end", "fenced", "fenced"),
        ("PrepareCommit", "fenced", "fenced", "state", "wait"),
        ("PrepareAbort", "fenced", "fenced", "wait", "state"),
        ("CompleteCommit", "end", "state", "state", "again"),
        ("CompleteAbort", "end", "state", "again", "state"),
    ],
)
def test_the_table_of_protocol_2(
    status: str, abort: str, commit: str, repeated_abort: str, repeated_commit: str
) -> None:
    """KIP-890, cell by cell: with the present epoch, and with the one before it."""
    codes = {
        "state": ErrorCode.invalid_txn_state,
        "fenced": ErrorCode.producer_fenced,
        "wait": ErrorCode.concurrent_transactions,
        "again": ProducerIdentity(7, 5),
        "end": ProducerIdentity(7, 6),
    }
    named = TransactionStatus.by_title(status)
    assert named is not None
    cells = [(5, False, abort), (5, True, commit), (4, False, repeated_abort), (4, True, repeated_commit)]
    for epoch, committed, expected in cells:
        driver = make()
        driver.append(
            TransactionMetadata("id", 7, 7, producer_epoch=5, status=named, start_ms=1, client_transaction_version=2)
        )
        assert driver.end((7, epoch), committed=committed) == codes[expected], (epoch, committed)
        assert len(driver.log) == (2 if expected == "end" else 1)


def test_protocol_2_may_abort_what_was_never_begun() -> None:
    """KIP-890: the client cannot know whether its first write arrived. The epoch rises, no marker has a place to go."""
    driver = make()
    identity = identity_of(driver.init())
    assert driver.end(identity, committed=True) is ErrorCode.invalid_txn_state
    assert driver.end(identity, committed=False) == raised(identity)
    (unfinished,) = driver.coordinator.unfinished()
    assert unfinished.partitions == frozenset()
    assert unfinished.start_ms == driver.now_ms
    driver.complete()
    assert driver.end(identity, committed=False) == raised(identity)
    assert driver.end(raised(identity), committed=False) == raised(identity, 2)


def test_protocol_1_may_not_end_what_was_never_begun() -> None:
    """Its client asks for an end only after it has added partitions."""
    driver = make()
    identity = identity_of(driver.init())
    for committed in (True, False):
        assert driver.end(identity, committed=committed, client_version=0) is ErrorCode.invalid_txn_state


def test_an_end_by_a_stranger_is_refused() -> None:
    """An unknown id, another producer id, a higher epoch."""
    driver = make()
    assert driver.end((1, 1), committed=True) is ErrorCode.invalid_producer_id_mapping
    identity = opened(driver)
    stranger = (identity.producer_id + 99, 0)
    assert driver.end(stranger, committed=True) is ErrorCode.invalid_producer_id_mapping
    assert driver.end(raised(identity, 5), committed=True) is ErrorCode.producer_fenced


def test_after_an_end_of_protocol_2_the_old_identity_finds_the_present_one() -> None:
    """KIP-890: InitProducerId with the epoch of before the end is taken for a repeat."""
    driver = make()
    identity = opened(driver)
    driver.end(identity, committed=True)
    driver.complete()
    assert driver.init(identity) == raised(identity)
    assert driver.init(identity) == raised(identity)
    assert driver.end(identity, committed=True) is ErrorCode.producer_fenced
    assert driver.init(raised(identity)) == raised(identity, 2)
    assert driver.init(identity) is ErrorCode.producer_fenced


def test_a_fenced_client_is_not_answered_with_the_identity_of_a_successor_of_the_other_protocol() -> None:
    """Unlike Kafka 4.3, which takes the request for a repeat and gives the successor's epoch away."""
    driver = make()
    old = identity_of(driver.init())
    new = opened(driver, client_version=0)
    driver.end(new, committed=True, client_version=0)
    driver.complete()
    assert driver.end(old, committed=True, client_version=2) is ErrorCode.producer_fenced


# Epochs used up


@FEATURES
def test_the_last_epoch_is_followed_by_a_new_producer_id_and_repeats_find_it(feature: int) -> None:
    """A retry of a request that was answered under the old id still finds its answer, more than once."""
    driver = make(feature)
    last = at_epoch(driver, 32766)
    new = identity_of(driver.init(last))
    assert new == (1_001, 0)
    assert driver.init(last) == new
    assert driver.init(last) == new
    assert driver.init(new) == raised(new)
    assert driver.init(last) is ErrorCode.producer_fenced


def test_a_new_incarnation_also_gets_a_new_producer_id_at_the_end_of_the_epochs() -> None:
    """And then the old owner finds nothing."""
    driver = make()
    last = at_epoch(driver, 32766)
    assert driver.init() == (1_001, 0)
    assert driver.init(last) is ErrorCode.producer_fenced


def test_the_repeat_of_the_raise_to_the_last_epoch_finds_its_answer() -> None:
    """Unlike Kafka 4.3, which answers UNKNOWN_SERVER_ERROR for 32765 once 32766 is given."""
    driver = make()
    before = at_epoch(driver, 32765)
    assert driver.init(before) == (7, 32766)
    assert driver.init(before) == (7, 32766)
    assert driver.init((7, 5)) is ErrorCode.producer_fenced


@OUTCOMES
def test_an_end_that_uses_up_the_epochs_brings_the_next_producer_id(committed: bool) -> None:
    """B7: markers under the old id with 32767, the answer is the new id with 0, and so is its repeat."""
    driver = make()
    last = at_epoch(driver, 32766)
    driver.add(last)
    new = identity_of(driver.end(last, committed=committed))
    assert new == (1_001, 0)
    (unfinished,) = driver.coordinator.unfinished()
    assert marker_of(unfinished) == Marker(7, 32767, committed)
    assert unfinished.next_producer_id == 1_001
    assert driver.end(last, committed=committed) is ErrorCode.concurrent_transactions
    driver.restart()
    driver.complete()
    assert driver.end(last, committed=committed) == new
    assert driver.end(last, committed=not committed) is ErrorCode.invalid_txn_state
    assert driver.init(last) == new
    assert driver.init(last) == new
    assert driver.add(new) is ErrorCode.none


@FEATURES
def test_a_producer_with_the_last_epoch_can_still_be_fenced(feature: int) -> None:
    """That is what 32767 is kept for; the new owner has a new producer id."""
    driver = make(feature)
    last = at_epoch(driver, 32766)
    driver.add(last)
    assert driver.init() is ErrorCode.concurrent_transactions
    (unfinished,) = driver.coordinator.unfinished()
    assert marker_of(unfinished) == Marker(7, 32767, committed=False)
    driver.complete()
    owner = identity_of(driver.init())
    # On protocol 2 the abort has already brought the new id, with epoch 0.
    assert owner == ((1_001, 1) if feature == 2 else (1_001, 0))
    assert driver.init(last) is ErrorCode.producer_fenced


# Time


@FEATURES
def test_a_transaction_is_aborted_when_more_than_its_timeout_has_passed(feature: int) -> None:
    """B5: not a millisecond earlier, and its producer is shut out by the raised epoch."""
    driver = make(feature)
    assert driver.coordinator.next_deadline_ms() is None
    identity = identity_of(driver.init(timeout_ms=500))
    assert driver.add(identity, client_version=feature) is ErrorCode.none
    opened_ms = driver.now_ms
    assert driver.coordinator.next_deadline_ms() == opened_ms + 501
    driver.now_ms = opened_ms + 500
    assert driver.time_out() == []
    driver.now_ms += 1
    assert driver.time_out() == ["id"]
    assert driver.coordinator.next_deadline_ms() is None
    assert driver.time_out() == []
    assert driver.state() == ("PrepareAbort", *raised(identity))
    driver.complete()
    commit = driver.end(identity, committed=True, client_version=feature)
    abort = driver.end(identity, committed=False, client_version=feature)
    assert driver.add(identity) is ErrorCode.producer_fenced
    if feature == 2:
        assert (commit, abort) == (ErrorCode.invalid_txn_state, raised(identity))
        assert driver.init(identity) == raised(identity)
    else:
        assert (commit, abort) == (ErrorCode.producer_fenced, ErrorCode.producer_fenced)
        assert driver.init(identity) is ErrorCode.producer_fenced


def test_a_clock_that_went_back_over_a_restart_makes_nothing_late() -> None:
    """Stored times may lie in the future then: no early time-out, no early expiry."""
    driver = make()
    opened(driver)
    assert identity_of(driver.init(transactional_id="idle"))
    driver.restart()
    driver.now_ms = 5
    assert driver.time_out() == []
    assert driver.expire() == []


def test_ids_without_a_transaction_are_forgotten_when_idle() -> None:
    """EMPTY and COMPLETE expire, ONGOING and PREPARE never do; the tombstone survives a restart."""
    driver = make()
    identities = {name: identity_of(driver.init(transactional_id=name)) for name in ("empty", "open", "ended", "done")}
    for name in ("open", "ended", "done"):
        driver.add(identities[name], transactional_id=name)
    driver.end(identities["done"], committed=True, transactional_id="done")
    driver.complete()
    driver.end(identities["ended"], committed=True, transactional_id="ended")
    driver.now_ms += 604_800_000 - 1
    assert driver.expire() == []
    driver.now_ms += 1
    assert driver.expire() == ["empty", "done"]
    driver.restart()
    assert [metadata.transactional_id for metadata in driver.coordinator] == ["open", "ended"]
    assert driver.add(identities["done"], transactional_id="done") is ErrorCode.invalid_producer_id_mapping


# Recovery


@PROTOCOLS
@OUTCOMES
def test_a_decided_outcome_survives_a_restart_and_is_completed(client_version: int, committed: bool) -> None:
    """B2: after recovery the markers are written again with what was decided."""
    driver = make()
    identity = opened(driver, client_version=client_version)
    answer = driver.end(identity, committed=committed, client_version=client_version)
    before = driver.coordinator.unfinished()
    driver.restart()
    assert driver.coordinator.unfinished() == before
    assert marker_of(before[0]).committed is committed
    driver.complete()
    assert driver.coordinator.unfinished() == []
    assert driver.end(identity, committed=committed, client_version=client_version) == answer


def test_a_repeat_of_init_producer_id_finds_its_answer_over_a_restart() -> None:
    """Unlike Kafka, which does not log the last epoch and fences the producer then."""
    driver = make()
    identity = identity_of(driver.init())
    assert driver.init(identity) == raised(identity)
    driver.restart()
    assert driver.init(identity) == raised(identity)


def test_completing_what_was_not_decided_is_an_error_of_the_caller() -> None:
    """An illegal event raises and changes nothing."""
    driver = make()
    opened(driver)
    with pytest.raises(InvalidState, match="cannot go from Ongoing to CompleteAbort"):
        driver.coordinator.decide_complete("id", now_ms=0)
    metadata = driver.coordinator.get("id")
    assert metadata is not None
    with pytest.raises(InvalidState, match="no marker may be written"):
        marker_of(metadata)


# DescribeTransactions and ListTransactions


def test_describing_an_id() -> None:
    """The metadata itself, or the code Kafka answers with."""
    driver = make()
    identity = opened(driver)
    assert describe_transaction(driver.coordinator, "id").identity == identity
    for name, code in (("", ErrorCode.invalid_request), ("other", ErrorCode.transactional_id_not_found)):
        with pytest.raises(Refused) as refused:
            describe_transaction(driver.coordinator, name)
        assert refused.value.code is code


def test_listing_passes_each_filter() -> None:
    """States, producer ids, duration and pattern, alone and together; unknown states are given back."""
    driver = make()
    identities = {name: identity_of(driver.init(transactional_id=name)) for name in ("a-1", "a-2", "b-1")}
    driver.add(identities["a-2"], transactional_id="a-2")
    driver.now_ms += 100
    driver.add(identities["b-1"], transactional_id="b-1")
    driver.now_ms += 50

    hidden: set[str] = set()

    def may_describe(name: str) -> bool:
        return name not in hidden

    def names(**filters: object) -> list[str]:
        listing = finish_now(
            list_transactions(driver.coordinator, now_ms=driver.now_ms, may_describe=may_describe, **filters)  # pyright: ignore[reportArgumentType]
        )
        return [metadata.transactional_id for metadata in listing.transactions]

    assert names() == ["a-1", "a-2", "b-1"]
    assert names(state_filters=["Ongoing"]) == ["a-2", "b-1"]
    assert names(state_filters=["Nonsense"]) == []
    assert names(producer_id_filters=[identities["a-1"].producer_id]) == ["a-1"]
    assert names(duration_filter_ms=50) == ["a-1", "a-2"]
    assert names(duration_filter_ms=49) == ["a-1", "a-2", "b-1"]
    assert names(duration_filter_ms=50, state_filters=["Ongoing"]) == ["a-2"]
    assert names(transactional_id_pattern="a-.*") == ["a-1", "a-2"]
    assert names(transactional_id_pattern="a") == []
    assert names(transactional_id_pattern="") == ["a-1", "a-2", "b-1"]
    unknown = finish_now(
        list_transactions(
            driver.coordinator, now_ms=0, may_describe=may_describe, state_filters=["Ongoing", "Nonsense"]
        )
    )
    assert unknown.unknown_state_filters == ("Nonsense",)
    hidden.add("a-1")
    assert names(transactional_id_pattern="a-.*") == ["a-2"]
    with pytest.raises(Refused) as refused:
        names(transactional_id_pattern="(")
    assert refused.value.code is ErrorCode.invalid_regular_expression


@pytest.mark.parametrize(
    ("name", "hash_code", "partition"),
    [
        ("", 0, 0),
        ("a", 97, 47),
        ("my-pipeline", -705642077, 27),
        ("orders-enriched", 1498114636, 36),
        ("polygenelubricants", -2147483648, 0),
        ("größe", 98762257, 7),
        ("日本語", 25921943, 43),
        ("😀-id", 1276873157, 7),
    ],
)
def test_an_id_belongs_to_the_partition_that_java_says(name: str, hash_code: int, partition: int) -> None:
    """B9: the numbers are from a Java virtual machine."""
    assert java_string_hash(name) == hash_code
    assert coordinator_partition(name, 50) == partition
