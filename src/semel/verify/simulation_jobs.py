"""Shares the seeds of a simulation among processes; what they found comes back in the order of the seeds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")

_AHEAD: Final = 4
"""So many seeds a process are handed out at a time: enough to go on while an earlier one takes long."""


def run_all(run: Callable[[int], T], seeds: Sequence[int], jobs: int) -> Iterator[T]:
    """What `run` returns for each seed. With one job, or one seed, it runs in this process.

    When the caller stops half-way, seeds that have not begun are given up.

    >>> list(run_all(abs, [-1, -2], jobs=1))
    [1, 2]
    """
    if jobs <= 1 or len(seeds) <= 1:
        yield from map(run, seeds)
        return
    # Not forked: another library's thread may hold a lock at that moment, which nobody would ever give back.
    context = multiprocessing.get_context("spawn")
    begun: deque[Future[T]] = deque()
    with ProcessPoolExecutor(min(jobs, len(seeds)), mp_context=context, initializer=_depend_on_parent) as executor:
        try:
            for seed in seeds:
                begun.append(executor.submit(run, seed))
                if len(begun) >= jobs * _AHEAD:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            for future in begun:
                future.cancel()


def _depend_on_parent() -> None:
    """Ctrl-C reaches every process of the terminal: the first of them ends the others, in good order or by dying."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this runs in a process of a pool"
    parent.join()
    os._exit(1)
