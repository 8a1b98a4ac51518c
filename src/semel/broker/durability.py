"""When bytes reach the disk: one sync at a time, shared by everybody who waits for one."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

from semel.broker.pacing import Slices, wait_for
from semel.broker.storage.failures import StorageError

if TYPE_CHECKING:
    from semel.broker.storage.partition import Partition
    from semel.broker.storage.persistence import Unsynced

T = TypeVar("T")

_LOG: Final = logging.getLogger("semel.broker")
_THREADS: Final = 2  # one syncs, one compacts: a commit must not wait for a compaction
# To hand a sync to another thread and to hear of its end costs the loop more than a quick disk takes for it. A disk
# that is slower, or slow at the moment, must not keep everybody waiting.
_QUICK_S: Final = 0.0005
_WEIGHT_OF_LAST: Final = 0.2
# A transaction may have thousands of partitions: others have their turns in between.
_COLLECTED_AT_ONCE: Final = 128
_MARKED_AT_ONCE: Final = 4


class Fsync(enum.Enum):
    """What survives the loss of power. The end of the process alone loses nothing in any of them."""

    ALWAYS = "always"
    """Everything that was acknowledged; nothing is shown to readers before it is safe."""
    COMMIT = "commit"
    """Committed transactions with all their records and offsets, and who owns a transactional id."""
    NEVER = "never"
    """What the operating system has written by itself, as with Apache Kafka's defaults on a single node."""


