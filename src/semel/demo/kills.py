"""What is killed, and when: the plan of a run, from its seed, and the moments that are waited for."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Final, Literal

from semel.demo.database import RowMoments
from semel.demo.orders import INPUT, PARCELS, TOPICS
from semel.demo.pipeline_names import PLAIN, SEMEL, topic_of
from semel.demo.readers import Moments
from semel.demo.tables import Tables

Victim = Literal["driver", "executor", "broker", "database", "relay"]
VICTIMS: Final[tuple[Victim, ...]] = ("driver", "executor", "broker", "database", "relay")
ABOUT: Final[dict[Victim, str]] = {
    "driver": "the Spark driver with its JVM and all that they started",
    "executor": "the Python processes that run Spark's tasks, all at once",
    "broker": "the broker, which comes back a second later on the same disk",
    "database": "all processes of the Postgres server, which comes back a second later on the same disk",
    "relay": "the relay, which brings orders from the shop's outbox table to Kafka",
}
Moment = Literal["plain-writes", "transaction-open", "plain-inserts", "rows-open", "orders-open"]
MOMENTS: Final[dict[Moment, str]] = {
    "plain-writes": "while the plain sink was writing parcels",
    "transaction-open": "while Semel's transaction in Kafka was open",
    "plain-inserts": "while the plain sink was inserting rows",
    "rows-open": "while Semel's transaction in Postgres was open",
    "orders-open": "while its transaction with new orders was open",
}
_LOOK_S: Final = 0.005
_PATIENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Kill:
    """One that is planned."""

    victim: Victim
    moment: Moment


def plan_kills(seed: int, *, has_server: bool) -> Iterator[Kill]:
    """Kills without end, the same for the same seed. Each round has one of each, the database only if it is a server.

    The driver, which takes longest to come back, is last in a round. The first one dies in the middle of the plain
    sink's work: it has inserted its rows by then, and Spark does not know that yet. Then they take turns.

    >>> import itertools
    >>> [kill.victim for kill in itertools.islice(plan_kills(1, has_server=True), 10)].count("driver")
    2
    """
    chance = random.Random(seed)
    first: Moment = "plain-writes"
    second: Moment = "transaction-open"
    first_rows: Moment = "plain-inserts"
    second_rows: Moment = "rows-open"
    while True:
        moments: list[Moment] = [first, second]
        chance.shuffle(moments)
        others = [Kill("executor", moments[0]), Kill("broker", moments[1]), Kill("relay", "orders-open")]
        if has_server:
            others.append(Kill("database", first_rows))
        chance.shuffle(others)
        yield from others
        yield Kill("driver", first)
        first, second = second, first
        first_rows, second_rows = second_rows, first_rows


def wait_moment(moments: Moments, tables: Tables, moment: Moment, check: Callable[[], None]) -> bool:
    """Wait until such a write is under way; False if none came in a minute. `check` raises if all is over."""
    if moment in ("plain-inserts", "rows-open"):
        with closing(RowMoments(tables)) as rows:
            return _wait(rows.has_plain_grown if moment == "plain-inserts" else rows.is_semel_writing, check)
    if moment in ("transaction-open", "orders-open"):
        topics = [INPUT] if moment == "orders-open" else [topic_of(SEMEL, topic) for topic in TOPICS]
        return _wait(lambda: moments.has_open_transaction(topics), check)
    # Parcels are written last, and the batch is not over for Spark before all of them are.
    parcels = [topic_of(PLAIN, PARCELS)]
    begin = moments.stored(parcels)
    return _wait(lambda: moments.stored(parcels) > begin, check)


def _wait(has_come: Callable[[], bool], check: Callable[[], None]) -> bool:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        check()
        if has_come():
            return True
        time.sleep(_LOOK_S)
    return False
