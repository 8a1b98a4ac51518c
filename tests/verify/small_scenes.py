"""What the roles of a small run do: a scene for each situation in which a bug can show. Without a bug all is clean."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from kio.schema.errors import ErrorCode
from small_world import World

from semel.broker.faults import Cut, Error
from semel.testing.proxy import Cut as ProxyCut
from semel.verify.clients.face import Integers, Outgoing, Reader
from semel.verify.faults.proxy import FaultProxy, Hold, Match
from semel.verify.history import Manifest
from semel.verify.workloads.bank import Bank
from semel.verify.workloads.copier import Copier
from semel.verify.workloads.counters import Counters
from semel.verify.workloads.life import Life
from semel.verify.workloads.list_append import ListAppend
from semel.verify.workloads.options import Options
from semel.verify.workloads.transactions import Batch, Positions, Taken, Transactions, note_taken, take_sound
from semel.verify.workloads.workload import Role, Workload
from semel.wire import Api

SEED = 1
PREFIX = "small"
HELD_MS = 30_000
_READERS_FETCH = Match(Api.FETCH, client_id=f"{PREFIX}-reader-0")
_LOOKS = 8
RECORD_BYTES = 48
ONE_RECORD_A_BATCH = {"batch_size": 150}
ONE_BATCH_A_REQUEST = {**ONE_RECORD_A_BATCH, "max_request_size": 200}
_SMALL = {
    "partitions": 2,
    "sources": 1,
    "workers": 1,
    "records": 24,
    "batch_records_max": 4,
    "keys": 4,
    "record_bytes": RECORD_BYTES,
    "abort_fraction": 0.5,
    "patience_s": 5.0,
}


@dataclass(frozen=True)
class Scene:
    """A workload of some size, and who does what in which order."""

    name: str
    play: Callable[[World], None]
    workload: type[Workload]
    options: Mapping[str, Any]
    config: Mapping[str, str] = field(default_factory=dict[str, str])
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    settle_s: float = 0.0
    """How long transactions that were left open may take to be timed out."""

    def open(self, folder: Path) -> World:
        options = Options.from_mapping({**_SMALL, **self.options})
        workload = self.workload(PREFIX, options)
        return World(folder, workload, seed=SEED, config=self.config, settings=self.settings)


def _scene(workload: type[Workload], **details: Any) -> Callable[[Callable[[World], None]], Scene]:
    about = {name: details.pop(name) for name in ("config", "settings", "settle_s") if name in details}

    def make(play: Callable[[World], None]) -> Scene:
        return Scene(play.__name__, play, workload, details, **about)

    return make


# A topic is copied.


@_scene(Copier)
def copying(world: World) -> None:
    """Half of the copier's transactions are aborted, and tried again."""
    world.live("source-0")
    world.live_until_idle("copier-0")
    world.live_until_idle("reader-0")


@_scene(Copier, writing="transactions")
def copying_what_was_committed(world: World) -> None:
    """The source aborts half of its transactions too."""
    copying.play(world)


@_scene(Copier, partitions=1)
def copying_with_a_lost_answer(world: World) -> None:
    """The source is not told of a batch that was stored, and sends it again."""
    world.broker.faults.inject(Api.PRODUCE, Cut(carried_out=True), skip=3)
    copying.play(world)


@_scene(Copier, partitions=1)
def copying_with_a_lost_request(world: World) -> None:
    """A batch of the source does not reach the broker, and is sent again."""
    world.broker.faults.inject(Api.PRODUCE, Cut(carried_out=False), skip=3)
    copying.play(world)


class Sources(Copier):
    """The input of a copier, without one."""

    def work_roles(self) -> list[Role]:
        return [Role("source", self.options.sources, "source")]

    def manifest(self) -> Manifest:
        return Manifest(self.partitions(), keyed_topics=[self.input])


@_scene(Sources, partitions=1, batch_records_max=24, settings=ONE_RECORD_A_BATCH)
def writing_many_batches(world: World) -> None:
    """Each write of the source makes more batches than may be under way."""
    world.live("source-0")


@_scene(
    Sources,
    partitions=1,
    batch_records_max=24,
    writing="plain",
    settings={**ONE_RECORD_A_BATCH, "max_in_flight_requests_per_connection": 1},
)
def writing_many_batches_plainly(world: World) -> None:
    """The same without sequences and one by one, and a request does not reach the broker."""
    world.broker.faults.inject(Api.PRODUCE, Cut(carried_out=False), skip=3)
    world.live("source-0")


