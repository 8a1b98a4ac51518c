"""The broker as a whole: its parts, how they start and stop, and what runs by the clock."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import UUID, uuid4

from semel.broker.acls import AllowAll, Authorizer
from semel.broker.clock import Clock, SystemClock
from semel.broker.configs import BrokerSettings, TopicSettings, topic_settings
from semel.broker.descriptors import connections_max
from semel.broker.durability import Durability, Fsync
from semel.broker.failpoints import reach
from semel.broker.fetch_sessions import PARTITION_BYTES, FetchSessions
from semel.broker.held_memory import CREDENTIALS_SHARE, FETCH_SESSIONS_SHARE, PRODUCERS_SHARE, RULES_SHARE, HeldMemory
from semel.broker.listeners import ListenerSettings, check_listeners
from semel.broker.metrics import Metrics
from semel.broker.pacing import Pace, QuickLane, Slices, SlowLane, finish, finish_now
from semel.broker.producer_ids import ProducerIds
from semel.broker.sockets import Listener
from semel.broker.storage.cleaner import plan_cleaning
from semel.broker.storage.data_directory import DataDirectory
from semel.broker.storage.disk import Disk, RealDisk
from semel.broker.storage.failures import StorageError
from semel.broker.storage.log_settings import LogSettings
from semel.broker.storage.partition import Partition, remove_directories
from semel.broker.topics import Topic, TopicStore
from semel.broker.transaction_runtime import CONSUMER_OFFSETS, TRANSACTION_STATE, TransactionRuntime
from semel.core.producer_budget import ProducerBudget
from semel.errors import CorruptRecords, RecordTooLarge

if TYPE_CHECKING:
    from semel.broker.connection import Connection
    from semel.broker.context import RequestContext
    from semel.broker.faults import Faults
    from semel.broker.group_runtime import GroupRuntime
    from semel.broker.sasl import SaslExchange

_LOG: Final = logging.getLogger("semel.broker")

_TICK_MS: Final = 100
_PARTITIONS_AT_ONCE: Final = 16
"""Opened or removed: some files are made or removed for each."""
_PARTITIONS_LOOKED_AT_AT_ONCE: Final = 128
_PRODUCERS_PER_STEP: Final = 256
_FINISH_S: Final = 10.0
_BOOT_META: Final = "boot_id"
_EPOCH_META: Final = "leader_epoch"


@dataclass(frozen=True, kw_only=True)
class BrokerOptions:
    """How a broker is to run. Everything has a default but the data directory."""

    data: Path
    config: Mapping[str, str] = field(default_factory=dict[str, str])
    listeners: Sequence[ListenerSettings] = (ListenerSettings(),)
    fsync: Fsync = Fsync.COMMIT
    plain_users: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Names and passwords of those who may log in by SASL PLAIN."""
    scram_users: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """The same for SCRAM-SHA-256 and SCRAM-SHA-512."""


