"""A write that comes before the last transaction's markers is held back by the broker: when to look first."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

from semel.broker.faults import Cut, Delay
from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.config import ProducerConfig
from semel.client.early_writes import HELD_BACK_S, LATE_S, LOOKS, EarlyWrites
from semel.client.fetcher import Fetcher
from semel.client.ownership import Owner, ProducerIdentity
from semel.client.producer import Producer
from semel.client.retry import Patience
from semel.client.sender import Sender, Stored
from semel.client.transaction_owner import TransactionOwner
from semel.client.transactions import TransactionCalls
from semel.errors import ConnectionLost, SemelError
from semel.testing.embedded import EmbeddedBroker
from semel.wire import Api

DECIDED, UNDECIDED = "CompleteCommit", "PrepareCommit"


@dataclass
class Scene:
    """An owner whose coordinator is scripted and whose time moves only when somebody waits or a test says so."""

    patch: pytest.MonkeyPatch
    protocol: int = 2
    now_s: float = 100.0
    seen: list[str | SemelError] = field(default_factory=list)
    """What the next looks find; when there is nothing left, all is decided."""
    looks: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        for name, answer in (("init_producer_id", self.next_epoch), ("end", self.next_epoch), ("owner", self.look)):
            self.patch.setattr(TransactionCalls, name, answer)
        cluster = SimpleNamespace(
            transaction_protocol=self.protocol,
            speaks=lambda api, version: False,
            patience=lambda budget_ms=1_000: Patience(budget_ms, 100, 1_000, self.clock, self.sleep),
            clock=self.clock,
        )
        sender = Sender(cast(Cluster, cluster), ProducerConfig(transactional_id="id"))
        self.owner = TransactionOwner(cast(Cluster, cluster), sender, "id", 60_000)

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def next_epoch(self, *_: Any, **__: Any) -> ProducerIdentity:
        self.epoch += 1
        return ProducerIdentity(7, self.epoch)

    def look(self, *_: Any, **__: Any) -> Owner:
        self.looks += 1
        found = self.seen.pop(0) if self.seen else DECIDED
        if isinstance(found, SemelError):
            raise found
        return Owner(ProducerIdentity(7, self.epoch), found)

    def transact(self, write_s: float = 0.001) -> int:
        """One transaction whose first write takes so long; returns how often it has looked before."""
        self.owner.begin()
        before = self.looks
        self.owner.note_sending()
        self.now_s += write_s
        self.owner.note_stored([Stored("t", 0, 5, 1)])
        looked = self.looks - before
        self.owner.commit(None)
        return looked


def test_after_a_write_that_was_held_back_the_next_ones_wait_for_the_markers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks until the last transaction is complete, and then writes; quick writes alone make nobody look."""
    scene = Scene(monkeypatch)
    assert [scene.transact() for _ in range(3)] == [0, 0, 0]
    scene.transact(LATE_S)
    scene.seen = [UNDECIDED, UNDECIDED, DECIDED]
    assert scene.transact() == 3
    assert scene.transact() == 1


def test_nobody_looks_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that is slow once is not asked more than so often; the next late write begins it anew."""
    scene = Scene(monkeypatch)
    scene.transact(LATE_S)
    assert sum(scene.transact() for _ in range(2 * LOOKS)) == LOOKS - 1
    scene.transact(LATE_S)
    assert scene.transact() == 1


def test_markers_that_take_longer_than_the_broker_would_wait_are_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The write is not kept back for longer than it would have been."""
    scene = Scene(monkeypatch)
    scene.transact(LATE_S)
    scene.seen = [UNDECIDED] * 1_000
    ended = scene.now_s
    assert scene.transact(write_s=0) > 1
    assert HELD_BACK_S <= scene.now_s - ended < 3 * HELD_BACK_S


def test_who_takes_time_between_transactions_does_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then the markers are written."""
    scene = Scene(monkeypatch)
    scene.transact(LATE_S)
    scene.now_s += 1.01 * HELD_BACK_S
    assert scene.transact() == 0


def test_a_look_that_fails_is_no_failure_of_the_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is, the write meets it as well, and knows what it means."""
    scene = Scene(monkeypatch)
    scene.transact(LATE_S)
    scene.seen = [ConnectionLost("gone")]
    assert scene.transact() == 1
    assert scene.transact() == 1


def test_protocol_1_does_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the coordinator answers at once that it is busy, and is asked again in a millisecond."""
    scene = Scene(monkeypatch, protocol=1)
    scene.transact(LATE_S)
    assert scene.transact() == 0


@pytest.mark.parametrize("goes_wrong", [None, Cut(carried_out=False), Cut(carried_out=True)])
def test_transactions_in_quick_succession_are_exact_whatever_becomes_of_the_looks(goes_wrong: Cut | None) -> None:
    """A late write makes the producer look, on a real connection; a connection lost at a look is only opened anew."""
    with EmbeddedBroker(fsync="never") as broker:
        to = {"bootstrap.servers": broker.bootstrap}
        with Admin(to) as admin:
            admin.create_topics("out", partitions=1)
        late = broker.faults.inject(Api.PRODUCE, Delay(2 * LATE_S * 1_000))
        looks = broker.faults.inject(Api.DESCRIBE_TRANSACTIONS, goes_wrong or Delay(0), times=1_000)
        with Producer(to, transactional_id="id") as producer:
            for number in range(20):
                with producer.transaction():
                    producer.send("out", b"%d" % number)
        with Fetcher(to) as fetcher:
            fetcher.assign({("out", 0): "earliest"})
            values = pa.concat_tables(fetcher.read_until(fetcher.end_offsets())).column("value").to_pylist()
    assert late.served == 1
    assert looks.served >= 1
    assert values == [b"%d" % number for number in range(20)]


def test_a_late_write_is_remembered_for_so_many_transactions() -> None:
    """Not one fewer and not one more, and none are owed before the first."""
    early = EarlyWrites()
    early.note_end(0.0)
    assert not early.is_likely(0.0)
    early.note_first_write(LATE_S)
    for _ in range(LOOKS - 1):
        early.note_end(1.0)
    assert early.is_likely(1.0)
    early.note_end(1.0)
    assert not early.is_likely(1.0)
