"""What a mirror tells of itself: counts of a run, and how it stands at a moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from semel.client.partitions import TopicPartition


@dataclass(slots=True)
class MirrorReport:
    """What a run has done."""

    records: int = 0
    cuts: int = 0
    """Transactions at the target that brought records."""
    loops: int = 0
    """Records that were left out because they have been at the target before."""
    lost: int = 0
    """Offsets that were deleted at the source before they were mirrored (`lost="go-on"`)."""


@dataclass(frozen=True, slots=True)
class WaitingTransaction:
    """A transaction of the source that has not ended, or of which more may come."""

    producer_id: int
    producer_epoch: int
    age_s: float
    partitions: tuple[TopicPartition, ...]
    transactional_id: str | None = None
    """Looked up for the oldest one, where the source lets it be listed."""


@dataclass(frozen=True, slots=True)
class MirrorProgress:
    """How a mirror stands. Offsets that hold markers count into `lag` too."""

    name: str
    lag: Mapping[TopicPartition, int]
    """From what is committed at the target to the end of the source, in offsets."""
    records: int
    cuts: int
    cuts_per_s: float
    waiting: tuple[WaitingTransaction, ...] = field(default=())
    """The oldest first."""
    groups_behind: int = 0
    """Positions of groups that are ahead of the mirror, so they are not carried yet."""

    @property
    def line(self) -> str:
        """For a terminal."""
        text = (
            f"{self.name}: {self.records:,} records in {self.cuts:,} cuts, {self.cuts_per_s:.1f} cuts/s, "
            f"lag {sum(self.lag.values()):,} offsets in {sum(lag > 0 for lag in self.lag.values())} partitions"
        )
        if self.waiting:
            oldest = self.waiting[0]
            who = oldest.transactional_id or f"producer {oldest.producer_id} epoch {oldest.producer_epoch}"
            text += f", waiting {oldest.age_s:.1f} s for {who}"
        return text
