"""Bugs to plant in Semel's own client, each as a patch: the simulation must find every one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from semel.client import fetch_requests, fetcher, transaction_owner
from semel.client.fetched import Window, open_records
from semel.client.ownership import Owner, ProducerIdentity
from semel.client.producer import Producer
from semel.client.send_queue import OutgoingBatch, SendQueue
from semel.client.sender import Sender
from semel.client.transaction_owner import Outcome, TransactionOwner
from semel.client.transaction_state import Event, State
from semel.client.transactions import TransactionCalls
from semel.errors import ConnectionLost, Fenced, RequestTimedOut, TransactionAborted

Mutant = Callable[[pytest.MonkeyPatch], None]


def a_repeat_gets_a_new_sequence(patch: pytest.MonkeyPatch) -> None:
    """The broker cannot tell that it has the batch."""
    original = SendQueue.give_back

    def give_back(self: SendQueue, batch: OutgoingBatch) -> None:
        original(self, batch)
        batch.sequence = None

    patch.setattr(SendQueue, "give_back", give_back)


def a_repeat_goes_under_a_new_epoch(patch: pytest.MonkeyPatch) -> None:
    """A batch of unknown fate is stored once under each (what `_bump_when_settled` waits for)."""
    original: Any = vars(Sender)["_again"]

    def again(self: Any, batch: OutgoingBatch, *reason: Any) -> None:
        original(self, batch, *reason)
        if self._next_identity is not None and not self._lane(batch).queue.has_in_flight:
            self.identity = self._next_identity(self.identity)
            for lane in self._lanes.values():
                lane.queue.next_sequence = 0
            for returned in self._lane(batch).queue._returned:
                returned.sequence = None

    patch.setattr(Sender, "_again", again)


def the_first_batch_does_not_go_alone(patch: pytest.MonkeyPatch) -> None:
    """If it is refused for a moment and the next one stored, it can never follow."""
    patch.setattr(SendQueue, "_must_wait_for_the_oldest", lambda self: False)


def sequences_begin_anew_within_an_epoch(patch: pytest.MonkeyPatch) -> None:
    """After a failure the numbering starts at 0, and the epoch stays."""
    patch.setattr(Producer, "_next_identity", lambda self, current: current)


def the_epoch_is_not_renewed_after_a_commit(patch: pytest.MonkeyPatch) -> None:
    """On protocol 1 a late request of one transaction ends the next."""
    original: Any = vars(TransactionOwner)["_next_transaction"]

    def next_transaction(self: Any, following: ProducerIdentity) -> None:
        original(self, following)
        self._needs_new_epoch = False

    patch.setattr(TransactionOwner, "_next_transaction", next_transaction)


def an_unknown_commit_counts_as_aborted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransactionOwner, "_look_up_marker", lambda self, identity: Outcome.ABORTED)


def a_lost_answer_counts_as_a_commit(patch: pytest.MonkeyPatch) -> None:
    original = TransactionCalls.end

    def end(self: TransactionCalls, identity: ProducerIdentity, *, commit: bool, patience: Any = None) -> Any:
        try:
            return original(self, identity, commit=commit, patience=patience)
        except (ConnectionLost, RequestTimedOut):
            return identity

    patch.setattr(TransactionCalls, "end", end)


def any_marker_tells_the_outcome(patch: pytest.MonkeyPatch) -> None:
    """That of another producer's transaction in the same partition."""
    original = fetcher.find_marker

    def find_marker(cluster: Any, topic: str, partition: int, producer_id: int, *rest: Any, **more: Any) -> Any:
        class Anybody(int):
            def __eq__(self, other: object) -> bool:
                return True

            __hash__ = int.__hash__

        return original(cluster, topic, partition, Anybody(producer_id), *rest, **more)

    patch.setattr(transaction_owner, "find_marker", find_marker)


def a_commit_does_not_wait_for_its_records(patch: pytest.MonkeyPatch) -> None:
    """They are sent and forgotten."""

    def drain(self: Any, **_: Any) -> None:
        self.nudge()
        self._flights.clear()
        self._lanes.clear()

    patch.setattr(Sender, "drain", drain)


def a_refusal_is_told_as_an_abort_too_early(patch: pytest.MonkeyPatch) -> None:
    """The refusal of a repeat, whose first try may have committed."""
    original: Any = vars(TransactionOwner)["_explain_commit"]

    def explain(self: Any, error: BaseException) -> None:
        if isinstance(error, Fenced) or getattr(error, "is_earlier_try_open", False):
            error.is_earlier_try_open = False  # type: ignore[attr-defined]
        if isinstance(error, ConnectionLost | RequestTimedOut):
            self._move(Event.COMMIT_REFUSED)
            raise TransactionAborted("It was aborted.", code=ErrorCode.request_timed_out) from error
        original(self, error)

    patch.setattr(TransactionOwner, "_explain_commit", explain)


