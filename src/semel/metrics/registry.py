"""Counters, gauges and histograms of this process. They cost a lock and a dictionary entry, once a transaction."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from semel.metrics.families import Family, Kind

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metric:
    """One metric, with a value for each combination of its labels that has been met."""

    def __init__(
        self,
        lock: threading.Lock,
        kind: Kind,
        name: str,
        help_text: str,
        labels: Sequence[str],
        bounds: Sequence[float],
    ) -> None:
        self.kind, self.name, self.help_text, self.labels = kind, name, help_text, tuple(labels)
        self._lock = lock
        self._bounds = tuple(bounds)
        self._values: dict[tuple[str, ...], float] = {}
        self._buckets: dict[tuple[str, ...], list[int]] = {}

    def add(self, *labels: str, amount: float = 1) -> None:
        """Let a counter grow."""
        with self._lock:
            self._values[labels] = self._values.get(labels, 0) + amount

    def set(self, *labels: str, value: float) -> None:
        """What a gauge shows from now on."""
        with self._lock:
            self._values[labels] = value

    def observe(self, *labels: str, value: float) -> None:
        """Add one observation to a histogram."""
        with self._lock:
            counts = self._buckets.setdefault(labels, [0] * (len(self._bounds) + 1))
            counts[bisect_left(self._bounds, value)] += 1
            self._values[labels] = self._values.get(labels, 0) + value

    def family(self) -> Family:
        """How it stands now."""
        with self._lock:
            values = dict(self._values)
            buckets = {labels: list(counts) for labels, counts in self._buckets.items()}
        if self.kind is not Kind.HISTOGRAM:
            return Family(self.kind, self.name, self.help_text, values, self.labels)
        names = (*map(str, self._bounds), "+Inf")
        cumulated = {
            (*labels, bound): float(count)
            for labels, counts in buckets.items()
            for bound, count in zip(names, accumulate(counts), strict=True)
        }
        return Family(self.kind, self.name, self.help_text, cumulated, self.labels, values)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self._buckets.clear()


class Registry:
    """All metrics of a process.

    >>> registry = Registry()
    >>> sent = registry.counter("sent", "Letters sent.", ["to"])
    >>> sent.add("Rome")
    >>> registry.families()[0].values
    {('Rome',): 1}
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics: dict[str, Metric] = {}

    def counter(self, name: str, help_text: str, labels: Sequence[str]) -> Metric:
        return self._add(Kind.COUNTER, name, help_text, labels)

    def gauge(self, name: str, help_text: str, labels: Sequence[str]) -> Metric:
        return self._add(Kind.GAUGE, name, help_text, labels)

    def histogram(self, name: str, help_text: str, labels: Sequence[str], bounds: Sequence[float] = SECONDS) -> Metric:
        return self._add(Kind.HISTOGRAM, name, help_text, labels, bounds)

    def _add(
        self, kind: Kind, name: str, help_text: str, labels: Sequence[str], bounds: Sequence[float] = ()
    ) -> Metric:
        assert name not in self._metrics, f"{name} is there already"
        metric = self._metrics[name] = Metric(self._lock, kind, name, help_text, labels, bounds)
        return metric

    def families(self) -> list[Family]:
        return [metric.family() for metric in self._metrics.values()]

    def clear(self) -> None:
        """Forget all values; for tests."""
        for metric in self._metrics.values():
            metric.clear()
