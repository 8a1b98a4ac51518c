"""The course of a block, and of a recovery: what is done on which side, in which order.

The order is the promise. Records are stored in an open transaction of Kafka; the decision and the records are committed
with the user's rows; only then Kafka is told to commit. So no reader sees a record whose row is not there, and whatever
dies in between leaves a decision behind that says what is still to be done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, Literal

from semel.bridges.both.decision import Decision, StoredBatch
from semel.bridges.both.kafka_side import Inquiry, KafkaSide
from semel.bridges.both.recovery import LAST_STEPS, MarkerSeen, Seen, Step, decide_step
from semel.bridges.both.store import CommitLost, Store
from semel.bridges.failpoints import reach
from semel.bridges.retries import LOG
from semel.errors import CommitPending, CommitUnknown, ConfigError, RequestTimedOut, SemelError, TransactionAborted
from semel.metrics.parts import BOTH_RESENT

Lost = Literal["committed", "aborted"]

_STARTS_MAX: Final = 3
_RESENDS_MAX: Final = 5


@contextmanager
def block(
    store: Store, kafka: KafkaSide, take: Callable[[], Sequence[StoredBatch]], *, create_tables: bool = False
) -> Iterator[None]:
    """A transaction of both. `take` gives the records when the user's part is over."""
    store.check()
    _start(store, kafka, create_tables=create_tables)
    reach("both_begun")
    decision_id = kafka.new_id()
    try:
        yield
        batches = take()
        store.end_block()
        if batches:
            store.keep(decision_id, batches)
    except BaseException as error:
        store.rollback(error)
        raise
    if not batches:
        _commit_alone(store)
        return
    reach("both_rows_kept")
    decision = _write(store, kafka, decision_id, batches)
    with _committed(store, kafka, decision) as going_on:
        _deliver(going_on, kafka, decision)


def _commit_alone(store: Store) -> None:
    """A block without records: nothing in the database tells whether it was committed."""
    try:
        store.commit()
    except CommitLost as error:
        raise CommitUnknown(
            "The connection to the database was lost in the commit of a block without records, and whether it was "
            f"carried out is not known. Look at your own rows before you run the block again. Last: {error}"
        ) from error
    except BaseException as error:
        store.rollback(error)
        raise


def _start(store: Store, kafka: KafkaSide, *, create_tables: bool) -> None:
    """Begin in the database, with nothing left over and with the name claimed."""
    for _ in range(_STARTS_MAX):
        if kafka.is_ready and store.place in kafka.places:
            store.begin()
            try:
                row = store.look(kafka.name)
            except BaseException as error:
                store.rollback(error)
                raise
            if row is not None and row.claim == kafka.token and row.decision is None:
                return
            store.rollback(None)
        else:
            store.make_tables(create=create_tables)
        recover(store, kafka)
    raise TransactionAborted(
        f"Another program keeps claiming the name {kafka.name!r}; nothing was written. Let one program use a name at "
        "a time."
    )


def _write(store: Store, kafka: KafkaSide, decision_id: str, batches: Sequence[StoredBatch]) -> Decision:
    """Records into the open Kafka transaction, the decision into the open one of the database."""
    try:
        decision = kafka.write(decision_id, batches)
        reach("both_records_written")
        store.decide(kafka.name, kafka.token, decision)
        reach("both_decision_written")
    except BaseException as error:
        store.rollback(error)
        kafka.abort_after(error)
        raise
    return decision


@contextmanager
def _committed(store: Store, kafka: KafkaSide, decision: Decision) -> Iterator[Store]:
    """Commit the database. The block runs if that is certain, with a connection that can be used."""
    try:
        store.commit()
    except CommitLost as error:
        fresh = _find_committed(store, kafka, decision, error)
        try:
            yield fresh
        finally:
            fresh.close()
        if error.__cause__ is not None and not isinstance(error.__cause__, Exception):
            raise error.__cause__ from None  # Ctrl-C: both have committed, and it must be heard all the same
        return
    except BaseException as error:
        store.rollback(error)
        kafka.abort_after(error)
        raise
    yield store


