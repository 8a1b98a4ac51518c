"""What is killed, and when: the plan of a run, from its seed, and the moments that are waited for."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from semel.demo.orders import PARCELS, TOPICS
from semel.demo.pipelines import PLAIN, SEMEL, topic_of
from semel.demo.readers import Moments

Victim = Literal["driver", "executor", "broker"]
VICTIMS: Final[tuple[Victim, ...]] = ("driver", "executor", "broker")
ABOUT: Final[dict[Victim, str]] = {
    "driver": "the Spark driver with its JVM and all that they started",
    "executor": "the Python processes that run Spark's tasks, all at once",
    "broker": "the broker, which comes back a second later on the same disk",
}
Moment = Literal["plain-writes", "transaction-open"]
MOMENTS: Final[dict[Moment, str]] = {
    "plain-writes": "while the plain sink was writing parcels",
    "transaction-open": "while Semel's transaction was open",
}
_LOOK_S: Final = 0.005
_PATIENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Kill:
    """One that is planned."""

    victim: Victim
    moment: Moment


def plan_kills(seed: int) -> Iterator[Kill]:
    """Kills without end, the same for the same seed. Each round has one of each; the driver, which takes longest to
    come back, is last in it. The first driver dies in the middle of the plain sink's work, and then they take turns.

    >>> import itertools
    >>> [kill.victim for kill in itertools.islice(plan_kills(1), 6)].count("driver")
    2
    """
    chance = random.Random(seed)
    first: Moment = "plain-writes"
    second: Moment = "transaction-open"
    while True:
        others: list[Victim] = ["executor", "broker"]
        chance.shuffle(others)
        moments: list[Moment] = [first, second]
        chance.shuffle(moments)
        yield from (Kill(victim, moment) for victim, moment in zip(others, moments, strict=True))
        yield Kill("driver", first)
        first, second = second, first


def wait_moment(moments: Moments, moment: Moment, check: Callable[[], None]) -> bool:
    """Wait until such a write is under way; False if none came in a minute. `check` raises if all is over."""
    parcels = [topic_of(PLAIN, PARCELS)]
    begin = moments.stored(parcels)
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        check()
        if moment == "plain-writes":
            # Parcels are written last, and the batch is not over for Spark before all of them are.
            has_come = moments.stored(parcels) > begin
        else:
            has_come = moments.has_open_transaction(topic_of(SEMEL, topic) for topic in TOPICS)
        if has_come:
            return True
        time.sleep(_LOOK_S)
    return False
