"""Numbers in Prometheus's form: what the broker and the clients have in common, and the text that is scraped."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class Kind(enum.Enum):
    COUNTER = enum.auto()
    GAUGE = enum.auto()
    HISTOGRAM = enum.auto()


@dataclass(frozen=True)
class Family:
    """One metric: its values by the values of its labels.

    A histogram's values are cumulated counts by the labels and, last, the upper bound; its `totals` are sums.
    """

    kind: Kind
    name: str
    help_text: str
    values: Mapping[tuple[str, ...], float]
    labels: Sequence[str] = ()
    totals: Mapping[tuple[str, ...], float] = field(default_factory=dict)


def write_families(families: Sequence[Family], prefix: str = "") -> bytes:
    """The page with these metrics. `prefix` comes before each name.

    >>> print(write_families([Family(Kind.GAUGE, "topics", "Topics.", {(): 3})], "semel_").decode(), end="")
    # HELP semel_topics Topics.
    # TYPE semel_topics gauge
    semel_topics 3.0
    """
    from prometheus_client.exposition import generate_latest

    return generate_latest(Collected(families, prefix))  # type: ignore[arg-type]


def write_sample(family: Family, labels: Sequence[str], value: float, prefix: str = "") -> bytes:
    """One line of a counter or gauge. The library has no way to write some of a metric's values at a time."""
    named = ",".join(f'{name}="{_escaped(text)}"' for name, text in zip(family.labels, labels, strict=True))
    suffix = "_total" if family.kind is Kind.COUNTER else ""
    return f"{prefix}{family.name}{suffix}{{{named}}} {float(value)}\n".encode()


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


class Collected:
    """As much of a collector of `prometheus_client` as it takes to write a page, or to be registered."""

    def __init__(self, families: Sequence[Family], prefix: str = "") -> None:
        self._families = families
        self._prefix = prefix

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for one in self._families:
            name = self._prefix + one.name
            if one.kind is Kind.HISTOGRAM:
                yield _histogram(name, one)
                continue
            family_of = CounterMetricFamily if one.kind is Kind.COUNTER else GaugeMetricFamily
            family = family_of(name, one.help_text, labels=one.labels)
            for label_values, value in one.values.items():
                family.add_metric(label_values, value)
            yield family


def _histogram(name: str, one: Family) -> Any:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(name, one.help_text, labels=one.labels)
    for labels, total in one.totals.items():
        buckets = [(key[-1], count) for key, count in one.values.items() if key[:-1] == labels]
        family.add_metric(labels, buckets, total)
    return family
