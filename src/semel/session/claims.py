"""What the open transaction rests on: the partitions whose records are in it. Shared with the group's thread.

Whoever loses such a partition can only abort: another member may be reading the same records already. While a commit is
under way no partition is released, so that either the commit is answered before anybody else gets them, or the group
takes them away and the coordinator refuses it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from semel.client.partitions import TopicPartition

LOG: Final = logging.getLogger("semel.session")
WARN_AT: Final = 0.5
"""Of the transaction time-out: early enough to be read before it passes."""
MARKER_PAUSE_S: Final = 0.2
"""How long a rebalance is kept waiting after a commit where readers of offsets cannot wait for its markers."""


@dataclass(frozen=True, slots=True)
class Safety:
    """The rules that keep a session exact under rebalances. All are on; tests switch them off to see what happens."""

    stable_fetches: bool = True
    """Committed offsets are read only when no open transaction can change them (KIP-447)."""
    generation_fencing: bool = True
    """Offsets are committed as a member of a generation, which the coordinator checks (KIP-447)."""
    confirmed_commits: bool = True
    """A heartbeat must succeed before each commit, and lost partitions make the transaction abort."""


class Claims:
    """The session's thread begins and ends; the group's thread asks and tells. No call here waits for anything."""

    def __init__(self, clock: Callable[[], float], transaction_timeout_ms: int, safety: Safety) -> None:
        self._clock = clock
        self._timeout_s = transaction_timeout_ms / 1000
        self._safety = safety
        self._lock = threading.Lock()
        self._claimed: dict[TopicPartition, int] = {}
        self._doomed: str | None = None
        self._is_committing = False
        self._release_from = 0.0
        self._writing_since: float | None = None
        self._topics_written: set[str] = set()
        self._has_warned = False

    # -- the session's thread --------------------------------------------------------------------------------------

    def begin(self, tenures: Mapping[TopicPartition, int]) -> None:
        """A transaction with records of these partitions begins."""
        with self._lock:
            self._claimed = dict(tenures)
            self._doomed = None
            self._is_committing = False
            self._writing_since, self._has_warned = None, False
            self._topics_written = set()

    def note_write(self, topic: str) -> None:
        with self._lock:
            if self._writing_since is None:
                self._writing_since = self._clock()
            self._topics_written.add(topic)

    @property
    def doomed(self) -> str | None:
        """Why the transaction can only be aborted, if so."""
        with self._lock:
            return self._doomed

    def doom(self, reason: str) -> None:
        with self._lock:
            self._doomed = self._doomed or reason

    def start_commit(self) -> None:
        """From now on no partition is released until `end`."""
        with self._lock:
            self._is_committing = True

    def check_tenures(self, tenures: Mapping[TopicPartition, int]) -> None:
        """After `start_commit`: a partition that came and went since it was read is not the same any more."""
        with self._lock:
            gone = [claimed for claimed, tenure in self._claimed.items() if tenures.get(claimed) != tenure]
            if gone and self._safety.confirmed_commits:
                self._doomed = self._doomed or _taken_away(gone[0], len(gone))

    def is_overdue(self, age_s: float) -> bool:
        """Whether a transaction of this age may have been aborted because of it."""
        return age_s >= self._timeout_s

    def end(self, *, committed: bool) -> None:
        with self._lock:
            self._claimed = {}
            self._is_committing = False
            self._writing_since = None
            if committed and not self._safety.stable_fetches:
                self._release_from = self._clock() + MARKER_PAUSE_S

    # -- the group's thread ----------------------------------------------------------------------------------------

    def may_release(self, partitions: frozenset[TopicPartition]) -> bool:
        with self._lock:
            if self._is_committing or self._clock() < self._release_from:
                return False
            self._doom_for(partitions)
            return True

    def lost(self, partitions: frozenset[TopicPartition]) -> None:
        with self._lock:
            self._doom_for(partitions)

    def _doom_for(self, partitions: frozenset[TopicPartition]) -> None:
        hit = sorted(self._claimed.keys() & partitions)
        if hit and self._safety.confirmed_commits:
            self._doomed = self._doomed or _taken_away(hit[0], len(hit))

    def tick(self, now: float) -> None:
        """Say so when a transaction is open for long: whoever waits in it for an answer waits for ever (H4)."""
        with self._lock:
            if self._writing_since is None or self._is_committing or self._has_warned:
                return
            age_s = now - self._writing_since
            if age_s < self._timeout_s * WARN_AT:
                return
            self._has_warned = True
            topics = ", ".join(sorted(self._topics_written))
        LOG.warning(
            "A transaction has been open for %.1f s and will be aborted at %.1f s (transaction.timeout.ms). What was "
            "written to %s can be read by nobody before it is committed: if this code waits for an answer to it, the "
            "answer cannot come. Commit first and wait in the next transaction; if it only computes for long, take "
            "fewer records at a time or raise the time-out.",
            age_s,
            self._timeout_s,
            topics,
        )


def _taken_away(partition: TopicPartition, count: int) -> str:
    others = f" and {count - 1} more" if count > 1 else ""
    return (
        f"the group took {partition.topic}-{partition.partition}{others} away while its records were being processed; "
        "whoever has it now processes them"
    )
