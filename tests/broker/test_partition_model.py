"""Random appends, reads, rolls, deletions and restarts of one partition, against a list of batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from storage_samples import SMALL, make_batch, open_on

from semel.broker.pacing import finish_now
from semel.broker.storage.partition import Partition
from semel.records.layout import iter_batches, read_header
from semel.testing.simulated_disk import SimulatedDisk

DELETING = replace(SMALL, retention_ms=500, retention_bytes=2000)


class PartitionMachine(RuleBasedStateMachine):
    """The model is the stored batches as (base offset, last offset, largest timestamp, bytes)."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = SimulatedDisk()
        self.partition: Partition = open_on(self.disk, DELETING)
        self.model: list[tuple[int, int, int, bytes]] = []
        self.now_ms = 1000

    @initialize(now_ms=st.integers(0, 10_000))
    def start(self, now_ms: int) -> None:
        self.now_ms = now_ms

    @rule(values=st.lists(st.binary(max_size=200), min_size=1, max_size=5), timestamp_ms=st.integers(0, 12_000))
    def append(self, values: list[bytes], timestamp_ms: int) -> None:
        batch = make_batch(values, timestamp_ms=timestamp_ms)
        appended = self.partition.append(batch, read_header(batch), now_ms=self.now_ms)
        end = self.model[-1][1] + 1 if self.model else appended.base_offset
        assert appended.base_offset == end
        largest = timestamp_ms + len(values) - 1
        self.model.append((appended.base_offset, appended.last_offset, largest, bytes(batch)))

    @rule()
    def roll(self) -> None:
        self.partition.roll(self.now_ms)

    @rule(clock_ms=st.integers(0, 12_000))
    def retention_at_any_clock(self, clock_ms: int) -> None:
        """Segments go only if all their records are older than the limit, or the log is too large."""
        before = self.partition.log_start_offset
        size = self.partition.size_bytes
        self.partition.apply_retention(clock_ms)
        start = self.partition.log_start_offset
        gone = [entry for entry in self.model if before <= entry[0] < start]
        if size - sum(len(entry[3]) for entry in gone) < 2000:
            assert any(clock_ms - entry[2] > 500 for entry in gone) or not gone

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete_records(self, data: st.DataObject) -> None:
        offset = data.draw(st.integers(self.partition.log_start_offset, self.partition.high_watermark))
        assert self.partition.delete_records(offset) == offset

    @rule(ending=st.sampled_from(["close", "kill", "sync and power cut"]))
    def restart(self, ending: str) -> None:
        start = self.partition.log_start_offset
        if ending == "sync and power cut":
            unsynced = self.partition.dirty_files()
            if unsynced is not None:
                unsynced.sync()
                self.partition.mark_synced(unsynced)
        else:
            self.partition.close(clean=ending == "close")
        self.disk = self.disk.reboot(power_cut=ending == "sync and power cut", seed=self.now_ms)
        self.partition = open_on(self.disk, DELETING)
        assert self.partition.log_start_offset == start

    @rule(data=st.data(), bytes_max=st.integers(0, 1500), at_least_one=st.booleans())
    def read(self, data: st.DataObject, bytes_max: int, at_least_one: bool) -> None:
        start, end = self.partition.log_start_offset, self.partition.log_end_offset
        offset = data.draw(st.integers(start, end))
        end_offset = data.draw(st.sampled_from([None, offset, end, *(entry[0] for entry in self.model[-5:])]))
        found = bytes(
            self.partition.read(offset, bytes_max=bytes_max, end_offset=end_offset, at_least_one=at_least_one)
        )
        limit = end if end_offset is None else end_offset
        expected = [entry for entry in self.model if entry[1] >= offset and entry[0] < limit] if offset < limit else []
        batches = [bytes(batch) for _, batch in iter_batches(found)]
        assert batches == [entry[3] for entry in expected[: len(batches)]]
        assert sum(map(len, batches)) == len(found)
        assert len(found) <= bytes_max or (at_least_one and len(batches) == 1)
        if expected and (at_least_one or len(expected[0][3]) <= bytes_max):
            assert batches

    @rule(timestamp_ms=st.integers(0, 12_000))
    def find_timestamp(self, timestamp_ms: int) -> None:
        start = self.partition.log_start_offset
        expected = None
        for base, last, largest, _ in self.model:
            for offset in range(max(base, start), last + 1):
                if largest - (last - offset) >= timestamp_ms and expected is None:
                    expected = (largest - (last - offset), offset)
        assert finish_now(self.partition.offset_for_timestamp(timestamp_ms)) == expected

    @invariant()
    def the_offsets_agree(self) -> None:
        end = self.model[-1][1] + 1 if self.model else 0
        assert self.partition.log_end_offset == self.partition.high_watermark == end
        kept = [entry[3] for entry in self.model if entry[1] >= self.partition.log_start_offset]
        assert [bytes(batch) for _, batch in self.partition.batches()] == kept


TestPartitionMachine = PartitionMachine.TestCase
TestPartitionMachine.settings = settings(deadline=None, stateful_step_count=30, max_examples=60)


@pytest.mark.parametrize("ending", ["close", "kill"])
def test_what_retention_removed_stays_away_after_a_sync_and_a_power_cut(ending: str) -> None:
    """The names in the directory were not synced where nothing but a removal had happened since the last sync."""
    machine = PartitionMachine()
    machine.append(values=[b""], timestamp_ms=0)
    machine.retention_at_any_clock(clock_ms=501)
    machine.restart(ending=ending)
    machine.restart(ending="sync and power cut")
    machine.the_offsets_agree()
