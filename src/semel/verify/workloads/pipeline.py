"""Consume, transform, produce: what copier and counters have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from semel.client.admin import Admin
from semel.client.fetcher import Fetcher
from semel.client.partitions import TopicPartition
from semel.verify.workloads.life import Life
from semel.verify.workloads.pipeline_worker import ExactlyOnce, Transform, is_member_of_group
from semel.verify.workloads.plain_workers import AtLeastOnce, AtMostOnce
from semel.verify.workloads.roles import live_as_source
from semel.verify.workloads.workload import Role, Workload


class Pipeline(Workload):
    """Sources fill `input`; workers read it and write `output`."""

    worker_role: str
    has_positions = True

    @property
    def input(self) -> str:
        return f"{self.prefix}-in"

    @property
    def output(self) -> str:
        return f"{self.prefix}-out"

    @property
    def group(self) -> str:
        return f"{self.prefix}-group"

    def topics(self) -> dict[str, int]:
        return {self.input: self.options.partitions, self.output: self.options.partitions}

    def work_roles(self) -> list[Role]:
        sources = Role("source", self.options.sources, "source")
        return [sources, Role(self.worker_role, self.options.workers, "worker")]

    def has_group(self, library: str) -> bool:
        return is_member_of_group(library, self.options)

    def backlog(self, settings: Mapping[str, Any]) -> int:
        """From the group's positions to the ends; nothing if only markers and aborted records lie in between."""
        places = [TopicPartition(self.input, index) for index in range(self.options.partitions)]
        with Admin(settings) as admin, Fetcher(settings) as fetcher:
            committed = admin.committed_offsets(self.group, places, require_stable=True)
            positions = {place: committed[place].offset if place in committed else 0 for place in places}
            fetcher.assign(positions)
            ends = fetcher.end_offsets()
            is_behind = any(table.num_rows for table in fetcher.read_until(ends))
        return sum(ends[place] - positions[place] for place in places) if is_behind else 0

    def work(self, life: Life) -> None:
        if life.spec.role == "source":
            live_as_source(life, self.source(life))
        else:
            workers = {"at-most-once": AtMostOnce, "at-least-once": AtLeastOnce, "exactly-once": ExactlyOnce}
            worker = workers[self.options.guarantee]
            worker(life, self.transform(life), self.input, self.numbers_of(self.input), self.group).live()

    @abstractmethod
    def source(self, life: Life) -> Any:
        """Makes batches of input: a function of their number of records."""

    @abstractmethod
    def transform(self, life: Life) -> Transform: ...
