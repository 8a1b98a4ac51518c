"""One run of the demo: start everything, kill it by plan while orders come in, let it finish, and judge."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from semel.broker.process import Broker
from semel.client.admin import Admin
from semel.demo.database import DemoDatabase
from semel.demo.driver_process import DriverProcess
from semel.demo.judgement import RelayTally, TableTally, Tally, judge, judge_relay, judge_table
from semel.demo.kills import ABOUT, MOMENTS, VICTIMS, Kill, Victim, plan_kills, wait_moment
from semel.demo.orders import INPUT, TOPICS, Order, expected, expected_sales
from semel.demo.pipeline_names import PIPELINES, PLAIN, SEMEL, topic_of
from semel.demo.readers import (
    PARTITIONS,
    LiveReader,
    Moments,
    Sample,
    look_for_half_orders,
    read_orders,
    read_values,
)
from semel.demo.relay_process import RelayProcess
from semel.demo.shop import Shop
from semel.demo.tables import Kind
from semel.demo.victims import kill_workers
from semel.errors import RequestTimedOut

ORDERS_PER_SECOND: Final = 300
_AWAY_S: Final = 1.0
_MARKERS_S: Final = 0.3
_WELL_S: Final = 240.0
"""A machine that is busy with other things takes minutes for what takes seconds on a quiet one."""
_LOOK_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What a run is asked for."""

    folder: Path
    seconds: float
    seed: int
    database: Kind = "postgres"

    @property
    def command(self) -> str:
        """For the same orders and kills again."""
        return f"semel demo --seconds {self.seconds:g} --seed {self.seed} --database {self.database}"


@dataclass(slots=True)
class Struck:
    """A kill that was carried out. Times are seconds since the start."""

    victim: Victim
    at: float
    note: str
    torn: dict[str, int] = field(default_factory=dict[str, int])
    back_at: float | None = None
    """When both pipelines had finished a batch again."""


