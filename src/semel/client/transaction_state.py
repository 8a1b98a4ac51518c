"""Everything that affects a transactional producer's state, as one table. No IO.

Three outcomes: a transaction ends committed, aborted, or unknown; unknown is left only by finding out.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from semel.errors import InvalidState


class State(Enum):
    READY = "ready for a transaction"
    OPEN = "in a transaction"
    COMMITTING = "committing"
    ABORTING = "aborting"
    DOOMED = "in a transaction that can only be aborted"
    UNKNOWN = "left with a commit whose answer was lost (call resolve())"
    DEAD = "fenced or failed for good; make a new producer"


class Event(Enum):
    BEGIN = "begin"
    COMMIT = "commit"
    COMMITTED = "committed"
    COMMIT_REFUSED = "commit refused"
    COMMIT_LOST = "commit answer lost"
    ABORT = "abort"
    ABORTED = "aborted"
    FAIL = "fail"
    RESOLVED = "resolve"
    DIE = "die"


TRANSITIONS: Final[Mapping[tuple[State, Event], State]] = {
    (State.READY, Event.BEGIN): State.OPEN,
    (State.OPEN, Event.COMMIT): State.COMMITTING,
    (State.OPEN, Event.ABORT): State.ABORTING,
    # A batch, the offsets or the coordinator refused something: nothing of this transaction may become visible.
    (State.OPEN, Event.FAIL): State.DOOMED,
    (State.COMMITTING, Event.FAIL): State.DOOMED,
    (State.DOOMED, Event.FAIL): State.DOOMED,
    (State.DOOMED, Event.ABORT): State.ABORTING,
    (State.COMMITTING, Event.COMMITTED): State.READY,
    (State.COMMITTING, Event.COMMIT_REFUSED): State.DOOMED,
    # No way leads from here to ABORTING: an abort after a lost commit could be told to undo what readers have seen.
    (State.COMMITTING, Event.COMMIT_LOST): State.UNKNOWN,
    (State.ABORTING, Event.ABORTED): State.READY,
    # The answer to an abort was lost: it may be asked for again, and the time-out does it in any case.
    (State.ABORTING, Event.FAIL): State.DOOMED,
    (State.UNKNOWN, Event.RESOLVED): State.READY,
    **{(state, Event.DIE): State.DEAD for state in State},
}


def next_state(state: State, event: Event) -> State:
    """The state after `event`; an illegal event raises `InvalidState` and changes nothing.

    >>> next_state(State.OPEN, Event.COMMIT)
    <State.COMMITTING: 'committing'>
    """
    following = TRANSITIONS.get((state, event))
    if following is None:
        raise InvalidState(f"Cannot {event.value}: this producer is {state.value}.")
    return following
