"""The group offsets of a pipeline into a database. They are for show: lag tools read them, and Semel does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from semel.bridges.failpoints import reach
from semel.bridges.positions import Position
from semel.bridges.retries import LOG
from semel.client.admin import Admin
from semel.client.admin_topics import TopicDescription
from semel.client.partitions import TopicPartition
from semel.client.position_notes import read_note
from semel.errors import NotAuthorized, SemelError

_PAUSE_S: Final = 30.0
"""How long to leave it after a failure: the pipeline should not wait for what is only for show."""


class LagOffsets:
    """With `group=None` nothing is read and nothing is committed."""

    def __init__(self, admin: Admin, group: str | None) -> None:
        self._admin = admin
        self._group = group
        self._not_before = 0.0

    def committed(self, topics: Mapping[str, TopicDescription]) -> dict[TopicPartition, Position]:
        """What the group has committed in these topics, which were described before.

        The topic is that of the note beside the offset, or the present one where no session has left a note.
        """
        if self._group is None:
            return {}
        try:
            found = self._admin.committed_offsets(self._group)
        except NotAuthorized as error:
            LOG.warning(
                "The offsets of group %r cannot be read (%s), so a failover to a database without Semel's tables would "
                "not be noticed. Grant DESCRIBE on the group, or write group=None.",
                self._group,
                error,
            )
            return {}
        positions: dict[TopicPartition, Position] = {}
        for place, at in found.items():
            if place.topic in topics:
                note = read_note(at.metadata)
                topic_id = topics[place.topic].topic_id if note is None or note.topic_id is None else note.topic_id
                positions[place] = Position(at.offset, None if topic_id is None else str(topic_id))
        return positions

    def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """After the database's commit. A failure is logged and stops nothing."""
        self.commit_found(lambda: offsets)

    def commit_found(self, find: Callable[[], Mapping[TopicPartition, int]]) -> None:
        """The same with offsets that the brokers must be asked for, which may fail too."""
        reach("before_offsets")
        if self._group is None or time.monotonic() < self._not_before:
            return
        try:
            offsets = find()
            if not offsets:
                return
            self._admin.commit_offsets(self._group, offsets)
        except (SemelError, OSError) as error:
            self._not_before = time.monotonic() + _PAUSE_S
            LOG.warning(
                "The offsets of group %r could not be committed (%s). Lag tools show an old position; the pipeline and "
                "its rows are not affected. Next try in %.0f s.",
                self._group,
                error,
                _PAUSE_S,
            )
        reach("after_offsets")
