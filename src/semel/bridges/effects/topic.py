"""One call for each record of some topics. The position is kept in the database of the claims, by an `Inbox`.

It is moved past a record only when the record's effect is done, dead or unknown. After a crash some records come again,
and the claims tell which of them need a call.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from semel.bridges.database import POSITIONS, Database
from semel.bridges.effects.calls import LOG, EffectRejected, Effects, Ending, check_key, check_synchronous
from semel.bridges.effects.lanes import Lane, LaneWorkers
from semel.bridges.effects.letters import EffectLetters
from semel.bridges.effects.rules import ENDED, Effect
from semel.bridges.inbox import Delivery, Inbox
from semel.client.dead_letters import DEAD_LETTER_MAX, describe_error
from semel.client.fetcher import Fetcher
from semel.client.offsets import Edge
from semel.client.partitions import TopicPartition
from semel.errors import ConfigError, InboxOvertaken, OffsetOutOfRange, RecordFailed, TooManyDeadLetters
from semel.session.dead_letter_box import origin
from semel.session.sigterm import SigtermWatch
from semel.session.transaction import Row, rows_of

_POLL_MS: Final = 500
_REFETCH_MS: Final = 5_000

EffectCall = Callable[[Row, str], object]
"""Gets the record and the idempotency key. Text that it returns is kept in the table."""
KeyOf = Callable[[Row], "str | bytes"]


@dataclass(slots=True)
class EffectsReport:
    """What a run has done."""

    records: int = 0
    """How many were read and are done with."""
    done: int = 0
    """Effects that were confirmed by this run."""
    skipped: int = 0
    """Records for which no call was made, because their effect had ended before."""
    dead: int = 0
    unknown: int = 0


@dataclass(frozen=True, slots=True)
class TopicOptions:
    """How `run` reads its topics and makes its calls."""

    settings: dict[str, object]
    topics: Collection[str]
    key: KeyOf | None = None
    order: Callable[[Row], Hashable] | None = None
    workers: int = 1
    dead_letter: str | None = None
    dead_letter_max: int | None = DEAD_LETTER_MAX
    start: Edge = "earliest"
    delivery_records_max: int = 500

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"workers={self.workers} would make no call: write 1 or more.")


def run_topic(
    effects: Effects,
    call: EffectCall,
    *,
    stop: threading.Event | None = None,
    idle_ms: float | None = None,
    topics: Collection[str],
    key: KeyOf | None = None,
    order: Callable[[Row], Hashable] | None = None,
    workers: int = 1,
    dead_letter: str | None = None,
    dead_letter_max: int | None = DEAD_LETTER_MAX,
    start: Edge = "earliest",
    delivery_records_max: int = 500,
    **settings: object,
) -> EffectsReport:
    """What `semel.effects.run` does, with claims by `effects`."""
    options = TopicOptions(
        settings, topics, key, order, workers, dead_letter, dead_letter_max, start, delivery_records_max
    )
    check_synchronous(call)
    _check_takes_row_and_key(call)
    return _TopicRun(effects, call, options, stop or threading.Event(), idle_ms).run()


def _check_takes_row_and_key(call: EffectCall) -> None:
    """A function of one argument would fail for every record, and each failure may be an unknown effect."""
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return  # a built-in function tells nothing about its arguments
    try:
        signature.bind(None, "")
    except TypeError as error:
        raise ConfigError(
            f"The function of effects.run is called with the record and its idempotency key, but {error}; no call was "
            "made. Write it as `def call(row, key): ...`."
        ) from error


class _EffectsInbox(Inbox):
    """An inbox that tells one topic from another that has its name."""

    def topic_id(self, row: Row) -> str | None:
        return self._positions[TopicPartition(row.topic, row.partition)].topic_id

    def topic_ids(self) -> dict[str, str | None]:
        return {partition.topic: at.topic_id for partition, at in self._positions.items()}


def _warn_of_other_name(database: Database, name: str, inbox: _EffectsInbox) -> None:
    """Claims belong to a name, so after a renaming every call is made again. Two names may also be meant."""
    if database.load(inbox.name):
        return
    for topic, topic_id in inbox.topic_ids().items():
        other = database.scalar(
            f"SELECT min(inbox) FROM {POSITIONS} WHERE topic = $1 AND topic_id = $2 AND inbox LIKE 'effects:%'",
            topic,
            topic_id,
        )
        if other is not None:
            LOG.warning(
                "Effects %r begin with topic %r, for whose records effects %r have made calls before: if this is the "
                "same program under another name, all of them are made again. Stop it then, and write the name of "
                "before.",
                name,
                topic,
                str(other).removeprefix("effects:"),
            )


@dataclass
class _TopicRun:
    effects: Effects
    call: EffectCall
    options: TopicOptions
    stop: threading.Event
    idle_ms: float | None
    report: EffectsReport = field(default_factory=EffectsReport)
    _counting: threading.Lock = field(default_factory=threading.Lock)
    _out_of_reach: set[str] = field(default_factory=set[str])
    """Effects to be called again whose records are no longer in their topics."""

    def run(self) -> EffectsReport:
        options = self.options
        sigterm = SigtermWatch(self.stop.set)
        with ExitStack() as stack:
            stack.callback(self.effects.close)
            database = stack.enter_context(self.effects.open_database())
            database.ensure_tables()
            self._letters = stack.enter_context(
                EffectLetters(self.effects.name, options.dead_letter, options.topics, options.settings)
            )
            self._inbox = stack.enter_context(
                _EffectsInbox(
                    database,
                    options.settings,
                    topics=options.topics,
                    name=f"effects:{self.effects.name}",
                    start=options.start,
                    delivery_records_max=options.delivery_records_max,
                )
            )
            _warn_of_other_name(database, self.effects.name, self._inbox)
            self._workers = stack.enter_context(
                LaneWorkers(options.workers, self._handle, self.effects.close, self.stop)
            )
            stack.callback(sigterm.end)
            sigterm.start()
            self._loop()
        sigterm.raise_exit()
        return self.report

    def _loop(self) -> None:
        last_record = time.monotonic()
        poll_ms = _POLL_MS if self.idle_ms is None else min(_POLL_MS, self.idle_ms)
        while not self.stop.is_set():
            self._workers.work_on([[row] for row in self._reopened()])
            delivery = self.effects.patiently(lambda: self._inbox.next(poll_ms))
            if delivery is None:
                if self.idle_ms is not None and (time.monotonic() - last_record) * 1000 >= self.idle_ms:
                    return
                continue
            self._workers.work_on(self._lanes(delivery.rows()))
            if self.stop.is_set():
                return  # some records may not have been worked on: they come again, and their claims are known
            self.effects.patiently(lambda delivery=delivery: self._move(delivery))
            last_record = time.monotonic()

    def _move(self, delivery: Delivery) -> None:
        try:
            with delivery:
                pass
        except InboxOvertaken:
            LOG.info("Another worker of effects %r has gone on from here; reading on from there.", self.effects.name)
        self.report.records += delivery.table.num_rows

    # -- records -----------------------------------------------------------------------------------------------------

    def _lanes(self, rows: Iterable[Row]) -> list[Lane]:
        order = self.options.order or _by_record_key
        lanes: dict[Hashable, list[Row]] = {}
        for row in rows:
            lanes.setdefault(order(row), []).append(row)
        return list(lanes.values())

    def _key_of(self, row: Row) -> str:
        try:
            if self.options.key is None:
                return self._default_key(row)
            made = self.options.key(row)
            if made is None:
                raise TypeError("the key function returned None")
            key = made.decode() if isinstance(made, bytes) else str(made)
            check_key(key)
            return key
        except Exception as error:
            raise RecordFailed(
                f"No idempotency key for the record in {origin(row)}: {describe_error(error)}. No call was made for "
                "it, and it comes again after a restart. Mend the key function, or pass dead_letter= to put such "
                "records aside.",
                topic=row.topic,
                partition=row.partition,
                offset=row.offset,
            ) from error

    def _default_key(self, row: Row) -> str:
        return default_key(self.effects.name, row, self._inbox.topic_id(row))

    def _handle(self, row: Row) -> None:
        call: EffectCall = self.call
        try:
            key = self._key_of(row)
        except RecordFailed as error:
            if self.options.dead_letter is None:
                raise
            # It has no key to be claimed by, so it is dead under the key of its place.
            key, call = self._default_key(row), _Refusal(error)
        ending = self.effects.call_until_ended(key, lambda key: call(row, key), pause=self._workers.pause, row=row)
        if ending.effect.state not in ENDED:
            return
        if ending.effect.state == "dead" and not ending.effect.is_reported:
            self._letters.send(row, ending.effect)
            self.effects.retry(lambda table: table.mark_reported(key))
        self._count(ending)

    def _count(self, ending: Ending) -> None:
        effect, report = ending.effect, self.report
        with self._counting:
            if not ending.is_new:
                report.skipped += 1
                return
            setattr(report, effect.state, getattr(report, effect.state) + 1)
        if effect.state == "done":
            return
        LOG.warning("Effect %r is %s after %d attempts: %s", effect.key, effect.state, effect.attempts, effect.error)
        limit = self.options.dead_letter_max
        if limit is not None and report.dead + report.unknown > limit:
            raise TooManyDeadLetters(
                f"More than dead_letter_max={limit} effects of {self.effects.name!r} were given up or are unknown; the "
                f"last error was: {effect.error}. They are in table semel_effects; resolve(key, done=False) makes such "
                "a call again. Mend the cause, or raise dead_letter_max if so many are expected."
            )

    # -- effects that a person wants to be called again --------------------------------------------------------------

    def _reopened(self) -> list[Row]:
        effects = self.effects.retry(lambda table: table.find_reopened())
        found = [self._find_record(one) for one in effects if one.topic in self.options.topics]
        return [row for row in found if row is not None]

    def _find_record(self, effect: Effect) -> Row | None:
        if effect.key in self._out_of_reach or effect.topic is None:
            return None
        assert effect.partition is not None
        assert effect.offset is not None
        with Fetcher(self.options.settings) as fetcher:
            fetcher.assign({(effect.topic, effect.partition): effect.offset})
            try:
                row = next(rows_of(fetcher.read(_REFETCH_MS).slice(0, 1)), None)
            except OffsetOutOfRange:
                row = None
        if row is None or row.offset != effect.offset or self._claim_key(row) != effect.key:
            LOG.error(
                "Effect %r cannot be called again: its record is no longer in its topic, or has another key now.",
                effect.key,
            )
            self._out_of_reach.add(effect.key)
            return None
        return row

    def _claim_key(self, row: Row) -> str:
        """The key under which its effect is in the table."""
        try:
            return self._key_of(row)
        except RecordFailed:
            return self._default_key(row)


@dataclass(frozen=True, slots=True)
class _Refusal:
    """In place of a call for a record that has no key."""

    error: RecordFailed

    def __call__(self, row: Row, key: str) -> None:
        raise EffectRejected(str(self.error.__cause__ or self.error))


def default_key(name: str, row: Row, topic_id: str | None) -> str:
    """The place of the record, and which of two topics of one name it is in.

    >>> default_key("mail", Row("orders", 0, 17, 0, None, None), None)
    'mail/orders-0-17'
    """
    return f"{name}/{row.topic}-{row.partition}-{row.offset}" + ("" if topic_id is None else f"/{topic_id}")


def _by_record_key(row: Row) -> Hashable:
    """Records without a key have only the order of their partition."""
    return (row.topic, row.partition) if row.key is None else (row.topic, row.partition, row.key)