def _find_committed(store: Store, kafka: KafkaSide, decision: Decision, error: CommitLost) -> Store:
    """A fresh connection if the database has committed. Raises otherwise, with Kafka aborted.

    To abort is right even where nobody knows: if the decision is there, its records are sent again.
    """
    fresh: Store | None = None
    try:
        fresh = store.reopen()
        row = fresh.look_locked(kafka.name)
    except BaseException as second:
        if fresh is not None:
            fresh.close()
        kafka.abort_after(second)
        unknown = _unknown(kafka.name, second)
        if not isinstance(second, Exception):
            second.add_note(str(unknown))
            raise
        raise unknown from error
    if row is not None and row.decision == decision:
        return fresh
    fresh.close()
    kafka.abort_after(error)
    if row is None or row.claim != kafka.token:
        raise _unknown(kafka.name, error) from error
    raise TransactionAborted(
        "The connection to the database was lost in the commit, and the database did not carry it out. No record is "
        f"in Kafka. Run the block again with a new connection. {error}"
    ) from (error.__cause__ or error)


def _unknown(name: str, error: BaseException) -> CommitUnknown:
    return CommitUnknown(
        "The connection to the database was lost in the commit, and whether it was carried out cannot be told now. "
        f"Kafka follows the database either way: the next semel.both of the name {name!r} sees to it before it begins, "
        f"and so does semel.recover_both(). Look at your own rows before you run the block again. Last: {error}"
    )


def _deliver(store: Store, kafka: KafkaSide, decision: Decision) -> None:
    """The database has committed: Kafka must follow."""
    reach("both_database_committed")
    try:
        try:
            kafka.commit()
        except SemelError as error:
            LOG.warning("The database has committed; Kafka has not yet, so its transaction is looked up: %s", error)
            decision = finish(store, kafka, decision)
    except BaseException as error:
        if not isinstance(error, Exception):
            _deliver_interrupted(store, kafka, decision, error)
            raise
        raise CommitPending(f"{_PENDING.format(name=kafka.name)} Last: {error}") from error
    reach("both_committed")
    _forget(store, kafka.name, decision)
    reach("both_deleted")


def _deliver_interrupted(store: Store, kafka: KafkaSide, decision: Decision, error: BaseException) -> None:
    """Ctrl-C while Kafka was told to commit: one more try, so that it is done in most cases."""
    try:
        _forget(store, kafka.name, finish(store, kafka, decision))
    except Exception:
        error.add_note(_PENDING.format(name=kafka.name))
    else:
        error.add_note("The block had committed, in the database and in Kafka.")


_PENDING: Final = (
    "The database has committed this block and Kafka has not confirmed it yet. It is decided: do not run the block "
    "again. The next semel.both of the name {name!r} finishes it before it begins, and so does semel.recover_both()."
)


def _forget(store: Store, name: str, decision: Decision) -> None:
    try:
        store.forget(name, decision)
    except Exception as error:  # whichever the driver raises: both have committed, and the next block deletes them
        LOG.warning("Both have committed; the rows of a finished decision are still there: %s", error)


# -- recovery ------------------------------------------------------------------------------------------------------


def recover(store: Store, kafka: KafkaSide, lost: Lost | None = None) -> None:
    """Claim the name, finish what an earlier owner has left, and make the producer ready."""
    kafka.check_owner()
    decision = store.claim(kafka.name, kafka.token)
    reach("both_claimed")
    if kafka.end_prepared(decision):
        reach("both_outcome_known")
        assert decision is not None
        store.forget(kafka.name, decision)
    elif decision is not None:
        store.forget(kafka.name, finish(store, kafka, decision, lost))
    kafka.settle()
    kafka.places.add(store.place)