def a_fenced_producer_takes_its_place_back(patch: pytest.MonkeyPatch) -> None:
    """It asks for a new epoch and sends what was refused once more."""
    original: Any = vars(Sender)["_fail"]

    def fail(self: Any, batch: OutgoingBatch, error: Any) -> None:
        if self._before_first_write is None or not isinstance(error, Fenced | TransactionAborted):
            original(self, batch, error)
            return
        owner = self._before_first_write.__self__._owner
        self.identity = owner._calls.init_producer_id()
        self._registered.clear()
        for lane in self._lanes.values():
            lane.queue.next_sequence = 0
        batch.sequence = None
        self._lane(batch).queue.give_back(batch)

    patch.setattr(Sender, "_fail", fail)


def the_dead_are_not_dead(patch: pytest.MonkeyPatch) -> None:
    """A fenced producer forgets that it was told so."""

    def die(self: Any, error: Any) -> None:
        self.state = State.READY

    patch.setattr(TransactionOwner, "_die", die)


def an_epoch_is_claimed_whosever_it_is(patch: pytest.MonkeyPatch) -> None:
    """A producer goes on under the epoch of its successor."""

    def claim(mine: ProducerIdentity, owner: Owner, *, next_epoch_is_free: bool) -> ProducerIdentity:
        return owner.identity

    patch.setattr(transaction_owner, "decide_claim", claim)


def aborted_records_are_handed_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fetch_requests, "open_records", lambda records, window, aborted: open_records(records, window))


def open_transactions_are_read(patch: pytest.MonkeyPatch) -> None:
    """Past the last stable offset."""
    patch.setattr(fetch_requests, "ISOLATION_LEVELS", {"read_committed": 0, "read_uncommitted": 0})
    patch.setattr(Window, "stop", property(lambda window: window.end))


def an_answer_counts_wherever_the_reader_stands(patch: pytest.MonkeyPatch) -> None:
    """The answer to a request of before the reader was moved."""

    class Anywhere(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    original: Any = vars(fetch_requests.FetchRequests)["_land"]

    def land(self: Any, flight: Any) -> Any:
        asked = {partition: Anywhere(offset) for partition, offset in flight.asked.items()}
        return original(self, fetch_requests._Flight(flight.pending, asked))  # pyright: ignore[reportPrivateUsage]

    patch.setattr(fetch_requests.FetchRequests, "_land", land)


def a_lost_answer_counts_as_read(patch: pytest.MonkeyPatch) -> None:
    original: Any = vars(fetch_requests.FetchRequests)["_retry"]

    def retry(self: Any, reading: Any, error: Any, *rest: Any) -> None:
        if isinstance(error, ConnectionLost):
            reading.position += 1
        original(self, reading, error, *rest)

    patch.setattr(fetch_requests.FetchRequests, "_retry", retry)


FOUND_BY: dict[Mutant, int] = {
    a_repeat_gets_a_new_sequence: 4,
    a_repeat_goes_under_a_new_epoch: 4,
    the_first_batch_does_not_go_alone: 503,
    sequences_begin_anew_within_an_epoch: 9,
    an_unknown_commit_counts_as_aborted: 3,
    a_lost_answer_counts_as_a_commit: 8,
    any_marker_tells_the_outcome: 8,
    a_refusal_is_told_as_an_abort_too_early: 3,
    a_fenced_producer_takes_its_place_back: 3,
    an_epoch_is_claimed_whosever_it_is: 27,
    an_answer_counts_wherever_the_reader_stands: 10,
    a_lost_answer_counts_as_read: 2,
}
"""The seed to try first, where the first does not lead there. A change to the simulation or the client may move it."""

MUTANTS: list[Mutant] = [
    a_repeat_gets_a_new_sequence,
    a_repeat_goes_under_a_new_epoch,
    the_first_batch_does_not_go_alone,
    sequences_begin_anew_within_an_epoch,
    the_epoch_is_not_renewed_after_a_commit,
    an_unknown_commit_counts_as_aborted,
    a_lost_answer_counts_as_a_commit,
    any_marker_tells_the_outcome,
    a_commit_does_not_wait_for_its_records,
    a_refusal_is_told_as_an_abort_too_early,
    a_fenced_producer_takes_its_place_back,
    the_dead_are_not_dead,
    an_epoch_is_claimed_whosever_it_is,
    aborted_records_are_handed_out,
    open_transactions_are_read,
    an_answer_counts_wherever_the_reader_stands,
    a_lost_answer_counts_as_read,
]