@dataclass(slots=True)
class Result:
    """What is shown in the end."""

    settings: DemoSettings
    tallies: dict[str, Tally]
    table_tallies: dict[str, TableTally]
    relay_tally: RelayTally
    database: str
    """Which one it was: "Postgres" or "SQLite"."""
    kills: list[Struck]
    samples: dict[str, list[Sample]]
    """What the live reader got, by pipeline; times are seconds since the start."""
    fed: list[tuple[float, int]]
    """How many orders the shop had committed by when."""
    failures: Counter[str]
    """How often Spark's query of a pipeline stopped with an error and was started again."""
    seconds: float = 0.0

    @property
    def is_exactly_once(self) -> bool:
        """Whether everything that Semel wrote is there once: the relayed orders, the records and the rows."""
        judged = (self.relay_tally, self.tallies[SEMEL], self.table_tallies[SEMEL])
        return all(tally.is_exactly_once for tally in judged)

    @property
    def exit_code(self) -> int:
        """1 if Semel's column or its relay is not all zeros, 2 if the plain one has nothing to compare it with.

        In the topics and in the table: a run that shows only one of them has not shown what it is for.
        """
        if not self.is_exactly_once:
            return 1
        return 0 if self.tallies[PLAIN].repeated and self.table_tallies[PLAIN].repeated else 2


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is, for people who watch it."""

    elapsed_s: float
    stage: str
    sent: int
    done: dict[str, int]
    repeated: dict[str, int]
    kills: dict[Victim, int]


class DemoRun:
    """Used once. `watch` is called a few times a second, and `note` once, when the database is there."""

    def __init__(
        self, settings: DemoSettings, watch: Callable[[Progress], None], note: Callable[[DemoDatabase], None]
    ) -> None:
        self._settings = settings
        self._watch = watch
        self._note = note
        self._began = time.monotonic()
        self._stage = "starting"
        self._broker = Broker(data=settings.folder / "broker")
        self._database = DemoDatabase(settings.database, settings.folder)
        self._driver: DriverProcess | None = None
        self._relay: RelayProcess | None = None
        self._kills: list[Struck] = []
        self._torn: dict[str, set[bytes]] = {pipeline: set() for pipeline in PIPELINES}
        self._lock = threading.Lock()
        self._batches: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._last_watched = 0.0

    def run(self) -> Result:
        """Everything; whatever ends it, no process is left."""
        with self._database, self._broker:
            try:
                return self._run()
            except BaseException:
                self._broker.kill()  # after Ctrl-C nobody wants to wait for an orderly end
                raise
            finally:
                if self._driver is not None:
                    self._driver.kill()
                if self._relay is not None:
                    self._relay.kill()

    def _run(self) -> Result:
        settings, bootstrap = self._settings, self._broker.bootstrap
        self._note(self._database)
        with Admin({"bootstrap.servers": bootstrap}) as admin:
            topics = [topic_of(pipeline, topic) for pipeline in PIPELINES for topic in TOPICS]
            admin.create_topics(INPUT, *topics, partitions=PARTITIONS)
        self._reader = LiveReader(bootstrap)
        tables = self._database.tables
        self._shop = Shop(tables, seed=settings.seed, per_second=ORDERS_PER_SECOND, done=self._done)
        self._shop.create_tables()
        try:
            orders = self._sell_and_kill()
        except BaseException:
            self._shop.abandon()
            raise
        wanted = expected(orders)
        tallies = {
            pipeline: judge(len(orders), wanted, read_values(bootstrap, pipeline), self._torn[pipeline])
            for pipeline in PIPELINES
        }
        sales = expected_sales(orders)
        table_tallies = {pipeline: judge_table(sales, tables.read(pipeline)) for pipeline in PIPELINES}
        samples = {
            pipeline: [Sample(one.at - self._began, one.new, one.repeated) for one in self._reader.samples(pipeline)]
            for pipeline in PIPELINES
        }
        fed = [(at - self._began, count) for at, count in self._shop.history]
        return Result(
            settings=settings,
            tallies=tallies,
            table_tallies=table_tallies,
            relay_tally=judge_relay({order.key for order in orders}, read_orders(bootstrap)),
            database=self._database.title,
            kills=self._kills,
            samples=samples,
            fed=fed,
            failures=self._failures,
            seconds=self._now(),
        )

    def _sell_and_kill(self) -> list[Order]:
        """Everything until both pipelines have ended; returns the orders that the shop has committed."""
        self._start_driver()
        self._start_relay()
        self._shop.start()
        self._reader.start()
        self._kill_by_plan()
        self._stage = "no more orders; both work off what there is"
        orders = self._shop.finish()
        self._wait(lambda: self._reader.relayed >= len(orders), "did not get all orders")
        self._finish_driver()
        self._stage = "counting"
        self._tell()
        self._reader.finish()
        return orders

    # The kills.

    def _kill_by_plan(self) -> None:
        moments = Moments(self._broker.bootstrap)
        try:
            for kill in plan_kills(self._settings.seed, has_server=self._database.can_be_killed):
                self._stage = "both at work" if self._kills else "Spark is starting"
                self._wait_well()
                is_over = self._now() >= self._settings.seconds
                if is_over and {struck.victim for struck in self._kills} == set(self._victims()):
                    return
                self._stage = f"next: kill -9 for the {kill.victim}, {MOMENTS[kill.moment].replace('was', 'is')}"
                has_come = wait_moment(moments, self._database.tables, kill.moment, self._check)
                self._strike(kill, MOMENTS[kill.moment] if has_come else "at no special moment")
        finally:
            moments.close()

    def _victims(self) -> list[Victim]:
        return [victim for victim in VICTIMS if victim != "database" or self._database.can_be_killed]

    def _strike(self, kill: Kill, note: str) -> None:
        struck = Struck(kill.victim, self._now(), note)
        if kill.victim == "broker":
            self._broker.kill()
        elif kill.victim == "executor":
            struck.note += f", {kill_workers(self._running().process_id)} processes"
        elif kill.victim == "database":
            struck.note += f", {self._database.kill()} processes"
        elif kill.victim == "relay":
            self._relaying().kill()
        else:
            struck.note += f", {self._running().kill()} processes"
        with self._lock:
            self._kills.append(struck)
            self._batches.clear()
        self._stage = f"kill -9: {ABOUT[kill.victim]}"
        self._tell()
        if kill.victim == "broker":
            time.sleep(_AWAY_S)
            self._broker.start()
        elif kill.victim == "database":
            time.sleep(_AWAY_S)
            self._database.start()
        elif kill.victim == "relay":
            time.sleep(_AWAY_S)
            self._start_relay()
        elif kill.victim == "driver":
            time.sleep(_MARKERS_S)  # a commit that the broker has been told of reaches all partitions
            for pipeline, orders in look_for_half_orders(self._broker.bootstrap).items():
                struck.torn[pipeline] = len(orders)
                self._torn[pipeline] |= orders
            self._start_driver()

    # The relay and the driver.

    def _start_relay(self) -> None:
        self._relay = RelayProcess(self._broker.bootstrap, self._database.tables, self._settings.folder)

    def _relaying(self) -> RelayProcess:
        assert self._relay is not None
        return self._relay

    def _start_driver(self) -> None:
        self._driver = DriverProcess(self._broker.bootstrap, self._database.tables, self._settings.folder, self._listen)

    def _running(self) -> DriverProcess:
        assert self._driver is not None
        return self._driver

    def _listen(self, event: dict[str, Any]) -> None:
        with self._lock:
            if event["event"] == "batch":
                self._batches[event["pipeline"]] += 1
                if self._kills and self._kills[-1].back_at is None and self._is_well():
                    self._kills[-1].back_at = self._now()
            elif event["event"] == "failed":
                self._failures[event["pipeline"]] += 1

    def _is_well(self) -> bool:
        return all(self._batches[pipeline] for pipeline in PIPELINES)

    def _wait_well(self) -> None:
        self._wait(self._is_well, "did not finish a batch each")

    def _finish_driver(self) -> None:
        driver = self._running()
        driver.ask_to_finish()
        self._wait(driver.has_finished, "did not come to the end of their input")

    def _wait(self, is_so: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + _WELL_S
        while not is_so():
            self._check()
            if time.monotonic() > deadline:
                raise RequestTimedOut(
                    f"The pipelines {otherwise} within {_WELL_S:.0f} s, so nothing was shown. Is this machine busy? "
                    f"What Spark says is in {self._settings.folder / 'driver.log'} (--keep leaves it there)."
                )
            time.sleep(_LOOK_S)

    # For those who watch.

    def _done(self) -> int:
        """Orders that are through in both pipelines."""
        return min(self._reader.orders(pipeline) for pipeline in PIPELINES)

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _check(self) -> None:
        """Raise if something has ended by itself, and let people know how far it is."""
        self._running().has_finished()
        self._relaying().check()
        for thread in (self._shop, self._reader):
            if thread.error is not None:
                raise thread.error
        if time.monotonic() - self._last_watched > 0.2:
            self._tell()

    def _tell(self) -> None:
        self._last_watched = time.monotonic()
        struck = [one.victim for one in self._kills]
        self._watch(
            Progress(
                elapsed_s=self._now(),
                stage=self._stage,
                sent=len(self._shop.sent),
                done={pipeline: self._reader.orders(pipeline) for pipeline in PIPELINES},
                repeated={pipeline: self._reader.repeated(pipeline) for pipeline in PIPELINES},
                kills={victim: struck.count(victim) for victim in self._victims()},
            )
        )