class Durability:
    """Groups syncs: while one is under way, all who ask share the next."""

    def __init__(
        self,
        mode: Fsync,
        on_failure: Callable[[Exception], None],
        *,
        in_thread: bool = True,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`in_thread=False` blocks the loop while the disk works: only a simulated disk is fast enough for that."""
        self.mode = mode
        self._in_thread = in_thread
        self._timer = timer
        self._on_failure = on_failure
        self._waiting: dict[Partition, None] = {}  # in the order of asking: the same run is the same again
        self._next_round: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._computer: ThreadPoolExecutor | None = None
        self._long_computer: ThreadPoolExecutor | None = None
        self._mover: ThreadPoolExecutor | None = None
        self._writer: ThreadPoolExecutor | None = None
        self._usual_s = 1.0
        """How long a sync of one partition takes lately; not known at first."""

    @property
    def uses_threads(self) -> bool:
        return self._in_thread

    async def wait_committed(self, partitions: Iterable[Partition]) -> None:
        """Return when all that these partitions hold survives the loss of power, unless the mode is NEVER."""
        if self.mode is not Fsync.NEVER:
            await self._join_round(partitions)

    async def wait_acknowledged(self, partitions: Iterable[Partition]) -> None:
        """The same for what no transaction commits; only the mode ALWAYS waits for it."""
        if self.mode is Fsync.ALWAYS:
            await self._join_round(partitions)

    def note_appended(self, partitions: Iterable[Partition]) -> None:
        """Nobody waits for these, but in the mode ALWAYS readers see them only after a sync."""
        if self.mode is Fsync.ALWAYS:
            self._round_for(partitions)

    def sync_soon(self, partitions: Collection[Partition]) -> None:
        """Nobody waits for these, in any mode: what is synced need not be looked through after a crash."""
        if partitions:
            self._round_for(partitions)

    async def run_aside(self, work: Callable[[], None]) -> None:
        """Run what takes long and touches only files of its own in another thread."""
        if self._in_thread:
            await asyncio.get_running_loop().run_in_executor(self._threads(), work)
        else:
            work()

    async def compute_aside(self, work: Callable[[], T]) -> T:
        """Run what would hold the loop for long, and touches nothing that the loop changes, in another thread.

        There is one such thread, and not those above: no sync waits for what a client has asked for. Each call should
        take some milliseconds at most, since all clients take turns there.
        """
        if not self._in_thread:
            return work()
        if self._computer is None:
            self._computer = ThreadPoolExecutor(1, thread_name_prefix="semel-compute")
        return await asyncio.get_running_loop().run_in_executor(self._computer, work)

    async def compute_long_aside(self, work: Callable[[], T]) -> T:
        """The same for what takes longer, in a thread of its own: only other long work waits for it."""
        if not self._in_thread:
            return work()
        if self._long_computer is None:
            self._long_computer = ThreadPoolExecutor(1, thread_name_prefix="semel-compute-long")
        return await asyncio.get_running_loop().run_in_executor(self._long_computer, work)

    def move_aside(self, work: Callable[[], T]) -> Slices[T]:
        """Read or write one batch of many megabytes in a thread of its own: only other large batches wait for it."""
        if not self._in_thread:
            return work()
        if self._mover is None:
            self._mover = ThreadPoolExecutor(1, thread_name_prefix="semel-large")
        return (yield from wait_for(self._mover.submit(work)))

    def write_aside(self, work: Callable[[], None]) -> Slices[None]:
        """Replace one of the broker's small files, durably, in a thread of its own: in the order of asking."""
        begun = self.begin_write(work)
        if begun is None:
            return work()
        return (yield from wait_for(begun))

    def begin_write(self, work: Callable[[], None]) -> Future[None] | None:
        """The same without waiting. None, and nothing was begun, where there are no threads."""
        if not self._in_thread:
            return None
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="semel-files")
        return self._writer.submit(work)

    async def close(self) -> None:
        if self._task is not None:
            await self._task
        for executor in self._all_executors():
            executor.shutdown()

    def abandon(self) -> None:
        """Wait only for the sync that is under way in the other thread; nobody hears of it."""
        if self._task is not None:
            self._task.cancel()
        for executor in self._all_executors():
            executor.shutdown(cancel_futures=True)

    def _all_executors(self) -> list[ThreadPoolExecutor]:
        executors = (self._executor, self._computer, self._long_computer, self._mover, self._writer)
        return [executor for executor in executors if executor is not None]

    def _join_round(self, partitions: Iterable[Partition]) -> asyncio.Future[None]:
        # Shielded: a client that goes away must not cancel the round of the others.
        return asyncio.shield(self._round_for(partitions))

    def _round_for(self, partitions: Iterable[Partition]) -> asyncio.Future[None]:
        self._waiting.update(dict.fromkeys(partitions))
        if self._next_round is None:
            self._next_round = asyncio.get_running_loop().create_future()
        if self._task is None:
            self._task = asyncio.ensure_future(self._run_rounds())
        return self._next_round

    async def _run_rounds(self) -> None:
        while self._next_round is not None:
            done, self._next_round = self._next_round, None
            partitions, self._waiting = list(self._waiting), {}
            ends = [(partition, partition.log.log_end_offset) for partition in partitions]
            try:
                unsynced = await self._collect(partitions)
                await self._sync([dirty for _, dirty in unsynced])
                await self._mark_synced(unsynced)
            except StorageError as error:
                # What the kernel has thrown away after a failed sync cannot be found out: only a restart, which reads
                # what is there, gives a known state again. Nobody is told that anything was stored.
                _LOG.critical("the disk refused a sync: %s", error)
                self._on_failure(error)
                return
            for partition, end in ends:
                if partition.hold_high_watermark:
                    partition.advance_high_watermark(end)
            done.set_result(None)
        self._task = None

    async def _collect(self, partitions: Sequence[Partition]) -> list[tuple[Partition, Unsynced]]:
        found: list[tuple[Partition, Unsynced]] = []
        for number, partition in enumerate(partitions):
            if number > 0 and number % _COLLECTED_AT_ONCE == 0:
                await asyncio.sleep(0)
            if partition.failure is None and (dirty := partition.dirty_files()) is not None:
                found.append((partition, dirty))
        return found

    async def _mark_synced(self, unsynced: Sequence[tuple[Partition, Unsynced]]) -> None:
        """After a roll this writes a small file for the partition, and syncs it."""
        for number, (partition, dirty) in enumerate(unsynced):
            if number > 0 and number % _MARKED_AT_ONCE == 0:
                await asyncio.sleep(0)
            if partition.failure is None:
                partition.mark_synced(dirty)

    async def _sync(self, unsynced: list[Unsynced]) -> None:
        if not unsynced:
            return
        if not self._in_thread or self._usual_s * len(unsynced) < _QUICK_S:
            took_s = self._sync_all(unsynced)
        else:
            took_s = await asyncio.get_running_loop().run_in_executor(self._threads(), self._sync_all, unsynced)
        self._usual_s += (took_s / len(unsynced) - self._usual_s) * _WEIGHT_OF_LAST

    def _sync_all(self, unsynced: list[Unsynced]) -> float:
        """Returns how many seconds it took."""
        started = self._timer()
        for one in unsynced:
            one.sync()
        return self._timer() - started

    def _threads(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="semel-disk")
        return self._executor
