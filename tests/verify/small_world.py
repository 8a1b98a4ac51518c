"""A whole run of a workload in this process, small and quick: broker and roles in threads, the judge, the checker.

Nothing is pretended: roles, client, broker, judge and checker are those of `semel verify`. Only who acts when is said
by the test: a role can be held up, or killed, at a moment of its transactions.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from semel.client.admin import Admin
from semel.errors import Fenced
from semel.testing.embedded import EmbeddedBroker
from semel.verify.checker import check
from semel.verify.clients.face import (
    NOTHING,
    Clients,
    Incoming,
    Integers,
    Outcome,
    Outgoing,
    Reader,
    Surroundings,
    TransactionalWriter,
)
from semel.verify.clients.libraries import open_clients
from semel.verify.history import History, Isolation, Process
from semel.verify.judge import Judge
from semel.verify.verdict import Verdict
from semel.verify.workloads.life import Life, Stopped
from semel.verify.workloads.workload import WorkerPlan, Workload
from semel.wire import Api

WAIT_S = 30.0
POLL_MS = 25
"""Readers of these runs wait no longer than so for something new."""
EMPTY_POLLS_MAX = 60
FULL_POLLS_MAX = 100
"""A reader that a bug keeps from its end, or sends back again and again, is given up after so many."""
_FEW_PARTITIONS = {"offsets.topic.num.partitions": "1", "transaction.state.log.num.partitions": "1"}


class Killed(BaseException):
    """Ends a role where it stands, as SIGKILL does a process: it cannot be caught as an error."""


class World:
    """A broker with the topics of a workload, and those who live in it."""

    def __init__(
        self,
        folder: Path,
        workload: Workload,
        *,
        seed: int,
        config: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.workload = workload
        self.broker = EmbeddedBroker(config={**_FEW_PARTITIONS, **(config or {})}, fsync="never")
        self._plan = workload.plan()
        self._workers = {worker.name: worker for worker in self._plan.workers}
        self._manifest = self._plan.manifest()
        self._manifest.processes.append(Process(0, "judge", "judge"))
        self._folder = folder
        self._seed = seed
        self._settings = dict(settings or {})
        self._players: list[Player] = []
        self.bootstrap = ""
        """What clients are told; a test may put a proxy there."""

    def __enter__(self) -> Self:
        self.broker.start()
        self.bootstrap = self.broker.bootstrap
        with Admin({"bootstrap.servers": self.broker.bootstrap}) as admin:
            for topic, partitions in self._plan.topics.items():
                admin.create_topics(topic, partitions=partitions)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        begun = [player for player in self._players if player.thread.ident is not None]
        for player in begun:
            player.stopping.set()
        for player in begun:
            player.thread.join(WAIT_S)
        self.broker.__exit__(kind, error, trace)

    def player(self, name: str) -> Player:
        """The next life of a worker, which is to `begin` yet."""
        life = sum(player.worker.name == name for player in self._players)
        number = len(self._manifest.processes)
        worker = self._workers[name]
        self._manifest.processes.append(self._plan.process(worker, number=number, life=life))
        player = Player(self, worker, number, life)
        self._players.append(player)
        return player

    def live(self, name: str) -> None:
        """A whole life of one that ends by itself, or is killed."""
        self.player(name).begin().join()

    def live_until_idle(self, name: str) -> None:
        """A life of one that reads, until there is nothing left for it to read."""
        player = self.player(name).begin()
        player.wait_idle()
        player.stop()

    def judge(self, *, settle_s: float = 0.0) -> Verdict:
        """The verdict over all that has happened, once everybody has ended; `settle_s` is for time-outs to pass."""
        for player in self._players:
            assert not player.thread.is_alive(), f"{player.worker.name} is still alive"
        self._manifest.save(self._folder / "manifest.json")
        judge = Judge(
            self._folder / "0.rows", number=0, bootstrap=self.broker.bootstrap, partitions=self._manifest.partitions
        )
        try:
            judge.wait_stable(settle_s)
            judge.read_all()
        finally:
            judge.close()
        return check(History.in_folder(self._folder))

    # What a player asks.

    @property
    def fetches(self) -> int:
        """How many the broker has got."""
        return self.broker.metrics.requests[Api.FETCH.name]

    def stable_end(self, topic: str, index: int) -> int:
        """Up to where readers of committed records can go at present."""
        partition = self.broker.broker.partition(topic, index)
        assert partition is not None
        return self.broker.call(lambda: partition.log.last_stable_offset)

    def make_life(self, player: Player) -> Life:
        spec = self._plan.spec(
            player.worker,
            folder=self._folder,
            number=player.number,
            bootstrap=self.bootstrap,
            seed=self._seed,
            life=player.life,
            settings=self._settings,
        )
        return Life(spec, player.stopping, player.open_clients)


class Player:
    """One life of one worker, in a thread. `at` holds it up, or ends it, at moments of its transactions."""

    def __init__(self, world: World, worker: WorkerPlan, number: int, life: int) -> None:
        self.worker = worker
        self.number = number
        self.life = life
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"{worker.name}/{life}", daemon=True)
        self.polls = 0
        self.full_polls = 0
        self.empty_polls = 0
        """In a row."""
        self.positions: Mapping[tuple[str, int], int] | None = None
        """Where it stood when it last looked and found nothing; None when it has found something since."""
        self.was_killed = False
        self.failure: BaseException | None = None
        self.parts: Callable[[Outgoing], Sequence[Integers]] | None = None
        """Lets it send the records of a transaction in parts, each told by the rows in it, instead of all at once."""
        self._world = world
        self._actions: dict[tuple[str, int], Callable[[], None]] = {}
        self._reached: Counter[str] = Counter()

    def at(self, moment: str, action: Callable[[], None], *, nth: int = 0) -> Self:
        """Do something when it reaches a moment (`part sent`, `sent`, `flushed`) for the nth time; 0: every time."""
        self._actions[moment, nth] = action
        return self

    def die_at(self, moment: str, *, nth: int = 1) -> Self:
        return self.at(moment, self._die, nth=nth)

    def begin(self) -> Self:
        self.thread.start()
        return self

    def join(self) -> None:
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive(), f"{self.worker.name} did not end"
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        self.stopping.set()
        self.join()

    def wait_looks(self) -> None:
        """Wait until this reader, the only one at present, has noted all that is to be seen now.

        The broker answers the next fetch that it gets with what there is now. The one after it may leave before the
        records of the first are handed out, but the third leaves when they are noted.
        """
        self._wait_for(lambda end=self._world.fetches + 3: self._world.fetches >= end)

    def wait_idle(self) -> None:
        """Wait until it stands where readers cannot go on, and has found nothing there."""
        self._wait_for(lambda start=self.polls: self.polls > start)
        self._wait_for(lambda: self._is_idle() or self._is_hopeless())

    def reach(self, moment: str) -> None:
        self._reached[moment] += 1
        for nth in (0, self._reached[moment]):
            self._actions.get((moment, nth), _nothing)()

    def open_clients(self, library: str, surroundings: Surroundings) -> Clients:
        clients = open_clients(library, surroundings)

        def watched_writer(surroundings: Surroundings, transactional_id: str) -> TransactionalWriter:
            return _WatchedWriter(clients.new_transactional_writer(surroundings, transactional_id), self)

        def watched_reader(surroundings: Surroundings, positions: Mapping[int, int], isolation: Isolation) -> Reader:
            return _WatchedReader(clients.new_reader(surroundings, positions, isolation), self)

        return replace(clients, new_transactional_writer=watched_writer, new_reader=watched_reader)

    def _wait_for(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds() and self.thread.is_alive():
            assert time.monotonic() < deadline, f"{self.worker.name} did not come so far"
            time.sleep(0.002)

    def _is_idle(self) -> bool:
        positions = self.positions
        return positions is not None and all(
            position >= self._world.stable_end(*where) for where, position in positions.items()
        )

    def _is_hopeless(self) -> bool:
        return self.empty_polls >= EMPTY_POLLS_MAX or self.full_polls >= FULL_POLLS_MAX

    def _die(self) -> None:
        self.was_killed = True
        raise Killed

    def _run(self) -> None:
        try:
            life = self._world.make_life(self)
            try:
                self._world.workload.live(life)
            finally:
                life.history.close()
                life.clients.close()
        except (Killed, Stopped, Fenced):
            return
        except BaseException as failure:
            self.failure = failure


def _nothing() -> None:
    return None


class _WatchedWriter:
    def __init__(self, inner: TransactionalWriter, player: Player) -> None:
        self._inner = inner
        self._player = player

    def connect(self) -> None:
        self._inner.connect()

    def begin(self) -> None:
        self._inner.begin()

    def send(self, records: Outgoing) -> None:
        if self._player.parts is None:
            self._inner.send(records)
        else:
            for rows in self._player.parts(records):
                self._send_part(records, rows)
        self._player.reach("sent")

    def _send_part(self, records: Outgoing, rows: Integers) -> None:
        chosen = pa.array(rows)
        self._inner.send(Outgoing(records.partition[rows], records.payloads.take(chosen), records.keys.take(chosen)))
        self._inner.flush()
        self._player.reach("part sent")

    def send_positions(self, positions: Mapping[int, int], group: str, member: object) -> None:
        self._inner.send_positions(positions, group, member)

    def flush(self) -> Integers:
        offsets = self._inner.flush()
        self._player.reach("flushed")
        return offsets

    def commit(self) -> Outcome:
        return self._inner.commit()

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        if self._player.was_killed:
            # A killed process aborts nothing: its connections end, and that is all that the broker sees of it.
            vars(self._inner)["_producer"].cluster.close()
        else:
            self._inner.close()


class _WatchedReader:
    def __init__(self, inner: Reader, player: Player) -> None:
        self._inner = inner
        self._player = player

    def poll(self, timeout_ms: int, records_max: int) -> Incoming:
        player, found = self._player, NOTHING
        try:
            found = self._inner.poll(min(timeout_ms, POLL_MS), records_max)
        finally:
            player.empty_polls = 0 if len(found) else player.empty_polls + 1
            player.positions = None if len(found) else vars(self._inner)["_fetcher"].positions
            player.full_polls += len(found) > 0
            player.polls += 1
        return found

    def seek(self, positions: Mapping[int, int]) -> None:
        self._inner.seek(positions)

    def close(self) -> None:
        self._inner.close()
