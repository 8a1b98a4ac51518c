"""Everything of one run of the simulation: who is there, what goes wrong, and what must be true at the end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from uuid import UUID

from semel.broker.durability import Fsync
from semel.broker.state import Broker
from semel.broker.transaction_runtime import CONSUMER_OFFSETS, TRANSACTION_STATE
from semel.core.transaction_metadata import PREPARED
from semel.testing.simulated_disk import SimulatedCrash
from semel.verify.simulated_clients import Client, IdempotentProducer, TransactionalProducer
from semel.verify.simulated_fetchers import CopierProcess, ReaderProcess
from semel.verify.simulated_host import SimulatedHost
from semel.verify.simulated_members import SESSION_TIMEOUT_MS, Copier
from semel.verify.simulated_network import Network
from semel.verify.simulated_processes import PlainProcess, Process, TransactionalProcess
from semel.verify.simulated_readers import Reader
from semel.verify.simulation_invariants import Checker, compare_states, state_of
from semel.verify.simulation_ledger import Ledger, TopicPartition, Violation
from semel.verify.virtual_time import VirtualTimeLoop

_PRODUCER_EXPIRATION_MS = 20_000
_LONG_JUMP_MS = 3_000
_CHECKS_BETWEEN_FULL_ONES = 2_000
_PATIENCE_MS = 120_000
"""Virtual time in which everything must have come to its end once nothing is broken any more."""


class World:
    """Everything of one run. All chance comes from the seed."""

    def __init__(
        self, seed: int, loop: VirtualTimeLoop, transactions: int | None = None, *, thorough: bool = False
    ) -> None:
        self.chance = random.Random(seed)
        self.loop = loop
        self.transactions = transactions
        self.trace: list[str] = []
        self.ledger = Ledger()
        self.transaction_version = self.chance.choice((0, 1, 2, 2, 2))
        self.fsync = self.chance.choice((Fsync.COMMIT, Fsync.COMMIT, Fsync.ALWAYS, Fsync.NEVER))
        self.checker = Checker(self.ledger, self.fsync)
        self.host = SimulatedHost(loop, self._seed(), config=self._config(), fsync=self.fsync, note=self.note)
        self.host.on_event = self._check
        self.network = Network(loop, random.Random(self._seed()), self.host)
        self.topic_ids: dict[str, UUID] = {}
        self.is_healing = self.is_over = False
        self.fetch_bytes_max = 1_000 if transactions is None else 30_000
        self.restarts = self.power_cuts = self.upheavals = 0
        self.failed: asyncio.Future[None] = loop.create_future()
        self._jumped_ms = self._checks = 0
        self._checks_between_full_ones = 1 if thorough else _CHECKS_BETWEEN_FULL_ONES
        self._are_producers_done = False
        sizes = ("600", "2500", "100000") if transactions is None else ("3000", "12000", "500000")
        self._segment_bytes = self.chance.choice(sizes)
        self._groups: list[str] = []
        self._make_clients()
        if transactions is not None:
            self._make_processes()

    def _seed(self) -> int:
        return self.chance.getrandbits(64)

    def _config(self) -> dict[str, str]:
        return {
            "transaction.version": str(self.transaction_version),
            "transaction.state.log.num.partitions": "2",
            "offsets.topic.num.partitions": "2",
            "producer.id.expiration.ms": str(_PRODUCER_EXPIRATION_MS),
            "producer.id.expiration.check.interval.ms": "1000",
            "transactional.id.expiration.ms": "45000",
            "transaction.remove.expired.transaction.cleanup.interval.ms": "2000",
            "group.min.session.timeout.ms": "100",
            "group.consumer.min.session.timeout.ms": "100",
            "group.consumer.session.timeout.ms": str(SESSION_TIMEOUT_MS),
            "group.consumer.min.heartbeat.interval.ms": "100",
            "group.consumer.heartbeat.interval.ms": "600",
            "log.cleaner.backoff.ms": "1000",
            "log.cleaner.min.cleanable.ratio": "0.2",
        }

    # What clients and the host see.

    def elapsed_ms(self) -> float:
        return self.loop.time() * 1000 + self._jumped_ms

    def note(self, line: str) -> None:
        self.trace.append(f"{self.loop.time() * 1000:10.2f} {line}")

    def wants_more(self) -> bool:
        """Whether the transactions asked for are not all begun."""
        return self.transactions is not None and len(self.ledger.transactions) < self.transactions

    def is_copied(self, group_id: str) -> bool:
        """Whether a group has nothing left to do, now that nothing more is written."""
        broker = self.host.broker_if_up()
        if not self._are_producers_done or broker is None:
            return False
        offsets = broker.groups.coordinator.offsets.committed(group_id)
        for view in self.checker.topic_views("in"):
            last = max((offset for offset, _ in view.committed()), default=-1)
            if view.first_open_offset() is not None or (
                last >= 0 and (view.name not in offsets or offsets[view.name].offset <= last)
            ):
                return False
        return True

    def fail(self, violation: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(violation)

    def note_stray(self, error: BaseException | None) -> None:
        """An error that nobody waited for. What a dead process's tasks end with does not matter."""
        if error is not None and not isinstance(error, SimulatedCrash):
            self.fail(error)

    def _check(self, broker: Broker) -> None:
        if self.failed.done():
            return
        self._checks += 1
        try:
            if self._checks % self._checks_between_full_ones == 0:
                self.checker.check_all(broker)
            else:
                self.checker.check(broker)
        except Violation as violation:
            self.fail(violation)

    # Who is there.

    def _make_clients(self) -> None:
        chance = self.chance
        inputs: list[TopicPartition] = [("in", 0), ("in", 1)]
        data: list[TopicPartition] = [("data", 0), ("data", 1), ("data", 2)]
        self.topics: dict[str, int] = {"in": 2, "data": 3}
        names = ["payer", chance.choice(("payer", "booker")), "booker", "feeder"][: chance.randint(2, 4)]
        self.producers: list[Client | Process] = [
            TransactionalProducer(self, f"{name}{number}", self._seed(), name, data, self._rounds(chance.randint(6, 9)))
            for number, name in enumerate(names)
        ]
        self.producers.append(TransactionalProducer(self, "input", self._seed(), "input", inputs, self._rounds(6)))
        rounds = self._rounds(chance.randint(4, 7))
        self.producers.append(IdempotentProducer(self, "plain", self._seed(), [*inputs, *data], rounds))
        self.copiers: list[Client | Process] = []
        for kind in chance.choice((("classic",), ("consumer",), ("classic", "consumer"))):
            self.topics[f"out-{kind}"] = 2
            self._groups.append(kind)
            outputs: list[TopicPartition] = [(f"out-{kind}", 0), (f"out-{kind}", 1)]
            for number in range(chance.randint(1, 3)):
                name, is_classic = f"{kind}{number}", kind == "classic"
                self.copiers.append(Copier(self, name, self._seed(), kind, inputs, outputs, is_classic=is_classic))
        everything = [(topic, index) for topic, count in self.topics.items() for index in range(count)]
        self.readers: list[Reader | ReaderProcess] = [
            Reader(self, "committed", self._seed(), everything, is_committed=True),
            Reader(self, "everything", self._seed(), data, is_committed=False),
        ]

    def _rounds(self, count: int) -> int:
        """How often one of the others writes: in a short run Semel's own client is to have the larger share."""
        return count if self.transactions is None else -(-count * self.transactions // 200)

    def _make_processes(self) -> None:
        """Those that use Semel's own client, beside the others."""
        inputs = [("in", index) for index in range(self.topics["in"])]
        data = [("data", index) for index in range(self.topics["data"])]
        self.topics["out-pump"] = 2
        self._groups.append("pump")
        outputs = [("out-pump", index) for index in range(2)]
        for name, transactional_id, partitions in (
            ("writer0", "writer", data),
            ("writer1", "writer", data),
            ("filler", "filler", [*inputs, *data]),
            ("mover", "mover", data),
        ):
            self.producers.append(TransactionalProcess(self, name, self._seed(), transactional_id, partitions))
        self.producers.append(PlainProcess(self, "sender", self._seed(), [*inputs, *data], self._rounds(25)))
        for number in range(self.chance.randint(1, 2)):
            self.copiers.append(CopierProcess(self, f"pump{number}", self._seed(), "pump", inputs, outputs))
        everything = [(topic, index) for topic, count in self.topics.items() for index in range(count)]
        self.readers[1:] = [
            ReaderProcess(self, "fetcher", self._seed(), everything, is_committed=True),
            ReaderProcess(self, "follower", self._seed(), data, is_committed=False),
        ]

    # The run.

    async def live(self) -> None:
        broker = await self.host.start()
        self._create_topics(broker)
        self._check(broker)
        producers = [self._spawn(client.run()) for client in self.producers]
        others = [self._spawn(client.run()) for client in [*self.copiers, *self.readers]]
        chaos = self._spawn(self._bring_chaos())
        await self._all_done(
            producers, 60_000 if self.transactions is None else 500 * self.transactions, heal_after=True
        )
        await chaos
        await self._all_done(producers, _PATIENCE_MS)
        self._are_producers_done = True
        self._jump(70_000)  # past every time-out of a transaction that nobody ends
        await self._all_done(others[: len(self.copiers)], _PATIENCE_MS)
        self._jump(70_000)
        await asyncio.sleep(1)
        await self._read_to_the_end()
        self.is_over = True
        await self._all_done(others, _PATIENCE_MS)
        self._check_end()

    def _create_topics(self, broker: Broker) -> None:
        configs = {"internal.segment.bytes": self._segment_bytes}
        if self.transactions is not None:
            configs["index.interval.bytes"] = "200"  # or every look at what is new would walk over half a segment
        for name, count in self.topics.items():
            topic = broker.topics.decide_create(name, broker.settings, partition_count=count, configs=configs)
            self.topic_ids[name] = broker.topics.create(topic).topic_id
        for name in (TRANSACTION_STATE, CONSUMER_OFFSETS):
            topic = broker.ensure_internal_topic(name)
            # Where they are compacted, a restart does not read all that was ever decided.
            segment_bytes = configs["internal.segment.bytes"] if self.transactions is None else "3000"
            broker.topics.alter_config(name, {**topic.configs, **configs, "internal.segment.bytes": segment_bytes})

    def _spawn(self, run: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await run
            except Exception as error:
                self.fail(error)

        return self.loop.create_task(guarded())

    async def _all_done(self, tasks: Sequence[asyncio.Task[None]], ms: int, *, heal_after: bool = False) -> None:
        _, late = await asyncio.wait(tasks, timeout=ms / 1000)
        if heal_after:
            self.is_healing = True
            self.network.weather.clear_up()
        elif late:
            raise Violation(f"{len(late)} clients do not come to an end, though nothing is broken any more")

    async def _read_to_the_end(self) -> None:
        broker = self.host.broker
        deadline_ms = self.elapsed_ms() + _PATIENCE_MS
        for reader in self.readers:
            while not reader.has_read_to((one.topic, one.index, one.log_end_offset) for one in broker.all_partitions()):
                if self.elapsed_ms() > deadline_ms:
                    raise Violation(f"{reader.name} does not get to the end of {reader.positions}")
                await asyncio.sleep(0.2)

    def _check_end(self) -> None:
        self.checker.check_all(self.host.broker)
        self.checker.check_end(self.host.broker)
        for reader in self.readers:
            self.checker.check_reader(reader)
        for group_id in self._groups:
            self.checker.check_copies("in", f"out-{group_id}")

    # What goes wrong.

    async def _bring_chaos(self) -> None:
        while not self.is_healing:
            await asyncio.sleep(0.1)
            if self.host.is_broken:
                await self._restart_after(self.host.kill)
            elif self.chance.random() < (0.12 if self.transactions is None else 0.05):
                await self.chance.choice(self._disasters())()
        if self.host.is_disk_full:
            self.host.empty_disk()
        self.host.disk.crash_at = None
        if self.host.is_broken:
            await self._restart_after(self.host.kill)

    def _disasters(self) -> Sequence[Callable[[], Coroutine[Any, Any, None]]]:
        disasters = [self._stop_and_start, self._kill, self._crash_in_a_write, self._fill_disk, self._sleep, self._cut]
        if self.fsync is not Fsync.NEVER:
            disasters += [self._cut_power, self._cut_power]
        return disasters

    async def _stop_and_start(self) -> None:
        if self.host.is_disk_full:
            return
        before = await self.host.stop()
        known = state_of(before)
        has_unfinished = any(one.status in PREPARED for one in before.transactions.coordinator)
        broker = await self._start()
        if not has_unfinished:
            compare_states(known, state_of(broker))

    async def _kill(self) -> None:
        await self._restart_after(self.host.kill)

    async def _cut_power(self) -> None:
        self.host.kill(power_cut=True)
        broker = await self._start()
        self.power_cuts += 1
        self.checker.power_was_lost(broker, self.readers)
        for reader in self.readers:
            reader.begin_again()

    async def _crash_in_a_write(self) -> None:
        self.host.crash_in_a_write()
        await asyncio.sleep(0.5)
        self.host.disk.crash_at = None

    async def _fill_disk(self) -> None:
        self.host.fill_disk()
        await asyncio.sleep(self.chance.random() * 2)
        self.host.empty_disk()

    async def _sleep(self) -> None:
        self._jump(self.chance.choice((500, 2_000, 25_000)))

    async def _cut(self) -> None:
        self.note("all connections are cut")
        self.host.broker.close_connections()

    async def _restart_after(self, end: Callable[[], None]) -> None:
        end()
        self._check(await self._start())

    async def _start(self) -> Broker:
        self.restarts += 1
        self.upheavals += 1
        await asyncio.sleep(self.chance.random() * 0.3)
        broker = await self.host.start_until_up()
        self.note("a broker runs")
        return broker

    def _jump(self, ms: int) -> None:
        self._jumped_ms += ms
        self.host.jump(ms)
        if ms >= _LONG_JUMP_MS:
            self.upheavals += 1
            self.network.forget_repeats()
