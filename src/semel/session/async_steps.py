"""A session's steps under asyncio: one after the other in one thread, and none is left running by a cancellation.

A session's clients are for one thread. A step that has begun, such as a commit, cannot be taken back. A cancelled
caller waits for it to end, and only then aborts and closes, in the same thread.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


class AsyncSteps:
    """The one thread for a session's blocking calls. It is started by the first of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._executor: Executor | None = None

    async def run(self, step: Callable[[], Result]) -> Result:
        """Run one step in the thread. If the caller is cancelled, the step is waited for before that is raised."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"semel-session-{self._name}")
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._executor, contextvars.copy_context().run, step)
        cancelled: asyncio.CancelledError | None = None
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            if not running.cancelled() and (failed := running.exception()) is not None:
                cancelled.add_note(f"The step that was waited for failed: {failed!r}")
            raise cancelled
        return running.result()

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False)