# Money is moved.


@_scene(Bank, workers=2)
def moving(world: World) -> None:
    """Two tellers, one after the other."""
    world.live("teller-0")
    world.live("teller-1")
    world.live_until_idle("reader-0")


@_scene(Bank, config={"transaction.version": "1", "transaction.partition.verification.enable": "false"})
def moving_unverified(world: World) -> None:
    """As on a broker before KIP-890, which does not ask whether a partition was announced."""
    world.live("teller-0")


@_scene(Bank, records=12, settings=ONE_RECORD_A_BATCH)
def moving_under_observation(world: World) -> None:
    """The reader looks at what is written and not committed yet."""
    reader = world.player("reader-0").begin()
    world.player("teller-0").at("flushed", reader.wait_looks).begin().join()
    reader.wait_idle()
    reader.stop()


@_scene(Bank, records=12, settings=ONE_RECORD_A_BATCH)
def moving_by_a_teller_that_is_killed(world: World) -> None:
    """It is killed before it asks to commit, and its next life goes on."""
    reader = world.player("reader-0").begin()
    world.player("teller-0").die_at("flushed", nth=2).begin().join()
    reader.wait_looks()
    world.live("teller-0")
    reader.wait_idle()
    reader.stop()


@_scene(Bank, transaction_timeout_ms=300, settle_s=10.0)
def moving_by_a_teller_that_stays_away(world: World) -> None:
    """It is killed before it asks to commit, and nobody but the time-out ends its transaction."""
    world.player("teller-0").die_at("flushed", nth=2).begin().join()


@_scene(Bank, abort_fraction=0.0, settings=ONE_BATCH_A_REQUEST)
def moving_with_a_refused_batch(world: World) -> None:
    """A request has one batch, and one is refused for good: its transaction must not be committed."""
    world.broker.faults.inject(Api.PRODUCE, Error(ErrorCode.invalid_record), skip=3)
    world.live("teller-0")


@_scene(Bank, records=4, abort_fraction=0.0, patience_s=1.0)
def moving_with_a_lost_commit(world: World) -> None:
    """A commit is carried out, and its teller gets no answer, however often it asks."""
    world.broker.faults.inject(Api.END_TXN, Cut(carried_out=True), times=20, when=lambda request: request.committed)
    world.live("teller-0")


@_scene(Bank, records=4, abort_fraction=0.0, patience_s=1.0)
def moving_with_a_lost_end(world: World) -> None:
    """A commit does not reach the broker, however often its teller asks. Its next life has better luck."""
    world.broker.faults.inject(Api.END_TXN, Cut(carried_out=False), times=20, when=lambda request: request.committed)
    world.live("teller-0")
    world.broker.faults.clear()
    world.live("teller-0")


@_scene(Bank, workers=2, settings={"max_partition_fetch_bytes": 400})
def reading_in_pieces(world: World) -> None:
    """The reader takes less at a time than there is."""
    moving.play(world)


@_scene(Bank)
def reading_over_a_lost_connection(world: World) -> None:
    """The first fetch of the reader is cut off."""
    world.live("teller-0")
    with FaultProxy(world.broker.bootstrap) as proxy:
        world.bootstrap = proxy.bootstrap
        proxy.set_trap(_READERS_FETCH, ProxyCut.BEFORE)
        world.live_until_idle("reader-0")


@_scene(Bank)
def reading_to_a_lost_connection(world: World) -> None:
    """A fetch of the reader is cut off when it has read all."""
    world.live("teller-0")
    with FaultProxy(world.broker.bootstrap) as proxy:
        world.bootstrap = proxy.bootstrap
        reader = world.player("reader-0").begin()
        reader.wait_idle()
        assert proxy.set_trap(_READERS_FETCH, ProxyCut.BEFORE).wait_over(HELD_MS / 1000)
        reader.wait_looks()
        reader.wait_idle()
        reader.stop()


@_scene(Bank, settings={"auto_offset_reset": "earliest"})
def reading_from_the_earliest(world: World) -> None:
    """A reader whose place is gone is to begin anew."""
    world.live("teller-0")
    world.live_until_idle("reader-0")


