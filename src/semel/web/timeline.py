"""Open transactions on a timeline: who holds which partitions, and since when. Pure.

The scale is logarithmic, for one transaction may hang since yesterday while others are open for a tenth of a second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from semel.client.partitions import TopicPartition
from semel.inspect.hanging import OpenTransaction
from semel.inspect.shown import show_span
from semel.inspect.transactions import HeldPartition, KnownTransaction

_TICKS_MS: Final = (1_000, 10_000, 60_000, 600_000, 3_600_000, 6 * 3_600_000, 86_400_000, 7 * 86_400_000)
_SPAN_MS_MIN: Final = 60_000
_UNIT_MS: Final = 250.0
_ORDER: Final = {"hanging": 0, "unknown": 1, "alive": 2}


@dataclass(frozen=True, slots=True)
class OpenBar:
    """An open transaction: what its coordinator knows, and the partitions where it holds readers back."""

    transactional_id: str | None
    producer_id: int
    producer_epoch: int
    state: str
    """The coordinator's; "unknown" if none lists it."""
    standing: str
    since_ms: int | None
    timeout_ms: int | None
    coordinator: int | None
    partitions: tuple[TopicPartition, ...]
    held: tuple[HeldPartition, ...]

    @property
    def holder(self) -> OpenTransaction | None:
        return self.held[0].holder if self.held else None


def open_bars(known: Iterable[KnownTransaction], held: Iterable[HeldPartition]) -> list[OpenBar]:
    """Those that hang first, then the oldest."""
    by_producer: dict[int, list[HeldPartition]] = {}
    for one in held:
        if one.holder is not None:
            by_producer.setdefault(one.holder.producer.producer_id, []).append(one)
    found: list[OpenBar] = []
    for transaction in known:
        told = transaction.description
        # What hangs is no part of the transaction that the coordinator knows, so it has a bar of its own.
        here = tuple(one for one in by_producer.get(told.producer_id, []) if _standing(one) == "alive")
        found.append(
            OpenBar(
                told.transactional_id,
                told.producer_id,
                told.producer_epoch,
                told.state,
                "alive",
                told.start_time_ms,
                told.timeout_ms,
                transaction.coordinator,
                told.partitions,
                here,
            )
        )
    listed = {one.producer_id for one in found}
    for producer_id, places in by_producer.items():
        left = tuple(one for one in places if _standing(one) != "alive" or producer_id not in listed)
        if left:
            found.append(_unlisted(producer_id, left))
    return sorted(found, key=lambda bar: (_ORDER.get(bar.standing, 3), bar.since_ms or math.inf))


def _standing(held: HeldPartition) -> str:
    return "unknown" if held.holder is None else held.holder.standing


def _unlisted(producer_id: int, places: Sequence[HeldPartition]) -> OpenBar:
    worst = min(places, key=lambda one: _ORDER.get(_standing(one), 3))
    holder = worst.holder
    assert holder is not None, "it was found by its producer"
    times = [one.since_ms for one in places if one.since_ms is not None]
    return OpenBar(
        holder.transactional_id,
        producer_id,
        holder.producer.producer_epoch,
        holder.state or "unknown",
        holder.standing,
        min(times, default=None),
        None,
        None,
        tuple(TopicPartition(one.topic, one.partition) for one in places),
        tuple(places),
    )


@dataclass(frozen=True, slots=True)
class Tick:
    """A point on the axis."""

    at: float
    """From 0, the oldest, to 100, now."""
    label: str


@dataclass(frozen=True, slots=True)
class Scale:
    """Where a time lies between the oldest transaction and now.

    >>> scale = Scale(now_ms=100_000, span_ms=60_000)
    >>> scale.at(40_000), scale.at(100_000), scale.at(None)
    (0.0, 100.0, 100.0)
    """

    now_ms: float
    span_ms: float

    def at(self, time_ms: float | None) -> float:
        age_ms = 0.0 if time_ms is None else min(max(0.0, self.now_ms - time_ms), self.span_ms)
        return round(100 * (1 - math.log1p(age_ms / _UNIT_MS) / math.log1p(self.span_ms / _UNIT_MS)), 2)

    @property
    def ticks(self) -> list[Tick]:
        inside = [one for one in _TICKS_MS if one < self.span_ms * 0.7]
        return [*(Tick(self.at(self.now_ms - one), show_span(one)) for one in reversed(inside)), Tick(100.0, "now")]


def scale_of(bars: Iterable[OpenBar], now_ms: float) -> Scale:
    """Wide enough for all of them."""
    ages = [now_ms - bar.since_ms for bar in bars if bar.since_ms is not None]
    return Scale(now_ms, max(_SPAN_MS_MIN, *ages) if ages else _SPAN_MS_MIN)
