"""Which of a partition's oldest segments are to be deleted: below the log start, over the size, or past their time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

UNLIMITED = -1


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """What retention needs to know of a segment. `largest_timestamp_ms` is -1 when its records carry none."""

    base_offset: int
    size_bytes: int
    largest_timestamp_ms: int
    last_modified_ms: int

    @property
    def age_basis_ms(self) -> int:
        return self.largest_timestamp_ms if self.largest_timestamp_ms >= 0 else self.last_modified_ms


def count_expired(
    segments: Sequence[SegmentFacts],
    *,
    log_start_offset: int,
    log_end_offset: int,
    high_watermark: int,
    now_ms: int,
    retention_ms: int,
    retention_bytes: int,
) -> int:
    """How many of the oldest segments go. Never one with records at or above the high watermark.

    The last one is the active segment: it goes only when it holds records and expired as well, and whoever deletes it
    rolls a new one before.

    >>> segments = [SegmentFacts(0, 100, 1000, 0), SegmentFacts(10, 100, 9000, 0)]
    >>> count_expired(segments, log_start_offset=0, log_end_offset=20, high_watermark=20, now_ms=10_000,
    ...               retention_ms=5000, retention_bytes=-1)
    1
    """
    ends = [segment.base_offset for segment in segments[1:]] + [log_end_offset]
    candidates = [segment for segment, end in zip(segments, ends, strict=False) if end <= high_watermark]
    if len(candidates) == len(segments) and candidates and candidates[-1].size_bytes == 0:
        candidates.pop()
    count = sum(1 for end in ends[:-1] if end <= log_start_offset)
    if retention_bytes >= 0:
        surplus = sum(segment.size_bytes for segment in segments[count:]) - retention_bytes
        while count < len(candidates) and surplus >= candidates[count].size_bytes:
            surplus -= candidates[count].size_bytes
            count += 1
    if retention_ms >= 0:
        while count < len(candidates) and now_ms - candidates[count].age_basis_ms > retention_ms:
            count += 1
    return count