def finish(store: Store, kafka: KafkaSide, decision: Decision, lost: Lost | None = None) -> Decision:
    """See to it that a decided transaction is in Kafka, once. Raises if that cannot be told or done now.

    Returns the decision as it is in the database then, which can be forgotten.
    """
    for _ in range(_RESENDS_MAX):
        outcome = find_outcome(kafka, decision, lost)
        reach("both_outcome_known")
        if outcome is Step.DELETE:
            return decision
        if outcome is Step.TAKE_OVER:
            raise RequestTimedOut(
                f"Another producer of the name {kafka.name!r} has come, and the decided transaction is its to commit."
            )
        kafka.settle()
        decision, is_committed = _resend(store, kafka, decision)
        if is_committed:
            return decision
    raise RequestTimedOut(
        f"Kafka has aborted the records of {kafka.name!r} again and again; they are kept in the database, and the next "
        "semel.both of this name sends them. Raise transaction.timeout.ms if it is short."
    )


def _resend(store: Store, kafka: KafkaSide, decision: Decision) -> tuple[Decision, bool]:
    """The same records in another transaction. The database must name that one before it may commit."""
    batches = store.batches(decision.id)
    try:
        again = kafka.write(decision.id, batches)
        reach("both_records_resent")
        store.decide_again(kafka.name, kafka.token, decision, again)
        reach("both_resend_decided")
    except BaseException as error:
        kafka.abort_after(error)
        raise
    BOTH_RESENT.add(kafka.name)
    LOG.warning("Kafka had aborted %d batches of %r; they were sent again.", len(batches), kafka.name)
    try:
        kafka.commit()
    except SemelError as error:
        LOG.warning("Kafka did not confirm what was sent again, so that is looked up: %s", error)
        return again, False
    return again, True


def finish_by_hand(store: Store, kafka: Inquiry, name: str, lost: Lost | None = None) -> Step | None:
    """The same without a producer, so that nobody is fenced.

    RESEND and TAKE_OVER say that it takes a producer; None, that there is nothing to do.
    """
    row = store.look_locked(name)
    if row is None or row.decision is None:
        return None
    step = find_outcome(kafka, row.decision, lost)
    if step is Step.DELETE:
        # A program that is asking itself whether it has committed must not take the empty row for a no.
        store.claim(name, "recovered by hand")
        store.forget(name, row.decision)
    return step


def find_outcome(kafka: Inquiry, decision: Decision, lost: Lost | None = None) -> Step:
    """DELETE if the transaction is committed, RESEND if it is aborted, TAKE_OVER if a new producer has kept it.

    Raises if none of them is certain.

    `lost` is the user's word for it where Kafka has none any more.
    """
    seen = Seen(kafka.cluster_id)
    while (step := decide_step(decision, seen)) not in LAST_STEPS:
        match step:
            case Step.SEND_END:
                seen = replace(seen, end=kafka.send_end(decision))
            case Step.READ_MARKERS:
                seen = replace(seen, marker=_read_markers(kafka, decision, seen))
            case _:
                seen = replace(seen, owner=kafka.owner(decision))
    if step in (Step.DELETE, Step.RESEND, Step.TAKE_OVER):
        return step
    if step is Step.WAIT:
        raise RequestTimedOut(
            "Kafka has not said yet how a decided transaction ended; its records stay in the database. Try again."
        )
    if step is Step.REFUSE_CLUSTER:
        raise ConfigError(
            f"The database holds a decision about the Kafka cluster {decision.cluster_id}, and this producer is "
            f"connected to {seen.cluster_id}. Nothing was changed. Connect to the other one to finish it."
        )
    if lost is not None:
        return Step.DELETE if lost == "committed" else Step.RESEND
    raise SemelError(
        _LOST.format(id=decision.id, places=", ".join(f"{p.topic}-{p.partition}" for p in decision.places))
    )


def _read_markers(kafka: Inquiry, decision: Decision, seen: Seen) -> MarkerSeen:
    found = kafka.read_markers(decision)
    is_second_look = seen.marker is MarkerSeen.NOT_YET
    return MarkerSeen.MISSING if is_second_look and found is MarkerSeen.NOT_YET else found


_LOST: Final = (
    "Whether Kafka committed or aborted a decided transaction cannot be told any more: its end was deleted from "
    "{places} (retention, compaction, or the topic itself) before anybody looked. Nothing was changed. Its records are "
    "the rows of decision {id} in semel_both_records. If readers have seen them, call semel.recover_both(..., "
    'lost="committed"), which deletes the rows; if not, lost="aborted", which sends them again.'
)
