"""Events first, the database after them: waiting until the writer of a database has got to one's own events.

The writer is any pipeline that keeps its positions in the database (`semel.run` into a target, an `Inbox`). A position
moves in the same database transaction as the rows, so when it is beyond an event, the rows of the event are there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, cast

from semel.bridges.addresses import is_postgres_url
from semel.bridges.database import POSITIONS, Database
from semel.bridges.positions import Position
from semel.bridges.postgres import PostgresDatabase
from semel.bridges.sqlite import SqliteDatabase
from semel.bridges.targets import DatabaseTarget
from semel.client.admin import Admin
from semel.client.partitions import TopicPartition
from semel.client.sender import Stored
from semel.errors import ConfigError, DatabaseUnreachable, InvalidState, RequestTimedOut, TopicRecreated

Written = Iterable[Stored] | Mapping[TopicPartition, int] | Mapping[tuple[str, int], int]
"""What `Producer.flush()` returned, or for each partition the offset after the last event."""

TIMEOUT_MS: Final = 10_000.0
_FIRST_PAUSE_S: Final = 0.005
_LONGEST_PAUSE_S: Final = 0.1


class ReadYourWrites:
    """Waits for the pipeline `name` that writes to the database `to`. May be used from several threads.

    `to` is the pipeline's target, or the URL of its Postgres or the path of its SQLite file. A standby of Postgres will
    do: then the rows are there, where they are to be read. Settings have Kafka's names.

    >>> with ReadYourWrites(to="app.db", name="billing", bootstrap="127.0.0.1:9092") as rows:  # doctest: +SKIP
    ...     producer.send("orders", b"...")
    ...     rows.wait(producer.flush())
    """

    def __init__(
        self,
        settings: Mapping[str, object] | None = None,
        *,
        to: DatabaseTarget | str | Path,
        name: str,
        **more_settings: object,
    ) -> None:
        self.name = name
        self._database = _open(to)
        self._settings = {**(settings or {}), **more_settings}
        self._admin: Admin | None = None
        self._lock = threading.Lock()
        """Of the connection to the database, and of that to Kafka: one thread at a time uses them."""

    def __enter__(self) -> Self:
        self._admin = Admin(self._settings)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if self._admin is not None:
                self._admin.close()
            self._admin = None
            self._database.close()

    def wait(self, written: Written, timeout_ms: float = TIMEOUT_MS) -> None:
        """Return when the pipeline has committed everything up to these events.

        Raises `RequestTimedOut` if it does not get there in time, and `TopicRecreated` if a topic is deleted meanwhile.
        """
        wanted = _ends_of(written)
        deadline = time.monotonic() + timeout_ms / 1000
        ids = self._topic_ids({place.topic for place in wanted})
        unknown = sorted(wanted.keys() - ids.keys())
        if unknown:
            topic, partition = unknown[0]
            raise ConfigError(f"Topic {topic!r} has no partition {partition}, so nothing can be waited for there.")
        pause_s = _FIRST_PAUSE_S
        while True:
            trouble: DatabaseUnreachable | None = None
            found: Mapping[TopicPartition, Position] | None = None
            try:
                found = self._load()
            except DatabaseUnreachable as error:
                trouble = error
            else:
                wanted = {place: end for place, end in wanted.items() if not _is_reached(found, place, end, ids[place])}
                if not wanted:
                    return
                self._check_topics(found, wanted, ids)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self._check_topics(None, wanted, ids)
                raise self._timed_out(found, wanted, ids, timeout_ms) from trouble
            time.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)

    def _load(self) -> Mapping[TopicPartition, Position] | None:
        """None if no pipeline has ever written to this database."""
        database = self._database
        with self._lock:
            if self._admin is None:
                raise InvalidState("It is not open: use it in a `with` block.")
            if isinstance(database, SqliteDatabase) and not Path(database.path).exists():
                return None  # to open it would make it
            return None if database.columns(POSITIONS) is None else database.load(self.name)

    def _topic_ids(self, topics: Iterable[str]) -> dict[TopicPartition, str | None]:
        with self._lock:
            if self._admin is None:
                raise InvalidState("It is not open: use it in a `with` block.")
            described = self._admin.describe_topics(*topics)
        return {
            TopicPartition(name, one.partition): None if topic.topic_id is None else str(topic.topic_id)
            for name, topic in described.items()
            for one in topic.partitions
        }

    def _check_topics(
        self,
        found: Mapping[TopicPartition, Position] | None,
        wanted: Mapping[TopicPartition, int],
        ids: Mapping[TopicPartition, str | None],
    ) -> None:
        """Raise if a topic is another one than at the beginning: the events were in the one that is gone.

        With `found`, only if a position is in another topic.
        """
        if found is not None and not any(
            place in found and found[place].topic_id not in (None, ids[place]) for place in wanted
        ):
            return
        now = self._topic_ids({place.topic for place in wanted})
        for place in wanted:
            if now.get(place) != ids[place]:
                raise TopicRecreated(
                    f"Topic {place.topic!r} was deleted and created again while its events were waited for. Whether "
                    f"pipeline {self.name!r} has written them before is not known. Look in the database."
                )

    def _timed_out(
        self,
        found: Mapping[TopicPartition, Position] | None,
        wanted: Mapping[TopicPartition, int],
        ids: Mapping[TopicPartition, str | None],
        timeout_ms: float,
    ) -> RequestTimedOut:
        place, end = min(wanted.items())
        at = None if found is None else found.get(place)
        where = f"{place.topic}-{place.partition}"
        if found is None:
            state = "no pipeline has ever written there, or the database could not be reached"
        elif not found:
            state = "no pipeline of that name has ever written there. Check name= and to="
        elif at is None:
            topics = ", ".join(sorted({one.topic for one in found}))
            state = f"it has written nothing of that partition yet; it reads {topics}"
        elif at.topic_id not in (None, ids[place]):
            state = "its position there is that of a topic of this name that was deleted"
        else:
            state = f"it stands at {at.next_offset}"
        return RequestTimedOut(
            f"Pipeline {self.name!r} has not written {where} up to offset {end} into {self._database.kind} within "
            f"{timeout_ms:,.0f} ms: {state}. The event is in Kafka and is not lost, if its transaction was committed; "
            "its rows come when the pipeline gets there. See whether the pipeline runs, or wait for longer."
        )


def wait_until_written(
    written: Written,
    *,
    to: DatabaseTarget | str | Path,
    name: str,
    timeout_ms: float = TIMEOUT_MS,
    settings: Mapping[str, object] | None = None,
    **more_settings: object,
) -> None:
    """Return when the pipeline `name` has written these events to its database. For many waits use `ReadYourWrites`.

    >>> producer.send("orders", b"...")  # doctest: +SKIP
    >>> wait_until_written(producer.flush(), to="app.db", name="billing",
    ...                    bootstrap="127.0.0.1:9092")  # doctest: +SKIP
    """
    with ReadYourWrites(settings, to=to, name=name, **more_settings) as rows:
        rows.wait(written, timeout_ms)


def _is_reached(
    found: Mapping[TopicPartition, Position] | None, place: TopicPartition, end: int, topic_id: str | None
) -> bool:
    at = (found or {}).get(place)
    if at is None or at.next_offset < end:
        return False
    # A position in a deleted topic of the same name says nothing.
    return at.topic_id is None or topic_id is None or at.topic_id == topic_id


def _ends_of(written: Written) -> dict[TopicPartition, int]:
    """For each partition, the offset after the last event."""
    if isinstance(written, Mapping):
        given = cast("Mapping[Any, int]", written)
        return {TopicPartition(*place): end for place, end in given.items()}
    ends: dict[TopicPartition, int] = {}
    for stored in written:
        if stored.base_offset < 0:
            raise ConfigError(
                f"The broker did not tell the offsets of the events in {stored.topic}-{stored.partition}, so they "
                "cannot be waited for. Write with acks=all."
            )
        place = TopicPartition(stored.topic, stored.partition)
        ends[place] = max(ends.get(place, 0), stored.base_offset + stored.record_count)
    return ends


def _open(to: DatabaseTarget | str | Path) -> Database:
    if isinstance(to, DatabaseTarget):
        return to.open()
    if isinstance(to, str) and (is_postgres_url(to) or " dbname=" in f" {to}"):
        return PostgresDatabase(to)
    if isinstance(to, str | Path) and "://" not in str(to):
        return SqliteDatabase(to)
    raise ConfigError(
        "to= must be the pipeline's target, a URL postgresql://... or the path of a SQLite file. Nothing was read."
    )
