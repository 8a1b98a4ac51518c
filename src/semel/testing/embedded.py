"""A broker inside the test's own process, in a thread of its own: with a clock, a disk and faults that the test rules.

For a broker as users run it, in its own process, take `semel.Broker`.
"""

from __future__ import annotations

import asyncio
import inspect
import shutil
import tempfile
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar, overload

from semel.broker.durability import Fsync
from semel.broker.faults import Faults
from semel.broker.listeners import ListenerSettings
from semel.broker.metrics import Metrics
from semel.broker.state import Broker, BrokerOptions
from semel.broker.storage.disk import Disk
from semel.errors import InvalidState
from semel.testing.manual_clock import ManualClock
from semel.testing.simulated_disk import SimulatedCrash

T = TypeVar("T")

_CALL_TIMEOUT_S: Final = 60.0
_HOP_MS: Final = 100
_HOPS_MAX: Final = 200
_TURNS_AFTER_HOP: Final = 3


class EmbeddedBroker:
    """A broker in this process.

    >>> with EmbeddedBroker(clock=ManualClock(), config={"num.partitions": "3"}) as broker:
    ...     broker.clock.advance(ms=60_000)
    ...     broker.call(lambda: broker.broker.settings.num_partitions)
    3

    Its data is in a temporary folder unless `data` or `disk` is given. It stays at its port when it is started again.
    """

    def __init__(
        self,
        *,
        config: Mapping[str, str] | None = None,
        clock: ManualClock | None = None,
        faults: Faults | None = None,
        disk: Disk | None = None,
        data: Path | None = None,
        fsync: Fsync | str = Fsync.COMMIT,
        listeners: Sequence[ListenerSettings] = (ListenerSettings(),),
        plain_users: Mapping[str, str] | None = None,
        scram_users: Mapping[str, str] | None = None,
    ) -> None:
        self.faults = faults or Faults()
        self.fatal_error: Exception | None = None
        """Why the broker has ended by itself, if it has."""
        self._clock = clock
        self._disk = disk
        self._folder: str | None = None
        if data is None and disk is None:
            self._folder = tempfile.mkdtemp(prefix="semel-embedded-")
        self._options = BrokerOptions(
            data=data or Path(self._folder or "data"),
            config=dict(config or {}),
            listeners=tuple(listeners),
            fsync=Fsync(fsync),
            plain_users=dict(plain_users or {}),
            scram_users=dict(scram_users or {}),
        )
        self._boot = 1
        self._broker: Broker | None = None
        self._ended: asyncio.Future[None]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # What there is.

    @property
    def broker(self) -> Broker:
        """The broker itself, to be touched in its own thread only: see `call`."""
        if self._broker is None:
            raise InvalidState("The embedded broker has not been started.")
        return self._broker

    @property
    def bootstrap(self) -> str:
        """`host:port` of the first listener, also while the broker is down."""
        return self.broker.bootstrap

    @property
    def ports(self) -> list[int]:
        """Of all listeners, in their order."""
        return [listener.port for listener in self._options.listeners]

    @property
    def metrics(self) -> Metrics:
        return self.broker.metrics

    @property
    def clock(self) -> ManualClock:
        if self._clock is None:
            raise InvalidState("This embedded broker runs by the system's clock: give it clock=ManualClock().")
        return self._clock

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @overload
    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T: ...
    @overload
    def call(self, work: Callable[[], T]) -> T: ...
    def call(self, work: Callable[[], Any]) -> Any:
        """Run something in the broker's thread, wait for it and return what it returns; it may be a coroutine."""
        if self._loop is None or not self.is_running:
            raise InvalidState("The embedded broker is not running: call restart() first.")

        async def run() -> Any:
            result = work()
            return await result if inspect.isawaitable(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(_CALL_TIMEOUT_S)

    # Starting and ending.

    def __enter__(self) -> EmbeddedBroker:
        try:
            self.start()
        except BaseException:
            self._remove_folder()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        if self.is_running:
            raise InvalidState("The embedded broker is already running.")
        if self._clock is not None:
            self._clock.forget_calls()
        self.fatal_error = None
        self._loop = asyncio.new_event_loop()
        self._ended = self._loop.create_future()
        self._thread = threading.Thread(target=_run, args=(self._loop, self._ended), name="semel-embedded", daemon=True)
        self._thread.start()
        try:
            self.call(self._start)
        except BaseException:
            self._end_thread()
            raise
        if self._clock is not None:
            self._clock.advance_by = self._advance

    def stop(self) -> None:
        """End it cleanly, as SIGTERM does. Data and port stay, for `restart`."""
        if self.is_running:
            try:
                if self.fatal_error is None:
                    self.call(self.broker.stop)
            finally:
                self._end_thread()

    def crash(self) -> None:
        """End it as SIGKILL does: nothing is flushed, no client is answered. Data and port stay, for `restart`."""
        if self.is_running:
            if self.fatal_error is None:
                self.call(self._abandon)
            self._end_thread()

    def restart(self, *, disk: Disk | None = None, power_was_cut: bool = False) -> None:
        """Start again, after a clean stop if it still runs. With `disk` on another one, such as a rebooted one."""
        self.stop()
        self._disk = disk or self._disk
        self._boot += power_was_cut
        self.start()

    async def _start(self) -> None:
        self._broker = Broker(
            self._options,
            clock=self._clock,
            disk=self._disk,
            faults=self.faults,
            boot_id=f"boot-{self._boot}",
            on_fatal=self._failed,
        )
        await self._broker.start()
        listeners = zip(self._options.listeners, self._broker.ports(), strict=True)
        self._options = replace(
            self._options, listeners=tuple(replace(listener, port=port) for listener, port in listeners)
        )

    async def _abandon(self) -> None:
        # First of all the tasks: each ends where it stands, as in a process that is killed. One that has not begun yet
        # begins, or what it was to wait for would complain that nobody did.
        await asyncio.sleep(0)
        own = asyncio.current_task()
        for task in asyncio.all_tasks():
            if task is not own:
                task.cancel()
        with suppress(SimulatedCrash):  # a disk that has died with its process closes no files
            self.broker.abandon()

    def _failed(self, error: Exception) -> None:
        """The broker cannot go on. Its process would end here, so nothing may happen in its thread any more."""
        self.fatal_error = error
        if self._loop is not None:
            self._loop.create_task(self._abandon_and_end())

    async def _abandon_and_end(self) -> None:
        await self._abandon()
        self._end()

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _end_thread(self) -> None:
        if self._loop is not None and self._thread is not None:
            with suppress(RuntimeError):  # the loop may have ended by itself
                self._loop.call_soon_threadsafe(self._end)
            self._thread.join(_CALL_TIMEOUT_S)
        if self._clock is not None:
            self._clock.advance_by = self._clock.move

    # Time.

    def _advance(self, ms: int) -> None:
        """In hops, since what is due may lead to something else that is due before the end."""
        hop_ms = max(_HOP_MS, ms // _HOPS_MAX)
        while ms > 0:
            hop_ms = min(hop_ms, ms)
            self.call(lambda hop_ms=hop_ms: self._hop(hop_ms))
            ms -= hop_ms

    async def _hop(self, ms: int) -> None:
        self.clock.move(ms)
        await self.broker.wait_tick()
        for _ in range(_TURNS_AFTER_HOP):  # whoever was woken gets to answer
            await asyncio.sleep(0)


def _run(loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
    """What the broker's thread does."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(ended)
        loop.run_until_complete(_cancel_all())
    finally:
        loop.close()


async def _cancel_all() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
