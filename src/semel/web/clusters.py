"""Connections to the cluster for the page: a few, each used by one thread at a time, and each job with a deadline."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from semel.client.cluster import Cluster, wait_readable
from semel.client.config import ClientConfig
from semel.client.connection import Connection, Stream, connect_tcp
from semel.errors import ConfigError, SemelError

T = TypeVar("T")
Job = Callable[[Cluster], T]

CONNECTIONS_MAX: Final = 4
_SLICE_S: Final = 0.5


class LookTooLong(SemelError):
    """A look at the cluster was ended because it took too long."""


class _TimeIsUp(Exception):
    """Raised within a job. It is no answer of the cluster, so nothing that handles those may take it for one."""


class ClusterPool:
    """Runs jobs on clusters of its own. A job that ends in an error leaves none of its connections behind."""

    def __init__(self, config: ClientConfig, *, size: int = CONNECTIONS_MAX) -> None:
        self._config = config
        self.is_closing = False
        """Set it to end what is running."""
        self._idle: queue.SimpleQueue[_Timed | None] = queue.SimpleQueue()
        for _ in range(size):
            self._idle.put(None)

    def run(self, job: Job[T], *, deadline_s: float) -> T:
        """In the caller's thread. Raises `LookTooLong` at the first wait for the cluster after `deadline_s`."""
        timed = self._idle.get() or _Timed(self, self._config)
        kept: _Timed | None = None
        try:
            timed.deadline = time.monotonic() + deadline_s
            found = job(timed.cluster)
            kept = timed
            return found
        except ConfigError:
            kept = timed
            raise
        except _TimeIsUp as error:
            raise LookTooLong(str(error)) from None
        finally:
            if kept is None:
                timed.cluster.close()
            self._idle.put(kept)

    def close(self) -> None:
        """Close what is idle. To be called when no job is running."""
        while not self._idle.empty():
            timed = self._idle.get()
            if timed is not None:
                timed.cluster.close()


class _Timed:
    """A cluster whose waiting ends at a deadline."""

    def __init__(self, pool: ClusterPool, config: ClientConfig) -> None:
        self._pool = pool
        self.deadline = math.inf
        self.cluster = Cluster(config, sleep=self._sleep, connect=self._connect, wait_readable=self._wait_readable)

    def _left_s(self) -> float:
        left = self.deadline - time.monotonic()
        if self._pool.is_closing:
            raise _TimeIsUp("The page is being closed.")
        if left <= 0:
            raise _TimeIsUp(
                "The look at the cluster took too long, so it was ended. Nothing was changed. Look at less at a time, "
                "or use semel inspect, which has no such limit."
            )
        return left

    def _sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, self._left_s()))

    def _connect(self, host: str, port: int, timeout_s: float) -> Stream:
        return connect_tcp(host, port, min(timeout_s, self._left_s()))

    def _wait_readable(self, connections: Iterable[Connection], timeout_s: float) -> list[Connection]:
        return wait_readable(connections, min(timeout_s, self._left_s(), _SLICE_S))
