"""Shares the seeds of a simulation among processes; what they found comes back in the order of the seeds."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

T = TypeVar("T")


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
    with ProcessPoolExecutor(min(jobs, len(seeds)), mp_context=context, initializer=_leave_ctrl_c) as executor:
        try:
            yield from executor.map(run, seeds)
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


def _leave_ctrl_c() -> None:
    """Ctrl-C reaches every process of the terminal; the first of them ends the others in good order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
