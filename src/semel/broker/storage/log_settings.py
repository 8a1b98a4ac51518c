"""The settings of one partition's log, with Kafka's names and defaults; replaced as a whole at run time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from semel.core.batch_checks import TimestampType
from semel.core.producer_state import PRODUCERS_MAX
from semel.records.layout import INT64_MAX

CleanupPolicy = Literal["delete", "compact"]

_HOUR_MS = 3_600_000
_DAY_MS = 24 * _HOUR_MS


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Kafka 4's topic settings as far as storage needs them; -1 means no limit for the two retentions.

    >>> LogSettings(cleanup_policy=frozenset({"compact"}), max_compaction_lag_ms=1000).roll_after_ms
    1000
    """

    segment_bytes: int = 1024**3
    segment_ms: int = 7 * _DAY_MS
    retention_ms: int = 7 * _DAY_MS
    retention_bytes: int = -1
    cleanup_policy: frozenset[CleanupPolicy] = frozenset({"delete"})
    index_interval_bytes: int = 4096
    message_timestamp_type: TimestampType = "CreateTime"
    message_timestamp_before_max_ms: int = INT64_MAX
    message_timestamp_after_max_ms: int = _HOUR_MS
    min_cleanable_dirty_ratio: float = 0.5
    delete_retention_ms: int = _DAY_MS
    min_compaction_lag_ms: int = 0
    max_compaction_lag_ms: int = INT64_MAX
    producer_id_expiration_ms: int = _DAY_MS
    producers_max: int = PRODUCERS_MAX

    @property
    def deletes(self) -> bool:
        return "delete" in self.cleanup_policy

    @property
    def compacts(self) -> bool:
        return "compact" in self.cleanup_policy

    @property
    def roll_after_ms(self) -> int:
        """A compacted segment closes in time for max.compaction.lag.ms, since the active one is never compacted."""
        return min(self.segment_ms, self.max_compaction_lag_ms) if self.compacts else self.segment_ms
