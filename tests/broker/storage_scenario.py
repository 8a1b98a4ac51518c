"""A scenario on one partition that notes what was promised to clients, and the check of what a crash left of it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from storage_samples import PATH, make_batch

from semel.broker.storage.failures import StorageError
from semel.broker.storage.log_file import OpenFiles
from semel.broker.storage.log_settings import LogSettings
from semel.broker.storage.partition import Partition
from semel.broker.storage.recovery import replay_stored
from semel.core.partition_log import PartitionLog
from semel.records.control import MarkerKind
from semel.records.layout import HEADER_BYTES, iter_batches, read_header
from semel.testing.simulated_disk import SimulatedDisk

SETTINGS = LogSettings(segment_bytes=400, index_interval_bytes=100, retention_ms=-1, retention_bytes=1200)


@dataclass
class Promises:
    """What clients were told. `tried` holds each batch once its append began, `acknowledged` counts those answered."""

    tried: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])
    acknowledged_end: int = 0
    synced_end: int = 0
    deleted_to: int = 0
    trying_to_delete_to: int = 0


class Scenario:
    """Appends of idempotent and transactional producers, syncs, deletions and restarts, chosen by a seed."""

    def __init__(
        self, disk: SimulatedDisk, seed: int, *, settings: LogSettings = SETTINGS, stages: bool = False
    ) -> None:
        """`stages`: half of the batches are staged, as large ones are, and others are appended meanwhile."""
        self.disk = disk
        self.stages = stages
        self.settings = settings
        self.promises = Promises()
        self.errors = 0
        self._chance = random.Random(seed)
        self._sequences: dict[int, int] = {}
        self._open: set[int] = set()
        self._asked_to_delete_to = 0
        self._partition: Partition | None = None

    def run(self, steps: int) -> None:
        disk = self.disk
        disk.make_directory(PATH)
        disk.sync_directory("")
        disk.sync_directory("data")
        self._reopen()
        moves = (self._append, self._append, self._append, self._transactional, self._transactional, self._mark)
        rare = (self._sync, self._delete, self._retention, self._reopen, self._sync)
        for _ in range(steps):
            try:
                self._chance.choice(moves if self._chance.random() < 0.8 else rare)()
            except StorageError:
                self.errors += 1  # told to the client, who may go on

    @property
    def partition(self) -> Partition:
        assert self._partition is not None
        return self._partition

    def _reopen(self) -> None:
        if self._partition is not None:
            self._partition.close(clean=self._chance.random() < 0.5)
            self.promises.synced_end = self.partition.checkpoint.recovery_point
        self._partition = Partition(OpenFiles(self.disk), PATH, "topic", 0, self.settings, now_ms=0)

    def _append(self, producer_id: int | None = None, *, may_stage: bool = True) -> None:
        producer_id = self._chance.randrange(3) if producer_id is None else producer_id
        sequence = self._sequences.get(producer_id, 0)
        values = [self._chance.randbytes(self._chance.randrange(60)) for _ in range(self._chance.randrange(1, 4))]
        batch = make_batch(
            values,
            producer_id=producer_id,
            producer_epoch=0,
            base_sequence=sequence,
            transactional=producer_id >= 10,
            keys=[b"%d" % self._chance.randrange(5) for _ in values],
        )
        header, staged = read_header(batch), None
        if self.stages and may_stage and self._chance.random() < 0.5:
            staged = self.partition.stage(header, now_ms=0)
            assert staged is not None
            staged.write(memoryview(batch)[HEADER_BYTES:], HEADER_BYTES)
            if self._chance.random() < 0.5:
                self._append(3, may_stage=False)
        self.promises.tried.append((self.partition.log_end_offset, bytes(batch[16:])))
        try:
            appended = self.partition.append(batch, header, now_ms=0, staged=staged)
        finally:
            if staged is not None:
                staged.discard()
        self.promises.acknowledged_end = appended.last_offset + 1
        self._sequences[producer_id] = sequence + len(values)

    def _transactional(self) -> None:
        producer_id = 10 + self._chance.randrange(2)
        self._open.add(producer_id)
        self._append(producer_id)

    def _mark(self) -> None:
        if not self._open:
            return
        producer_id = self._chance.choice(sorted(self._open))
        self._open.discard(producer_id)
        kind: MarkerKind = self._chance.choice(("commit", "abort"))
        self.promises.tried.append((self.partition.log_end_offset, b""))
        offset = self.partition.append_marker(
            kind, producer_id=producer_id, producer_epoch=0, coordinator_epoch=0, now_ms=0
        )
        self.promises.acknowledged_end = offset + 1

    def _sync(self) -> None:
        unsynced = self.partition.dirty_files()
        if unsynced is not None:
            unsynced.sync()
            self.promises.synced_end = unsynced.end_offset
            self.partition.mark_synced(unsynced)

    def _delete(self) -> None:
        offset = self._chance.randrange(self.partition.log_start_offset, self.partition.high_watermark + 1)
        self._asked_to_delete_to = max(offset, self._asked_to_delete_to)
        self.promises.trying_to_delete_to = max(offset, self.promises.trying_to_delete_to)
        self.promises.deleted_to = self.partition.delete_records(offset)

    def _retention(self) -> None:
        self.promises.trying_to_delete_to = self.partition.log_end_offset
        self.partition.apply_retention(0)
        # No promise: a power cut may bring it back. A deletion that failed may have reached the disk all the same.
        self.promises.trying_to_delete_to = max(self._asked_to_delete_to, self.partition.log_start_offset)


def check(disk: SimulatedDisk, promises: Promises, *, power_cut: bool, settings: LogSettings = SETTINGS) -> None:
    """Open what a crash left, and compare it with what was promised."""
    disk.make_directory(PATH)
    partition = Partition(OpenFiles(disk), PATH, "topic", 0, settings, now_ms=0)
    assert partition.failure is None
    must_have = promises.synced_end if power_cut else promises.acknowledged_end
    assert partition.log_end_offset >= must_have
    assert promises.deleted_to <= partition.log_start_offset <= promises.trying_to_delete_to
    stored = {header.base_offset: bytes(batch) for header, batch in partition.batches()}
    tried = dict(promises.tried)
    for offset, batch in stored.items():
        assert offset in tried, "nothing that was never written"
        assert not tried[offset] or batch[16:] == tried[offset]
    expected = [
        offset for offset in tried if offset < partition.log_end_offset and offset >= partition.log_start_offset
    ]
    assert [offset for offset in stored if offset >= partition.log_start_offset] == expected, "no hole"
    check_state(partition)
    # It works on, and what it does then survives a clean restart.
    end = partition.append_records([(b"after", b"crash")], now_ms=0)
    partition.close()
    again = Partition(OpenFiles(disk.reboot(power_cut=True, seed=1)), PATH, "topic", 0, settings, now_ms=0)
    assert again.log_end_offset == end + 1
    check_state(again)


def check_state(partition: Partition) -> None:
    """Snapshots and indexes tell no other story than the records themselves."""
    fresh = PartitionLog(partition.segments[0].base_offset)
    for segment in partition.segments:
        for header, batch in segment.batches():
            replay_stored(fresh, header, batch, 0)
    fresh.replay_log_start(partition.log_start_offset)
    fresh.replay_high_watermark(partition.high_watermark)
    assert partition.log_end_offset == fresh.log_end_offset
    known = {entry.producer_id: entry for entry in partition.log.producers}
    for entry in fresh.producers:
        if entry.batches:  # its last one may be deleted; the snapshot still knows it
            assert known[entry.producer_id].last_sequence == entry.last_sequence
        assert known[entry.producer_id].producer_epoch == entry.producer_epoch
    assert partition.last_stable_offset <= fresh.last_stable_offset
    told = {(entry.producer_id, entry.last_offset) for entry in partition.log.all_aborted()}
    assert told >= {(entry.producer_id, entry.last_offset) for entry in fresh.all_aborted()}
    offset = partition.log_start_offset
    while offset < partition.high_watermark:
        headers = [header for header, _ in iter_batches(partition.read(offset, bytes_max=200))]
        assert headers[0].last_offset >= offset
        offset = headers[-1].last_offset + 1
