"""The note that a session keeps beside each committed offset: of which topic it is, and how the group began there.

A name is not enough: a topic that was deleted and created again has the same name and other records.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple
from uuid import UUID

_MARK: Final = "semel/1"


class PositionNote(NamedTuple):
    """
    >>> note = PositionNote(UUID(int=7), 3)
    >>> note.text
    'semel/1 topic=00000000-0000-0000-0000-000000000007 first=3'
    >>> read_note(note.text) == note
    True
    """

    topic_id: UUID | None
    """None where brokers have no ids (before Kafka 2.8)."""
    first_count: int
    """How many partitions the topic had when the group first read it from its end; later ones are new.

    0: every partition that has no position is new.
    """

    @property
    def text(self) -> str:
        return f"{_MARK} topic={self.topic_id or ''} first={self.first_count}"


def read_note(text: str | None) -> PositionNote | None:
    """None for what another client wrote, or nobody.

    >>> read_note("") is read_note("written by another client") is read_note("semel/1 topic=x first=y") is None
    True
    """
    mark, *fields = (text or "-").split() or ("-",)
    if mark != _MARK:
        return None
    values = {name: value for name, _, value in (field.partition("=") for field in fields)}
    try:
        topic_id = UUID(values["topic"]) if values.get("topic") else None
        return PositionNote(topic_id, int(values.get("first", "0")))
    except ValueError:
        return None


def first_count(notes: Iterable[PositionNote | None], topic_id: UUID | None) -> int | None:
    """How many partitions are not new, by what the group has committed; None: it has committed nothing.

    `notes` are those of all committed offsets of the topic, `topic_id` is the topic's now.

    >>> topic = UUID(int=7)
    >>> first_count([PositionNote(topic, 3), PositionNote(topic, 2), None], topic)
    2
    >>> first_count([PositionNote(UUID(int=6), 3)], topic)
    0
    """
    notes = list(notes)
    if not notes:
        return None
    known = [note for note in notes if note is not None]
    if any(note.topic_id is not None and topic_id is not None and note.topic_id != topic_id for note in known):
        return 0
    return min((note.first_count for note in known), default=0)
