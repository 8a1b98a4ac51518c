"""The machine that the simulated broker runs on: it stops and starts it, kills it, cuts the power, fills the disk."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from uuid import UUID

from semel.broker.durability import Durability, Fsync
from semel.broker.state import Broker, BrokerOptions
from semel.broker.storage.failures import StorageError
from semel.broker.storage.persistence import Unsynced
from semel.testing.simulated_disk import SimulatedCrash, SimulatedDisk
from semel.verify.simulated_network import SimulatedConnection
from semel.verify.simulation_ledger import Violation
from semel.verify.virtual_time import ProcessClock

_SET_BACK_MAX_MS = 4_000
_PROCESS_ID = 4711
"""Of every broker: the number stands in a file, and how long it is decides what else fits on a full disk."""


class BrokerLog(logging.Handler):
    """Keeps the last error that the broker logged with a traceback: the reason behind `unexpected_errors`."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.last = logging.Formatter().format(record)


class SlowDurability(Durability):
    """Syncs that take their time, so that others come in between and a crash can find one half-way."""

    def __init__(self, mode: Fsync, on_failure: Callable[[Exception], None], chance: random.Random) -> None:
        super().__init__(mode, on_failure, in_thread=False)
        self._chance = chance

    async def _sync(self, unsynced: list[Unsynced]) -> None:
        if unsynced:
            await asyncio.sleep(self._chance.random() ** 4 * 0.05)
        await super()._sync(unsynced)


class SimulatedHost:
    """One broker process after another, on one disk."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        seed: int,
        *,
        config: Mapping[str, str],
        fsync: Fsync,
        note: Callable[[str], None],
    ) -> None:
        self.disk = SimulatedDisk(seed=seed)
        self.disk.make_directory("data")
        self.disk.sync_directory("")
        self.on_event: Callable[[Broker], None] = lambda broker: None
        self.fatal: Exception | None = None
        self.is_disk_full = False
        self._loop = loop
        self._chance = random.Random(seed)
        self._options = BrokerOptions(data=Path("data"), config=config, fsync=fsync)
        self._note = note
        self._clock = ProcessClock(loop)
        self._broker: Broker | None = None
        self._boots = 1

    # What the network asks.

    def broker_if_up(self) -> Broker | None:
        return None if self.is_broken else self._broker

    @property
    def broker(self) -> Broker:
        assert self._broker is not None, "no broker runs"
        return self._broker

    @property
    def is_broken(self) -> bool:
        """The process has died in a write, or has given up because the disk refused a sync."""
        return self.disk.is_dead or self.fatal is not None

    def note(self, line: str) -> None:
        self._note(line)

    def deliver(self, connection: SimulatedConnection, frame: bytes) -> None:
        if connection.broker is not self.broker_if_up():
            return
        try:
            connection.receive(frame)
        except SimulatedCrash:
            self.note("the broker dies in a write")
        self.happened()

    def happened(self) -> None:
        broker = self.broker_if_up()
        if broker is not None:
            self.on_event(broker)

    # What happens to the machine.

    async def start(self) -> Broker:
        """Start a broker on what the disk holds. Raises StorageError while the disk is full."""
        self._clock = ProcessClock(self._loop, self._clock.ahead_ms)
        self.fatal = None
        broker = Broker(
            self._options,
            clock=self._clock,
            disk=self.disk,
            boot_id=f"boot {self._boots}",
            process_id=_PROCESS_ID,
            new_id=lambda: UUID(int=self._chance.getrandbits(128), version=4),
        )
        broker.durability = SlowDurability(self._options.fsync, self._note_fatal, self._chance)
        await broker.start(listen=False)
        self._broker = broker
        self._clock.after_call = self.happened
        return broker

    def _note_fatal(self, error: Exception) -> None:
        if not self.is_disk_full:
            raise Violation(f"the disk is sound, and the broker gave up: {error}")
        self.note(f"the broker gives up: {error}")
        self.fatal = error

    async def stop(self) -> Broker:
        """End the process in good order; returns it as it was at its end."""
        broker = self.broker
        self.note("stop")
        self._broker = None
        await broker.stop()
        self._end_process()
        self.disk = self.disk.reboot(power_cut=False)
        return broker

    def kill(self, *, power_cut: bool = False) -> None:
        """End the process at once; with the power goes what was never synced."""
        self.note("power cut" if power_cut else "kill")
        broker, self._broker = self._broker, None
        self._end_process()
        if broker is not None:
            broker.close_connections()
        self.disk = self.disk.reboot(power_cut=power_cut, seed=self._chance.getrandbits(32))
        if power_cut:
            self._boots += 1

    def _end_process(self) -> None:
        self.disk.is_dead = True  # whatever of the old process still runs cannot write any more
        self._clock.is_alive = False
        if self._chance.random() < 0.3:
            self._clock.ahead_ms = max(0, self._clock.ahead_ms - self._chance.randrange(_SET_BACK_MAX_MS))

    def crash_in_a_write(self) -> None:
        """The process will die in the middle of one of its next operations on the disk."""
        self.disk.crash_at = self.disk.operations + self._chance.randint(1, 25)

    def fill_disk(self) -> None:
        self.note("the disk is full")
        self.is_disk_full = True
        self.disk.free_bytes = self._chance.randrange(300)

    def empty_disk(self) -> None:
        self.note("the disk has space again")
        self.is_disk_full = False
        self.disk.free_bytes = -1

    def jump(self, ms: int) -> None:
        """The machine slept: its clock is ahead, and no connection has outlived it."""
        self.note(f"the clock jumps by {ms} ms")
        self._clock.ahead_ms += ms
        if self._broker is not None:
            self._broker.close_connections()

    async def start_until_up(self) -> Broker:
        """Start, after crashes and a full disk again, until a broker runs."""
        while True:
            try:
                return await self.start()
            except SimulatedCrash:
                self.note("the broker dies while it starts")
                self.kill()
            except StorageError as error:
                if not self.is_disk_full:
                    raise Violation(f"the broker does not start: {error}") from error
                self.kill()
                self.empty_disk()
