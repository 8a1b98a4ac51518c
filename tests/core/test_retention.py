"""Which segments retention takes, and which it must leave."""

from __future__ import annotations

from partition_model import make_header

from semel.core.partition_log import PartitionLog
from semel.core.retention import SegmentFacts


def segment(base_offset: int, *, size: int = 100, timestamp: int = 0, modified: int = 0) -> SegmentFacts:
    return SegmentFacts(base_offset, size, timestamp, modified)


def expired_count(
    segments: list[SegmentFacts], *, watermark: int = 30, start: int = 0, ms: int = -1, size: int = -1
) -> int:
    log = PartitionLog(start)
    log.replay_append(make_header(base_offset=start, count=30 - start))
    log.replay_high_watermark(watermark)
    return log.decide_retention(segments, now_ms=1000, retention_ms=ms, retention_bytes=size)


def test_retention_by_time_takes_the_oldest_in_a_row() -> None:
    """Strictly older than retention.ms; the first that is young enough keeps all after it."""
    old, young = segment(0, timestamp=499), segment(10, timestamp=500)
    assert expired_count([old, young, segment(20, timestamp=1)], ms=500) == 1
    assert expired_count([old, young, segment(20)], ms=-1) == 0
    assert expired_count([segment(0, timestamp=5000), segment(10)], ms=0) == 0


def test_retention_without_timestamps_goes_by_the_files_time() -> None:
    """Records may carry none."""
    assert expired_count([segment(0, timestamp=-1, modified=900), segment(10)], ms=200) == 0
    assert expired_count([segment(0, timestamp=-1, modified=700), segment(10, timestamp=999)], ms=200) == 1


def test_retention_by_size_keeps_at_least_the_size() -> None:
    """A segment goes only if what is left still has retention.bytes."""
    segments = [segment(0, timestamp=1000), segment(10, timestamp=1000), segment(20, timestamp=1000)]
    assert [expired_count(segments, size=size) for size in (300, 201, 200, 100, 99, 0)] == [0, 0, 1, 2, 2, 3]


def test_retention_spares_what_is_not_below_the_high_watermark() -> None:
    """The log start can never pass the high watermark."""
    segments = [segment(0), segment(10), segment(20)]
    assert expired_count(segments, watermark=29, ms=0) == 2
    assert expired_count(segments, watermark=15, ms=0) == 1
    assert expired_count(segments, watermark=30, ms=0) == 3


def test_an_empty_active_segment_is_never_deleted() -> None:
    """Rolling an empty one for another empty one would go on for ever."""
    log = PartitionLog()
    assert log.decide_retention([segment(0, size=0)], now_ms=10**6, retention_ms=0, retention_bytes=0) == 0
    assert log.decide_retention([], now_ms=10**6, retention_ms=0, retention_bytes=0) == 0


def test_segments_below_the_log_start_go_whatever_their_age() -> None:
    """After DeleteRecords their bytes serve nobody; a compacted topic passes -1 for both limits."""
    segments = [segment(0, timestamp=1000), segment(10, timestamp=1000), segment(20, timestamp=1000)]
    assert [expired_count(segments, start=start) for start in (9, 10, 19, 20, 29)] == [0, 1, 1, 2, 2]
    assert expired_count(segments, start=10, size=100) == 2
