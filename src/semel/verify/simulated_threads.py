"""Blocking code in virtual time: it runs in a thread of its own, and only while the event loop stands still for it.

One baton goes from the loop to a thread and back, so exactly one of all of them runs at any moment, and who comes next
is decided by the loop alone: it makes no difference to whom the machine gives its processors.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

_TICK_S = 1e-6
"""A wait ends a little late, as real ones do: otherwise rounding could leave it a hair before its deadline for ever."""


class Killed(BaseException):
    """Ends blocking code where it stands, as SIGKILL does: no `except Exception` of a client catches it."""


class SimulatedThread:
    """Runs `work`, which waits by `sleep` and `wait_until` and by nothing else.

    >>> from semel.verify.virtual_time import VirtualTimeLoop
    >>> loop, told = VirtualTimeLoop(), []
    >>> def work() -> None:
    ...     thread.sleep(60)
    ...     told.append(round(loop.time()))
    >>> thread = SimulatedThread(loop, work)
    >>> loop.run_until_complete(thread.run())
    >>> told
    [60]
    >>> loop.close()
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
        self.is_killed = False
        self._loop = loop
        self._work = work
        self._error: BaseException | None = None
        self._done: asyncio.Future[None] = loop.create_future()
        self._its_turn, self._loops_turn = threading.Lock(), threading.Lock()
        self._its_turn.acquire()
        self._loops_turn.acquire()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._alarm: asyncio.Handle | None = None
        self._can_be_woken = False

    # In the loop.

    async def run(self) -> None:
        """Until the work is done or killed; raises what it raises."""
        self._thread.start()
        self._alarm = self._loop.call_soon(self._resume)
        try:
            await self._done
        finally:
            self.kill()

    def kill(self) -> None:
        """End the work at the place where it waits."""
        self.is_killed = True
        if self._alarm is not None:
            self._alarm.cancel()
            self._resume()

    def _resume(self) -> None:
        self._alarm = None
        self._its_turn.release()
        self._loops_turn.acquire()
        if self._alarm is not None:
            return
        self._thread.join()  # it waits for nothing any more
        if self._done.done():
            return
        if self._error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(self._error)

    # In the thread, and `wake` from anywhere.

    def _live(self) -> None:
        self._its_turn.acquire()
        try:
            with suppress(Killed):
                self.check_alive()
                self._work()
        except BaseException as error:
            self._error = error
        self._loops_turn.release()

    def check_alive(self) -> None:
        """Whatever leaves the process asks this first: the dead send nothing."""
        if self.is_killed:
            raise Killed

    def sleep(self, seconds: float) -> None:
        self._wait(self._loop.time() + max(0.0, seconds) + _TICK_S)

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until it is so, at most for this long; whoever changes it calls `wake`."""
        self.check_alive()
        deadline = self._loop.time() + timeout_s + _TICK_S
        while not is_so():
            if timeout_s <= 0 or self._loop.time() >= deadline - _TICK_S / 2:
                return False
            self._can_be_woken = True
            self._wait(deadline)
        return True

    def wake(self) -> None:
        """Something has happened that the thread may wait for."""
        if self._can_be_woken and self._alarm is not None:
            self._can_be_woken = False
            self._alarm.cancel()
            self._alarm = self._loop.call_soon(self._resume)

    def _wait(self, deadline: float) -> None:
        self.check_alive()
        self._alarm = self._loop.call_at(deadline, self._resume)
        self._loops_turn.release()
        self._its_turn.acquire()
        self._can_be_woken = False
        self.check_alive()
