"""Answers of the cluster that all open tabs share: one look at a time for each question, kept for a moment.

A page never waits long. What is not there yet is told as being looked at, and what could not be looked at again is
shown as it was seen last, with its time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from semel.errors import SemelError
from semel.web.clusters import CONNECTIONS_MAX, ClusterPool, Job

T = TypeVar("T")

_KEPT_MAX: Final = 200
"""Answers."""
_RUNNING_MAX: Final = 32
_REST: Final = 4.0
"""After a look the cluster is left alone for so many times as long as it took, so what is large is asked less often."""
_AFTER_FAILURE_S: Final = 1.0
_LOG: Final = logging.getLogger("semel.web")


class TooBusy(SemelError):
    """There are more questions than the page may put to the cluster at a time."""


@dataclass(frozen=True, slots=True)
class Look(Generic[T]):
    """What is known about one question at this moment."""

    value: T | None = None
    at: float | None = None
    """Seconds since 1970, when `value` was seen."""
    error: SemelError | None = None
    """Why the last look failed. `value` may be there all the same, from an earlier one."""
    is_pending: bool = False
    """The first look is still under way."""


class _Entry:
    def __init__(self) -> None:
        self.look: Look[Any] = Look()
        self.began = 0.0
        self.ended = -1e9
        """When the last look began and ended, whatever came of it; of the monotonic clock."""
        self.rest_s = 0.0
        self.running: asyncio.Future[None] | None = None


class SharedLooks:
    """To be used in one event loop; the jobs run in threads."""

    def __init__(self, pool: ClusterPool) -> None:
        self._pool = pool
        self._threads = ThreadPoolExecutor(CONNECTIONS_MAX, thread_name_prefix="semel-web")
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._running = 0

    async def ask(
        self,
        key: Hashable,
        job: Job[T],
        *,
        fresh_s: float = 2.0,
        patience_s: float = 0.2,
        deadline_s: float = 10.0,
    ) -> Look[T]:
        """What was seen within `fresh_s`, or longer ago if a look takes long.

        Waits at most `patience_s` for a new look, which goes on by itself.
        """
        entry = self._entries.setdefault(key, _Entry())
        self._entries.move_to_end(key)
        wait_s = max(fresh_s, entry.rest_s) if entry.look.error is None else _AFTER_FAILURE_S
        if entry.running is None and time.monotonic() - entry.ended >= wait_s:
            self._start(entry, lambda: self._pool.run(job, deadline_s=deadline_s))
        if entry.running is not None:
            await asyncio.wait([entry.running], timeout=patience_s)
        self._forget_old()
        if entry.look.value is None and entry.look.error is None:
            return Look(is_pending=True)
        return entry.look

    async def do(self, job: Job[T], *, deadline_s: float = 15.0) -> T:
        """A job whose answer is for one caller alone; raises what it raises."""
        answers: list[T] = []
        entry = _Entry()
        self._start(entry, lambda: answers.append(self._pool.run(job, deadline_s=deadline_s)))
        assert entry.running is not None, "it was started"
        await entry.running
        if entry.look.error is not None:
            raise entry.look.error
        return answers[0]

    def forget(self) -> None:
        """After a change: nothing that was seen before it is shown again."""
        self._entries.clear()

    def close(self) -> None:
        """Ends what is under way at its next wait."""
        self._pool.is_closing = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._pool.close()

    def _start(self, entry: _Entry, look: Callable[[], Any]) -> None:
        if self._running >= _RUNNING_MAX:
            raise TooBusy("The page is busy with other questions to the cluster. Nothing was asked; try again shortly.")
        self._running += 1
        entry.began = time.monotonic()
        under_way = asyncio.get_running_loop().run_in_executor(self._threads, look)
        entry.running = asyncio.ensure_future(self._finish(entry, under_way))

    async def _finish(self, entry: _Entry, under_way: asyncio.Future[Any]) -> None:
        try:
            entry.look = Look(await under_way, time.time())
        except SemelError as error:
            entry.look = Look(entry.look.value, entry.look.at, error)
        except Exception as error:
            _LOG.exception("a look at the cluster failed")
            unexpected = SemelError(f"Unexpected error: {type(error).__name__}. The log of semel ui says more.")
            entry.look = Look(entry.look.value, entry.look.at, unexpected)
        finally:
            entry.ended = time.monotonic()
            entry.rest_s = _REST * (entry.ended - entry.began)
            entry.running = None
            self._running -= 1

    def _forget_old(self) -> None:
        while len(self._entries) > _KEPT_MAX:
            oldest = next(iter(self._entries))
            if self._entries[oldest].running is not None:
                return
            del self._entries[oldest]