class Broker:
    """All state of one broker. It belongs to the thread of its event loop.

    `boot_id` names the run of the operating system: when it has changed since an end that was not clean, the power may
    have been lost, and with it what was never synced.
    """

    def __init__(
        self,
        options: BrokerOptions,
        *,
        clock: Clock | None = None,
        disk: Disk | None = None,
        faults: Faults | None = None,
        boot_id: str | None = None,
        process_id: int | None = None,
        new_id: Callable[[], UUID] = uuid4,
        on_fatal: Callable[[Exception], None] | None = None,
        sync_in_thread: bool = True,
    ) -> None:
        check_listeners(options.listeners)
        self.options = options
        self.clock: Clock = clock or SystemClock()
        self.disk: Disk = disk or RealDisk()
        self.faults = faults
        self.metrics = Metrics()
        self.settings = BrokerSettings({"log.dirs": str(options.data), **options.config})
        self.durability = Durability(options.fsync, on_fatal or _log_fatal, in_thread=sync_in_thread)
        self._process_id = os.getpid() if process_id is None else process_id
        self._boot_id = _read_boot_id() if boot_id is None else boot_id
        self.new_id = new_id
        self.leader_epoch = 0
        """Of all partitions: it rises with each start after which records that were read before may be gone."""
        self._partitions: dict[tuple[str, int], Partition] = {}
        self._topic_settings: dict[str, TopicSettings] = {}
        self._connections: dict[Connection, None] = {}  # in the order they came: the same run is the same again
        self._requests: dict[asyncio.Task[None], None] = {}
        """Those that wait for something, also when their clients have gone."""
        self.connections_max = connections_max()
        self.held_memory = HeldMemory(self.settings.client_memory_bytes_max)
        self.producer_budget = ProducerBudget(self.held_memory.bytes_max // PRODUCERS_SHARE)
        self.lane = SlowLane()
        self.login_lane = SlowLane()
        self.handshake_lane = QuickLane(at_once=1)
        self.quick_lane = QuickLane()
        self._listeners: list[Listener] = []
        self._tick_task: asyncio.Task[None] | None = None
        self._due_ms: dict[str, int] = {}
        self._cleaning: asyncio.Task[None] | None = None
        self._is_stopping = False

    # Starting and stopping.

    async def start(self, *, listen: bool = True) -> None:
        """Recover what is on disk, then listen. A simulation brings the connections itself and does not listen."""
        self.directory = DataDirectory(str(self.options.data), self.disk, process_id=self._process_id)
        try:
            await self._recover()
            if listen:
                self._listeners = [Listener(self, settings) for settings in self.options.listeners]
        except BaseException:
            self.directory.close(clean=False)
            raise
        for listener in self._listeners:
            listener.start()
            for warning in listener.settings.warnings():
                _LOG.warning("%s", warning)
        self._schedule_tick()

    async def _recover(self) -> None:
        power_was_lost = self._was_power_lost()
        self.leader_epoch = self._stored_leader_epoch() + power_was_lost
        self._keep_leader_epoch()
        self.producer_ids = ProducerIds(self.directory, self.durability.begin_write)
        self.topics = TopicStore(self.directory, self, new_id=self.new_id, write_aside=self.durability.write_aside)
        self.settings = self.settings.with_dynamic(
            default=self.topics.broker_configs.get("", {}),
            own=self.topics.broker_configs.get(str(self.settings.node_id), {}),
        )
        self.settings.warn_of_unknown()
        self._init_security()
        self.fetch_sessions = FetchSessions(
            self.settings.fetch_sessions_max,
            lambda: self.new_id().int,
            partitions_max=self.held_memory.bytes_max // FETCH_SESSIONS_SHARE // PARTITION_BYTES,
        )
        self.transactions = TransactionRuntime(self)
        for topic in self.topics:
            finish_now(self._open(topic, range(topic.partition_count)))
        self._remove_strangers()
        reach("after_partitions_opened")
        self.transactions.load(self.partitions_of(TRANSACTION_STATE))
        if offsets := self.partitions_of(CONSUMER_OFFSETS):
            self.groups.load(offsets)
        reach("after_coordinators_loaded")
        await self.transactions.recover(power_was_lost=power_was_lost)
        self._write_boot_id()

    @cached_property
    def groups(self) -> GroupRuntime:
        """Loaded when the first group is asked for: many brokers in tests never have one, and start the sooner."""
        from semel.broker.group_runtime import GroupRuntime

        return GroupRuntime(self)

    @property
    def _has_groups(self) -> bool:
        return "groups" in self.__dict__

    def _write_boot_id(self) -> None:
        if self._keep_leader_epoch():
            # A full disk must not keep its records from their readers. An older id can only make the next start more
            # careful than it need be.
            self._keep_meta(_BOOT_META, self._boot_id.encode())

    def _stored_leader_epoch(self) -> int:
        stored = self.directory.read_meta(_EPOCH_META) or b"0"
        if not stored.isdigit():
            raise StorageError(
                f"{_EPOCH_META}.meta in {self.options.data} is damaged: it should be a number. No record is lost. "
                "Write one into it that is higher than any leader epoch that a client has seen."
            )
        return int(stored)

    def _keep_leader_epoch(self) -> bool:
        """Until the epoch is on the disk, this start must count as one that follows a power cut: the next raises it
        to the same.
        """
        return self.leader_epoch == 0 or self._keep_meta(_EPOCH_META, b"%d" % self.leader_epoch)

    def _keep_meta(self, name: str, data: bytes) -> bool:
        try:
            if self.directory.read_meta(name) != data:
                self.directory.write_meta(name, data)
        except StorageError as error:
            self.note_storage_error(error)
            return False
        return True

    def _was_power_lost(self) -> bool:
        if self.directory.was_clean:
            return False
        last = self.directory.read_meta(_BOOT_META)
        return last is not None and last != self._boot_id.encode()

    async def stop(self, *, clean: bool = True) -> None:
        """Answer nobody any more, and leave everything on disk so that the next start need not search."""
        self._is_stopping = True
        for listener in self._listeners:
            listener.close()
        self.close_connections()
        await self._finish_requests()
        if self._tick_task is not None:
            await self._tick_task
        if self._cleaning is not None:
            await self._cleaning
        await self.durability.close()
        for partition in self._partitions.values():
            partition.close(clean=clean)
        self.directory.close(clean=clean and self._keep_leader_epoch())

    async def _finish_requests(self) -> None:
        """A commit that is under way comes to its end: it must not write to files that were closed as complete."""
        if self._has_groups:
            self.groups.give_up_waiting()
        if self._requests:
            _, still_waiting = await asyncio.wait(list(self._requests), timeout=_FINISH_S)
            for task in still_waiting:
                task.cancel()

    def abandon(self) -> None:
        """End as a killed process does: nothing more is written, and nobody is told. For tests."""
        self._is_stopping = True
        for listener in self._listeners:
            listener.close()
        self.close_connections()
        if self._cleaning is not None:
            self._cleaning.cancel()
        self.durability.abandon()
        for partition in self._partitions.values():
            partition.close(clean=False)
        self.directory.close(clean=False)

    def _init_security(self) -> None:
        from semel.broker.credentials import CredentialStore

        settings = self.settings
        self.credentials = CredentialStore(
            plain=self.options.plain_users,
            scram=self.options.scram_users,
            store=self.directory,
            changed_max=settings.scram_credentials_max,
            bytes_max=self.held_memory.bytes_max // CREDENTIALS_SHARE,
            write_aside=self.durability.write_aside,
        )
        self.authorizer: Authorizer = AllowAll()
        if settings.authorizer_class_name:
            self.authorizer = Authorizer(
                [name.strip() for name in settings.super_users.split(";") if name.strip()],
                settings.allow_everyone_if_no_acl_found,
                self.directory,
                rules_max=settings.rules_max,
                bytes_max=self.held_memory.bytes_max // RULES_SHARE,
                write_aside=self.durability.write_aside,
            )

    # Addresses.

    @property
    def bootstrap(self) -> str:
        """Where the first listener is."""
        host, port = self._listeners[0].settings.advertised(self._listeners[0].port)
        return f"{host}:{port}"

    def ports(self) -> list[int]:
        return [listener.port for listener in self._listeners]

    def advertised(self, context: RequestContext) -> tuple[str, int]:
        """What a client is told to connect to: the listener that it came through."""
        settings = context.connection.listener
        port = next((one.port for one in self._listeners if one.settings is settings), settings.port)
        return settings.advertised(port)

    # Topics and partitions.

    def partition(self, topic: str, index: int) -> Partition | None:
        return self._partitions.get((topic, index))

    def partitions_of(self, topic: str) -> list[Partition]:
        found = self.topics.get(topic)
        indexes = range(0 if found is None else found.partition_count)
        return [self._partitions[topic, index] for index in indexes if (topic, index) in self._partitions]

    def all_partitions(self) -> Iterator[Partition]:
        return iter(list(self._partitions.values()))

    def topic_settings(self, topic: str) -> TopicSettings:
        return self._topic_settings[topic]

    def ensure_internal_topic(self, name: str) -> Topic:
        return self.topics.get(name) or self.topics.ensure_internal(name, self.settings)

    @property
    def acknowledges_after_sync(self) -> bool:
        return self.durability.mode is Fsync.ALWAYS

    def _open(self, topic: Topic, indexes: Iterable[int]) -> Slices[None]:
        self.on_config(topic)
        opened: list[Partition] = []
        try:
            for index in indexes:
                if opened:
                    reach("between_new_partitions")
                if opened and len(opened) % _PARTITIONS_AT_ONCE == 0:
                    yield
                partition = self.directory.open_partition(
                    topic.name,
                    index,
                    self._topic_settings[topic.name].log,
                    now_ms=self.clock.now_ms(),
                    hold_high_watermark=self.acknowledges_after_sync,
                    leader_epoch=self.leader_epoch,
                    producer_budget=self.producer_budget,
                )
                opened.append(partition)
        except StorageError:
            for partition in opened:
                partition.close(clean=False)
            raise
        for partition in opened:
            self._partitions[topic.name, partition.index] = partition

    def _remove_strangers(self) -> None:
        """What is left of topics whose deletion was cut short: a new topic of that name must not find old records."""
        for name, index in self.directory.partitions():
            if (name, index) not in self._partitions:
                _LOG.info("removing %s-%d, which belongs to no topic", name, index)
                self.directory.open_partition(name, index, LogSettings(), now_ms=self.clock.now_ms()).delete()

    def on_created(self, topic: Topic) -> Slices[None]:
        return self._open(topic, range(topic.partition_count))

    def on_grown(self, topic: Topic, first_new: int) -> Slices[None]:
        return self._open(topic, range(first_new, topic.partition_count))

    def on_deleted(self, topic: Topic) -> Slices[None]:
        del self._topic_settings[topic.name]
        deleted = [self._partitions.pop((topic.name, index)) for index in range(topic.partition_count)]
        for partition in deleted:
            partition.discard()
        try:
            for number, _ in enumerate(remove_directories(self.directory.files, [one.path for one in deleted])):
                if number % _PARTITIONS_AT_ONCE == 0 and number > 0:
                    yield
        except StorageError as error:
            self.note_storage_error(error)  # the next start removes what is left
        if self._has_groups:
            yield from self.groups.topic_deleted(topic.name)

    def on_config(self, topic: Topic) -> None:
        settings = self._topic_settings[topic.name] = topic_settings(topic.configs, self.settings)
        for partition in self.partitions_of(topic.name):
            partition.settings = settings.log

    # Connections.

    def new_sasl_exchange(self, listener: ListenerSettings) -> SaslExchange | None:
        if not listener.uses_sasl:
            return None
        from semel.broker.sasl import SaslExchange

        return SaslExchange(
            listener.sasl_mechanisms,
            self.credentials,
            now_ms=self.clock.now_ms,
            session_lifetime_ms=listener.session_lifetime_ms or self.settings.session_lifetime_ms,
        )

    @property
    def is_full(self) -> bool:
        """Whether another connection takes the place of one that is open."""
        return len(self._connections) >= self.connections_max

    def connection_opened(self, connection: Connection) -> None:
        if self.is_full:
            self._close_longest_idle()
        self._connections[connection] = None
        connection.note_held()
        self.metrics.connections_opened += 1

    def _close_longest_idle(self) -> None:
        """So that who connects and does nothing cannot keep others out. A client that was idle connects again."""
        idle = min(self._connections, key=lambda one: (one.is_logged_in, one.is_busy, one.last_active_ms))
        _LOG.warning("%d connections are open: closing the longest idle, from %s", self.connections_max, idle.host)
        idle.close()

    def request_waits(self, task: asyncio.Task[None]) -> None:
        self._requests[task] = None
        task.add_done_callback(lambda _: self._requests.pop(task, None))

    def connection_closed(self, connection: Connection) -> None:
        self._connections.pop(connection, None)
        self.held_memory.forget(connection)

    def close_connections(self) -> None:
        for connection in list(self._connections):
            connection.close()

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    # Time.

    def _schedule_tick(self) -> None:
        if not self._is_stopping:
            self.clock.call_later(_TICK_MS, self._start_tick)

    def _start_tick(self) -> None:
        if not self._is_stopping:
            self._tick_task = asyncio.ensure_future(self._tick())

    async def wait_tick(self) -> None:
        """Return when the clock work that has begun is done."""
        if self._tick_task is not None:
            await self._tick_task

    async def _tick(self) -> None:
        try:
            await self.transactions.tick()
            await self._finish_soon(self._keep_house())
        except Exception:
            # One failed round must not end all time-outs; the next is a tenth of a second away.
            _LOG.exception("the broker's clock work failed")
            self.metrics.unexpected_errors += 1
        self._schedule_tick()

    async def _finish_soon(self, work: Slices[None]) -> None:
        """Do work by the clock: the first slice at once, and with it nearly always all, the others in their turns."""
        for _ in work:
            await finish(work, self.lane)

    def _keep_house(self) -> Slices[None]:
        settings = self.settings
        if self._has_groups:
            yield from self.groups.tick()
        if self._is_due("connections", settings.connections_idle_max_ms // 10):
            self._close_idle()
        if self._is_due("retention", settings.retention_check_interval_ms):
            yield from self._for_each_partition(self._apply_retention)
        self.durability.sync_soon([one for one in self.all_partitions() if one.has_unsynced_segments])
        is_idle = self._cleaning is None and settings.cleaner_enabled
        if is_idle and self._is_due("compaction", settings.cleaner_backoff_ms):
            self._cleaning = asyncio.ensure_future(self._clean())
        if self._is_due("producers", settings.producer_id_expiration_check_interval_ms):
            yield from self._for_each_partition(self._expire_producers)
        expires = self._is_due("transactional ids", settings.transactional_id_expiration_check_interval_ms)
        if expires and not (yield from self.transactions.try_expire()):
            self._due_ms["transactional ids"] = self.clock.now_ms()  # with the next tick once more
        if self._has_groups and self._is_due("offsets", settings.offsets_retention_check_interval_ms):
            yield from self.groups.expire()

    async def _clean(self) -> None:
        """Compact what asks for it, one partition after the other, beside everything else."""
        try:
            for number, partition in enumerate(self.all_partitions()):
                if number > 0 and number % _PARTITIONS_LOOKED_AT_AT_ONCE == 0:
                    await self.lane.wait_turn()
                if not self._is_open(partition):
                    continue
                cleaning = None if self._is_stopping else plan_cleaning(partition, self.clock.now_ms())
                if cleaning is None:
                    continue
                try:
                    if partition.topic == TRANSACTION_STATE:
                        # A decided commit may go from its log only when the markers that it stands for are safe.
                        await self.durability.wait_committed(list(self.all_partitions()))
                    await self.durability.run_aside(cleaning.run)
                    cleaning.finish()
                except (StorageError, CorruptRecords, RecordTooLarge) as error:
                    self.note_storage_error(error)
        finally:
            self._cleaning = None

    def _is_due(self, what: str, interval_ms: int) -> bool:
        now_ms = self.clock.now_ms()
        if now_ms < self._due_ms.setdefault(what, now_ms + interval_ms):
            return False
        self._due_ms[what] = now_ms + interval_ms
        return True

    def _apply_retention(self, partition: Partition) -> bool:
        return partition.apply_retention(self.clock.now_ms()) > 0  # files are removed, and some are synced before

    def _expire_producers(self, partition: Partition) -> bool:
        partition.expire_producers(self.clock.now_ms())
        return False

    def _for_each_partition(self, work: Callable[[Partition], bool]) -> Slices[None]:
        """`work` says whether it has kept the disk busy: then the next partition has the next turn."""
        pace = Pace(_PARTITIONS_LOOKED_AT_AT_ONCE)
        for partition in self.all_partitions():
            if not self._is_open(partition):
                continue  # it was deleted while others had their turns
            was_long = True
            try:
                was_long = work(partition)
            except StorageError as error:
                self.note_storage_error(error)
            steps = (
                _PARTITIONS_LOOKED_AT_AT_ONCE if was_long else 1 + len(partition.log.producers) // _PRODUCERS_PER_STEP
            )
            if pace.is_over(steps):
                yield

    def _is_open(self, partition: Partition) -> bool:
        return self._partitions.get((partition.topic, partition.index)) is partition

    def _close_idle(self) -> None:
        oldest_ms = self.clock.now_ms() - self.settings.connections_idle_max_ms
        for connection in list(self._connections):
            if connection.last_active_ms < oldest_ms and not connection.is_busy:
                connection.close()

    # Failures.

    def note_storage_error(self, error: Exception) -> None:
        self.metrics.storage_errors += 1
        _LOG.error("%s", error)


def _log_fatal(error: Exception) -> None:
    _LOG.critical("the broker cannot go on: %s", error)


def _read_boot_id() -> str:
    """What names this run of the operating system; empty where there is no such thing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
