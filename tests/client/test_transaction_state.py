"""The producer's state table, against the promises it must keep."""

from __future__ import annotations

import itertools

import pytest

from semel.client.transaction_state import TRANSITIONS, Event, State, next_state
from semel.errors import InvalidState


@pytest.mark.parametrize(
    ("state", "event"), [pair for pair in itertools.product(State, Event) if pair not in TRANSITIONS], ids=str
)
def test_an_event_that_is_not_in_the_table_is_refused(state: State, event: Event) -> None:
    """An illegal call raises a sentence with the state in it, instead of doing something."""
    with pytest.raises(InvalidState, match=event.value):
        next_state(state, event)


def reachable(start: State, *, without: Event) -> set[State]:
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        for (origin, event), target in TRANSITIONS.items():
            if origin is state and event is not without and target not in seen:
                seen.add(target)
                todo.append(target)
    return seen


def test_a_lost_commit_is_never_followed_by_an_abort_or_a_new_transaction_before_it_is_resolved() -> None:
    """Readers may have seen it: only finding out leads on."""
    assert reachable(State.UNKNOWN, without=Event.RESOLVED) == {State.UNKNOWN, State.DEAD}


def test_a_doomed_transaction_cannot_be_committed() -> None:
    """Once a part of it was refused, the rest must not become visible alone."""
    assert State.COMMITTING not in reachable(State.DOOMED, without=Event.BEGIN)


def test_a_dead_producer_stays_dead() -> None:
    """Fenced means stop."""
    assert reachable(State.DEAD, without=Event.BEGIN) == {State.DEAD}
