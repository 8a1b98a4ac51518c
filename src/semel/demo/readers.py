"""Those who read what the pipelines write, as their users would (committed records only): one live, one thorough."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from semel.client.fetcher import Fetcher
from semel.demo.judgement import half_orders
from semel.demo.orders import INPUT, INVOICES, PARCELS, TOPICS
from semel.demo.pipeline_names import PIPELINES, topic_of

PARTITIONS: Final = 2
_WAIT_MS: Final = 250.0


def partitions_of(*topics: str) -> list[tuple[str, int]]:
    return [(topic, partition) for topic in topics for partition in range(PARTITIONS)]


@dataclass(slots=True)
class Sample:
    """What the live reader got at one moment: invoices it had not seen before, and those it had."""

    at: float
    new: int
    repeated: int


@dataclass(slots=True)
class _Seen:
    samples: list[Sample] = field(default_factory=list[Sample])
    orders: set[bytes] = field(default_factory=set[bytes])
    repeated: int = 0


class LiveReader(threading.Thread):
    """Follows the orders, and the invoices of both pipelines, while they are written."""

    def __init__(self, bootstrap: str) -> None:
        super().__init__(name="demo-reader", daemon=True)
        self._servers = bootstrap
        self._is_over = threading.Event()
        self._seen = {pipeline: _Seen() for pipeline in PIPELINES}
        self._relayed = _Seen()
        self.error: Exception | None = None

    @property
    def relayed(self) -> int:
        """How many of the shop's orders are in Kafka."""
        return len(self._relayed.orders)

    def orders(self, pipeline: str) -> int:
        return len(self._seen[pipeline].orders)

    def repeated(self, pipeline: str) -> int:
        return self._seen[pipeline].repeated

    def samples(self, pipeline: str) -> list[Sample]:
        return self._seen[pipeline].samples

    def run(self) -> None:
        try:
            self._follow()
        except Exception as error:  # told in the thread that waits for this one
            self.error = error

    def finish(self) -> None:
        self._is_over.set()
        self.join()
        if self.error is not None:
            raise self.error

    def _follow(self) -> None:
        by_topic = {topic_of(pipeline, INVOICES): self._seen[pipeline] for pipeline in PIPELINES}
        by_topic[INPUT] = self._relayed
        with Fetcher({"bootstrap.servers": self._servers}) as fetcher:
            fetcher.assign(dict.fromkeys(partitions_of(*by_topic), 0))
            while not self._is_over.is_set():
                for records in fetcher.fetch(_WAIT_MS):
                    seen = by_topic[records.topic]
                    keys: list[bytes] = records.table["key"].to_pylist()
                    before = len(seen.orders)
                    seen.orders.update(keys)
                    new = len(seen.orders) - before
                    seen.repeated += len(keys) - new
                    seen.samples.append(Sample(time.monotonic(), new, len(keys) - new))


def read_values(bootstrap: str, pipeline: str) -> dict[str, Counter[bytes]]:
    """Everything that a pipeline has written, by topic."""
    return {
        topic: Counter(_read(bootstrap, topic_of(pipeline, topic), "value"))  # one after another: they fit into memory
        for topic in TOPICS
    }


def read_orders(bootstrap: str) -> Counter[bytes]:
    """The numbers of the orders that the relay has brought to Kafka, and how often."""
    return Counter(_read(bootstrap, INPUT, "key"))


def look_for_half_orders(bootstrap: str) -> dict[str, set[bytes]]:
    """By pipeline, the orders that a reader sees half of. To be asked while no pipeline runs: it must be still."""
    return {
        pipeline: half_orders(
            *(_read(bootstrap, topic_of(pipeline, topic), "key") for topic in (INVOICES, PARCELS)),
        )
        for pipeline in PIPELINES
    }


def _read(bootstrap: str, topic: str, column: str) -> list[bytes]:
    with Fetcher({"bootstrap.servers": bootstrap}) as fetcher:
        fetcher.assign(dict.fromkeys(partitions_of(topic), 0))
        return [value for table in fetcher.read_until(fetcher.end_offsets()) for value in table[column].to_pylist()]


class Moments:
    """Knows when a write is under way, by the ends of the topics alone."""

    def __init__(self, bootstrap: str) -> None:
        self._stored = Fetcher({"bootstrap.servers": bootstrap, "isolation.level": "read_uncommitted"})
        self._visible = Fetcher({"bootstrap.servers": bootstrap})

    def close(self) -> None:
        self._stored.close()
        self._visible.close()

    def stored(self, topics: Iterable[str]) -> int:
        """How far the logs of these topics go, all partitions together."""
        return sum(self._stored.offsets_for(partitions_of(*topics), "latest").values())

    def has_open_transaction(self, topics: Iterable[str]) -> bool:
        """Whether there is something in these topics that readers of committed records must wait for."""
        partitions = partitions_of(*topics)
        visible = self._visible.offsets_for(partitions, "latest")
        stored = self._stored.offsets_for(partitions, "latest")
        return any(stored[partition] > visible[partition] for partition in visible)
