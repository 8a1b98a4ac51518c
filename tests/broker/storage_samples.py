"""Partitions on a simulated disk, batches to put into them, and what is read back, for the storage tests."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from semel.broker.storage.cleaner import plan_cleaning
from semel.broker.storage.log_file import OpenFiles
from semel.broker.storage.log_settings import LogSettings
from semel.broker.storage.partition import Partition
from semel.records.layout import iter_batches, read_header
from semel.records.reference import Record, decode_batch, encode_batch
from semel.testing.simulated_disk import SimulatedDisk

PATH = "data/topic-0"
SMALL = LogSettings(segment_bytes=600, index_interval_bytes=100, message_timestamp_after_max_ms=2**62)


def make_batch(
    values: list[bytes],
    *,
    timestamp_ms: int = 1000,
    keys: list[bytes] | None = None,
    compression: str = "none",
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    transactional: bool = False,
) -> bytearray:
    records = [
        Record(number, timestamp_ms + number, keys[number] if keys else None, value)
        for number, value in enumerate(values)
    ]
    return bytearray(
        encode_batch(
            records,
            compression=compression,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=base_sequence,
            transactional=transactional,
        )
    )


def open_on(
    disk: SimulatedDisk, settings: LogSettings = SMALL, *, now_ms: int = 0, hold_high_watermark: bool = False
) -> Partition:
    disk.make_directory(PATH)
    disk.sync_directory("")  # the data directory itself is its owner's to make durable
    return Partition(
        OpenFiles(disk), PATH, "topic", 0, settings, now_ms=now_ms, hold_high_watermark=hold_high_watermark
    )


def put(partition: Partition, values: list[bytes], *, now_ms: int = 0, timestamp_ms: int = 1000) -> int:
    batch = make_batch(values, timestamp_ms=timestamp_ms)
    return partition.append(batch, read_header(batch), now_ms=now_ms).base_offset


@dataclass(frozen=True)
class Read:
    offset: int
    value: bytes | None


def read_all(partition: Partition, *, bytes_max: int = 500, end_offset: int | None = None) -> list[Read]:
    """Everything a consumer would see from the log start on, through reads of `bytes_max`."""
    found: list[Read] = []
    offset = partition.log_start_offset
    end = partition.high_watermark if end_offset is None else end_offset
    while offset < end:
        data = partition.read(offset, bytes_max=bytes_max, end_offset=end_offset)
        batches = list(iter_batches(data))
        assert sum(len(batch) for _, batch in batches) == len(data), "only whole batches"
        if not batches:
            break
        for header, batch in batches:
            for record in decode_batch(batch)[1]:
                if not header.is_control and record.offset >= offset:
                    found.append(Read(record.offset, record.value))
        assert batches[-1][0].last_offset >= offset, "a read makes progress"
        offset = batches[-1][0].last_offset + 1
    assert all(one.offset < other.offset for one, other in pairwise(found))
    return found


def values_of(partition: Partition) -> list[bytes | None]:
    return [read.value for read in read_all(partition)]


def compact(partition: Partition, now_ms: int) -> bool:
    """What the broker does in three steps, with others' work in between, at once; returns whether anything was done."""
    if partition.settings.compacts and partition.has_unsynced_segments and partition.failure is None:
        unsynced = partition.dirty_files()
        if unsynced is not None:
            unsynced.sync()
            partition.mark_synced(unsynced)
    cleaning = plan_cleaning(partition, now_ms)
    if cleaning is None:
        return False
    cleaning.run()
    return cleaning.finish()
