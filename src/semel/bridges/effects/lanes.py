"""Threads that work on lists of records: those of one list in their order, different lists at the same time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from semel.session.transaction import Row

Lane = Sequence[Row]


class LaneWorkers:
    """A fixed number of threads. `work` is called with one record at a time; `close` at the end of each thread.

    After the first exception, and once `stop` is set, no thread begins with another record.
    """

    def __init__(
        self, count: int, work: Callable[[Row], None], close: Callable[[], None], stop: threading.Event
    ) -> None:
        self._work = work
        self._close = close
        self._stop = stop
        self._is_halted = False
        self._waiting: queue.SimpleQueue[Lane | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=f"semel-effects-{n}") for n in range(count)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the calls that are under way."""
        self._is_halted = True
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    def work_on(self, lanes: Sequence[Lane]) -> None:
        """Wait until all are worked off, or until all threads stop. Raises the first exception."""
        for lane in lanes:
            self._waiting.put(lane)
        errors = [self._ended.get() for _ in lanes]
        for error in errors:
            if error is not None:
                raise error

    def pause(self, seconds: float) -> bool:
        """Wait for so long, less if `stop` is set meanwhile. Returns whether to stop."""
        return self._stop.wait(seconds) or self._is_halted

    def _run(self) -> None:
        try:
            while (lane := self._waiting.get()) is not None:
                self._ended.put(self._work_off(lane))
        finally:
            self._close()

    def _work_off(self, lane: Lane) -> BaseException | None:
        try:
            for row in lane:
                if self.pause(0):
                    break
                self._work(row)
        except BaseException as error:
            self._is_halted = True
            return error
        return None
