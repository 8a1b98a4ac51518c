"""Transactional ids that nobody has used for long: the broker forgets them, and the client says what to do then."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from semel.broker.durability import Fsync
from semel.broker.state import Broker
from semel.client.producer import Producer
from semel.client.transaction_state import State
from semel.errors import Fenced
from semel.verify.simulated_host import SimulatedHost
from semel.verify.simulated_network import Network
from semel.verify.simulated_sockets import SimulatedMachine
from semel.verify.virtual_time import VirtualTimeLoop

EXPIRATION_MS = 5_000


class Scene:
    """A broker that forgets ids soon, on a good network."""

    def __init__(self, transaction_version: int) -> None:
        self.loop = VirtualTimeLoop()
        config = {
            "transaction.version": str(transaction_version),
            "transactional.id.expiration.ms": str(EXPIRATION_MS),
            "transaction.remove.expired.transaction.cleanup.interval.ms": "1000",
        }
        self.host = SimulatedHost(self.loop, 1, config=config, fsync=Fsync.COMMIT, note=lambda _: None)
        self.network = Network(self.loop, random.Random(1), self.host)
        self.network.weather.clear_up()
        self.broker = self.loop.run_until_complete(self.host.start())
        self.broker.topics.create(
            self.broker.topics.decide_create("t", self.broker.settings, partition_count=1, configs={})
        )

    def run(self, work: Callable[[Producer, SimulatedMachine], None]) -> None:
        def live() -> None:
            settings = {"bootstrap.servers": "broker:9092", "transactional.id": "id"}
            work(
                Producer(settings, clock=self.loop.time, sleep=machine.sleep, make_cluster=machine.make_cluster),
                machine,
            )

        machine = SimulatedMachine(self.network, "client", self.loop.time, live)
        self.loop.run_until_complete(machine.run())

    def ids(self) -> list[str]:
        return [one.transactional_id for one in self.broker.transactions.coordinator]


def commit_one(producer: Producer) -> None:
    with producer.transaction():
        producer.send("t", b"v", partition=0, timestamp_ms=1_700_000_000_000)


@pytest.mark.parametrize("transaction_version", [0, 2])
def test_a_producer_whose_id_was_forgotten_asks_for_a_new_one(transaction_version: int) -> None:
    """Its next transaction fails with what to do, it stays dead, and a new producer goes on under the same id."""
    scene = Scene(transaction_version)

    def work(producer: Producer, machine: SimulatedMachine) -> None:
        commit_one(producer)
        machine.sleep(3 * EXPIRATION_MS / 1000)
        assert scene.ids() == []
        for _ in range(2):
            with pytest.raises(Fenced, match="make a new producer"):
                commit_one(producer)
        assert producer.state is State.DEAD

    scene.run(work)
    scene.run(lambda producer, _: commit_one(producer))
    assert scene.ids() == ["id"]
    scene.loop.close()


def test_an_expired_id_is_forgotten_when_the_disk_has_space_again() -> None:
    """The refused write is no unexpected error, the rest of the clock work goes on, and the next tick tries again."""
    scene = Scene(2)
    scene.run(lambda producer, _: commit_one(producer))

    scene.host.disk.free_bytes = 0
    scene.loop.run_until_complete(asyncio.sleep(3 * EXPIRATION_MS / 1000))
    assert scene.ids() == ["id"]
    assert _is_housekeeping_alive(scene.broker, scene.loop)
    scene.host.disk.free_bytes = -1
    scene.loop.run_until_complete(asyncio.sleep(0.25))
    assert scene.ids() == []
    assert scene.broker.metrics.unexpected_errors == 0
    scene.loop.close()


def _is_housekeeping_alive(broker: Broker, loop: VirtualTimeLoop) -> bool:
    """Whether what comes behind the ids in a tick is done: the positions of groups are looked through."""
    seen: list[int] = []
    original = broker.groups.expire
    broker.groups.expire = lambda: (seen.append(1), original())[1]
    loop.run_until_complete(asyncio.sleep(broker.settings.offsets_retention_check_interval_ms / 1000 + 1))
    return bool(seen)
