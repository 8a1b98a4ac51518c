"""The options of `format("semel")`: those of Spark's Kafka source, checked, with a suggestion for a mistaken name."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from semel.client.config import FetchConfig, OffsetReset
from semel.client.partitions import TopicPartition
from semel.client.settings import parse_config
from semel.errors import ConfigError
from semel.spark.source_offsets import EARLIEST, LATEST, OFFSET_MAX, Offsets, parse_numbers, parse_partitions

_LOG: Final = logging.getLogger("semel.spark")
_OFFSETS_EXAMPLE: Final = '{"orders":{"0":23,"1":-2}} (-2 is earliest, -1 latest)'
_TIMES_EXAMPLE: Final = '{"orders":{"0":1731628800000,"1":1731628800000}} (milliseconds)'
_NAMES: Final = (
    "subscribe",
    "subscribePattern",
    "assign",
    "startingOffsets",
    "startingOffsetsByTimestamp",
    "startingTimestamp",
    "startingOffsetsByTimestampStrategy",
    "endingOffsets",
    "endingOffsetsByTimestamp",
    "endingTimestamp",
    "group",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "maxRecordsPerPartition",
    "includeHeaders",
    "failOnDataLoss",
)
IGNORED: Final = (
    "kafkaConsumer.pollTimeoutMs",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    "groupIdPrefix",
)
"""Of Spark's Kafka source; retries are bounded by kafka.default.api.timeout.ms here, and no group is joined."""
_STREAM_ONLY: Final = ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")
_BATCH_ONLY: Final = ("endingOffsets", "endingOffsetsByTimestamp", "endingTimestamp")
_KAFKA: Final = "kafka."
_FROM_CREATE_TABLE: Final = "provider"
"""Spark puts this among the options when it creates a table. When it reads the table, it gives no option at all."""
_NO_TABLES: Final = (
    "A table that was made by CREATE TABLE cannot be read by format('semel'), because Spark does not hand over the "
    "table's options. Use CREATE TEMPORARY VIEW name USING semel OPTIONS (...), or spark.read.format('semel')."
)
_UNITS_MS: Final = {
    "us": 0.001, "ms": 1, "": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Topics:
    """`subscribe`: these topics, with the partitions that they get later."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """`subscribePattern`: all topics whose whole name matches, also those that appear later."""

    regex: str


@dataclass(frozen=True, slots=True)
class Assigned:
    """`assign`: these partitions and no others."""

    partitions: frozenset[TopicPartition]


Subscription = Topics | Pattern | Assigned


@dataclass(frozen=True, slots=True)
class AtOffsets:
    """An offset for each partition; `LATEST` and `EARLIEST` stand for the ends."""

    offsets: Offsets


@dataclass(frozen=True, slots=True)
class AtTime:
    """The first record of this time or later, by partition or the same for all."""

    timestamp_ms: int | Offsets


@dataclass(frozen=True, slots=True)
class Committed:
    """Where a consumer group stands."""

    group: str


Bound = Literal["earliest", "latest"] | AtOffsets | AtTime | Committed


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What one `load()` asks for."""

    subscription: Subscription
    settings: Mapping[str, str] = field(repr=False)
    """Kafka's own settings, without the prefix; may hold a password."""
    starting: Bound | None = None
    ending: Bound | None = None
    starting_option: str = "startingOffsets"
    ending_option: str = "endingOffsets"
    uncommitted_reset: OffsetReset = "earliest"
    """Where a partition begins of which the group has committed nothing."""
    no_match: Literal["error", "latest"] = "error"
    """What to do where no record is as late as the time to start from."""
    max_offsets: int | None = None
    min_offsets: int | None = None
    max_trigger_delay_ms: float = 15 * 60_000
    min_partitions: int | None = None
    max_records_per_partition: int | None = None
    include_headers: bool = False
    fail_on_data_loss: bool = True
    given: frozenset[str] = frozenset()

    @property
    def fetch(self) -> FetchConfig:
        return parse_config(self.settings).fetch

    def for_batch(self) -> SourceOptions:
        """Checked as those of a batch query, with its defaults: from the earliest to the latest offset."""
        starting, ending = self.starting or "earliest", self.ending or "latest"
        if starting == "latest" or _has(starting, LATEST):
            raise ConfigError(
                f"{self.starting_option} is latest, where a batch query would find nothing: write earliest or offsets."
            )
        if ending == "earliest" or _has(ending, EARLIEST):
            raise ConfigError(
                f"{self.ending_option} is earliest, where a batch query would find nothing: write latest or offsets."
            )
        _check_order(starting, ending)
        if idle := sorted(self.given.intersection(_STREAM_ONLY)):
            _LOG.warning("%s count in streaming queries only: this batch query reads everything.", ", ".join(idle))
        return replace(self, starting=starting, ending=ending)

    def for_stream(self) -> SourceOptions:
        """Checked as those of a streaming query, with its default: new records only."""
        for name in _BATCH_ONLY:
            if name in self.given:
                raise ConfigError(f"{name} is for batch queries, a stream has no end: remove it, or use spark.read.")
        return replace(self, starting=self.starting or "latest")


def _has(bound: Bound, mark: int) -> bool:
    return isinstance(bound, AtOffsets) and mark in bound.offsets.values()


def _check_order(starting: Bound, ending: Bound) -> None:
    if not (isinstance(starting, AtOffsets) and isinstance(ending, AtOffsets)):
        return
    for partition, start in starting.offsets.items():
        end = ending.offsets.get(partition, LATEST)
        if 0 <= end < start:
            raise ConfigError(
                f"startingOffsets {start} of topic {partition.topic!r} partition {partition.partition} is behind "
                f"endingOffsets {end}: the end is the first offset that is not read."
            )


def parse_options(options: Mapping[str, str]) -> SourceOptions:
    """Read the options as Spark hands them over, names in any case.

    >>> options = parse_options({"kafka.bootstrap.servers": "localhost:9092", "SUBSCRIBE": "orders, payments"})
    >>> options.subscription, options.for_stream().starting, options.for_batch().starting
    (Topics(names=('orders', 'payments')), 'latest', 'earliest')
    """
    if _FROM_CREATE_TABLE in {name.lower() for name in options}:
        raise ConfigError(_NO_TABLES)
    by_name = {name.lower(): name for name in (*_NAMES, *IGNORED)}
    given: dict[str, str] = {}
    settings: dict[str, str] = {}
    for written, value in options.items():
        lowered = written.lower()
        if lowered in by_name:
            given[by_name[lowered]] = value.strip()
        elif lowered.startswith(_KAFKA):
            settings[lowered.removeprefix(_KAFKA)] = value
        else:
            raise ConfigError(_unknown(written))
    if "bootstrap.servers" not in settings and "metadata.broker.list" not in settings:
        missing = "kafka.bootstrap.servers is missing: write host:port of one or more brokers."
        raise ConfigError(missing if options else f"{missing} {_NO_TABLES}")
    return _read(given, settings)


def _unknown(written: str) -> str:
    if written.lower() in ("path", "paths"):
        return 'load() takes no path: name the topics with option("subscribe", ...).'
    by_lowered = {name.lower(): name for name in (*_NAMES, *IGNORED, "kafka.bootstrap.servers")}
    close = difflib.get_close_matches(written.lower(), by_lowered, n=1, cutoff=0.6)
    if close:
        return f"{written} is no option of format('semel'): did you mean {by_lowered[close[0]]}?"
    return f"{written} is no option of format('semel'): remove it, or write kafka.{written} if it is one of Kafka's."


def _read(given: Mapping[str, str], settings: dict[str, str]) -> SourceOptions:
    group = _group(given, settings)
    starting, starting_option = _bound("starting", given, group)
    ending, ending_option = _bound("ending", given, group)
    reset: OffsetReset = "earliest"
    if "auto.offset.reset" in settings:
        if not isinstance(starting, Committed):
            raise ConfigError(
                "kafka.auto.offset.reset only serves startingOffsets=committed: remove it, and write startingOffsets."
            )
        reset = parse_config(settings).fetch.auto_offset_reset
        del settings["auto.offset.reset"]
    parse_config(settings)
    max_offsets, min_offsets = _count(given, "maxOffsetsPerTrigger"), _count(given, "minOffsetsPerTrigger")
    if max_offsets is not None and min_offsets is not None and min_offsets > max_offsets:
        raise ConfigError(
            f"minOffsetsPerTrigger={min_offsets} is above maxOffsetsPerTrigger={max_offsets}: no batch could do both."
        )
    return SourceOptions(
        subscription=_subscription(given),
        settings=settings,
        starting=starting,
        ending=ending,
        starting_option=starting_option,
        ending_option=ending_option,
        uncommitted_reset=reset,
        no_match="latest" if _choice(given, "startingOffsetsByTimestampStrategy", "error", "latest") else "error",
        max_offsets=max_offsets,
        min_offsets=min_offsets,
        max_trigger_delay_ms=_duration_ms("maxTriggerDelay", given.get("maxTriggerDelay", "15m")),
        min_partitions=_count(given, "minPartitions"),
        max_records_per_partition=_count(given, "maxRecordsPerPartition"),
        include_headers=_choice(given, "includeHeaders", "false", "true"),
        fail_on_data_loss=not _choice(given, "failOnDataLoss", "true", "false"),
        given=frozenset(given),
    )


def _group(given: Mapping[str, str], settings: Mapping[str, str]) -> str | None:
    group, same = given.get("group"), settings.get("group.id")
    if group and same and group != same:
        raise ConfigError(f"group={group} and kafka.group.id={same} mean the same and differ: remove one of them.")
    return group or same


def _subscription(given: Mapping[str, str]) -> Subscription:
    ways = [name for name in ("subscribe", "subscribePattern", "assign") if name in given]
    if len(ways) != 1:
        what = "none is" if not ways else f"{' and '.join(ways)} are"
        raise ConfigError(f"One of subscribe, subscribePattern and assign says what to read, and {what} given.")
    [way] = ways
    if way == "assign":
        return Assigned(parse_partitions(way, given[way]))
    if not given[way].strip(" ,"):
        raise ConfigError(f"{way} is empty: write the topics to read.")
    if way == "subscribe":
        return Topics(tuple(dict.fromkeys(name.strip() for name in given[way].split(",") if name.strip())))
    try:
        re.compile(given[way])
    except re.error as error:
        raise ConfigError(f"subscribePattern={given[way]!r} is no regular expression ({error}).") from None
    return Pattern(given[way])


def _bound(
    side: Literal["starting", "ending"], given: Mapping[str, str], group: str | None
) -> tuple[Bound | None, str]:
    """The most precise of three options counts, as with Spark's Kafka source; and the name of the one that did."""
    if (name := f"{side}Timestamp") in given:
        return AtTime(_whole(name, given[name], 0, OFFSET_MAX)), name
    if (name := f"{side}OffsetsByTimestamp") in given:
        return AtTime(parse_numbers(name, given[name], 0, _TIMES_EXAMPLE)), name
    name = f"{side}Offsets"
    text = given.get(name)
    if text is None:
        return None, name
    match text.lower():
        case "earliest":
            return "earliest", name
        case "latest":
            return "latest", name
        case "committed" if group:
            return Committed(group), name
        case "committed":
            raise ConfigError(f"{name}=committed needs to know whose: write the group of consumers as kafka.group.id.")
        case _ if text.startswith("{"):
            return AtOffsets(parse_numbers(name, text, EARLIEST, _OFFSETS_EXAMPLE)), name
    raise ConfigError(f"{name}={text!r} is not understood: write earliest, latest, committed or {_OFFSETS_EXAMPLE}.")


def _choice(given: Mapping[str, str], name: str, usual: str, other: str) -> bool:
    """Whether it is the other one."""
    text = given.get(name, usual).lower()
    if text not in (usual, other):
        raise ConfigError(f"{name}={given[name]!r} is not understood: write {usual} or {other}.")
    return text == other


def _count(given: Mapping[str, str], name: str) -> int | None:
    return _whole(name, given[name], 1, OFFSET_MAX) if name in given else None


def _whole(name: str, text: str, low: int, high: int) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", text) or not low <= int(text) <= high:
        raise ConfigError(f"{name}={text!r} is not a whole number of at least {low}.")
    return int(text)


def _duration_ms(name: str, text: str) -> float:
    match = re.fullmatch(r"([0-9]{1,15})\s*([a-z]*)", text.lower())
    if match is None or match[2] not in _UNITS_MS:
        raise ConfigError(f"{name}={text!r} is no duration: write a number with its unit, such as 500ms, 30s or 15m.")
    return int(match[1]) * _UNITS_MS[match[2]]