# Totals are kept.


@_scene(Counters)
def counting(world: World) -> None:
    """The counter is killed on the way, and aborts half of its transactions in both lives."""
    world.live("source-0")
    world.player("counter-0").die_at("flushed", nth=4).begin().join()
    world.live_until_idle("counter-0")
    world.live_until_idle("reader-0")


# Transactions at the same time.


class MutualLists(ListAppend):
    """Each transaction appends first, and reads all lists when the other one has appended too: both are open then."""

    def __init__(self, prefix: str, options: Options | None = None) -> None:
        super().__init__(prefix, options)
        self._meeting = threading.Barrier(self.options.workers)

    def work(self, life: Life) -> None:
        reader = life.clients.reader(dict.fromkeys(range(self.options.partitions), 0), "read_committed")
        transactions = _Reading(life, reader, self._meeting)
        try:
            for sequence in range(0, self.options.records, self.options.batch_records_max):
                transactions.run(self._elements(life, self.options.batch_records_max, sequence))
        finally:
            reader.close()
            transactions.writer.close()


class _Reading(Transactions):
    def __init__(self, life: Life, reader: Reader, meeting: threading.Barrier) -> None:
        super().__init__(life)
        self._reader = reader
        self._meeting = meeting

    def _fill(self, number: int, batch: Batch, taken: Taken | None, positions: Positions | None) -> None:
        super()._fill(number, batch, taken, positions)
        self._meeting.wait(HELD_MS / 1000)
        for _ in range(_LOOKS):
            incoming = self._reader.poll(100, 1_000)
            if len(incoming):
                note_taken(self._life, take_sound(self._life, incoming), number)
        self._meeting.wait(HELD_MS / 1000)  # nobody commits while another one still reads


@_scene(MutualLists, workers=2, readers=0, records=12, settings=ONE_RECORD_A_BATCH)
def appending_at_the_same_time(world: World) -> None:
    """Two appenders whose transactions are open at the same time, and who both read then."""
    players = [world.player(f"appender-{number}").begin() for number in range(2)]
    for player in players:
        player.join()


# Three ways in which two transactions get before each other (G0).


def _by_partition(*order: int) -> Callable[[Outgoing], Sequence[Integers]]:
    return lambda records: [np.flatnonzero(records.partition == number) for number in order]


def _row_by_row(records: Outgoing) -> Sequence[Integers]:
    return np.split(np.arange(len(records)), len(records))


_ONE_MOVE = {"workers": 2, "records": 2, "batch_records_max": 2, "abort_fraction": 0.0, "readers": 0}


@_scene(Bank, **_ONE_MOVE)
def crossing_in_two_partitions(world: World) -> None:
    """One writes to the first partition and then to the second, the other the reverse."""
    meeting = threading.Barrier(2)

    def meet() -> None:
        meeting.wait(HELD_MS / 1000)

    players = [world.player(f"teller-{number}").at("part sent", meet) for number in range(2)]
    for player, order in zip(players, ((0, 1), (1, 0)), strict=True):
        player.parts = _by_partition(*order)
        player.begin()
    for player in players:
        player.join()


@_scene(Bank, **{**_ONE_MOVE, "records": 8, "batch_records_max": 8})
def crossing_in_one_partition(world: World) -> None:
    """Both write batch by batch into the same partitions."""
    first, second = (world.player(f"teller-{number}") for number in range(2))
    first.parts = _row_by_row
    first.at("part sent", lambda: second.begin().join(), nth=1)
    first.begin().join()


@_scene(Bank, **_ONE_MOVE, settings=ONE_BATCH_A_REQUEST)
def crossing_by_a_late_request(world: World) -> None:
    """The second request of one is held up in the network until the other has committed."""
    with FaultProxy(world.broker.bootstrap) as proxy:
        world.bootstrap = proxy.bootstrap
        trap = proxy.set_trap(Match(Api.PRODUCE, client_id=f"{PREFIX}-teller-0", nth=2), Hold(HELD_MS))
        late = world.player("teller-0").begin()
        assert trap.wait_struck(HELD_MS / 1000)
        world.live("teller-1")
        trap.release()
        late.join()


CROSSINGS = (crossing_in_two_partitions, crossing_in_one_partition, crossing_by_a_late_request)
