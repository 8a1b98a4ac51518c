"""A Python worker that stops at a named point of its task, so that a test can do something to it there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self, cast

from pyspark.sql import SparkSession

from semel.spark import failpoints


class StoppedWorker:
    """Lets the first Python worker that gets to a point stop there, and does something to it then."""

    def __init__(self, spark: SparkSession, folder: Path, point: str, then: Callable[[int], object]) -> None:
        self._environment = cast("dict[str, str]", spark.sparkContext.environment)
        self._file = folder / "stopped"
        self._point = point
        self._then = then
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._is_over = threading.Event()
        self.process = 0

    def __enter__(self) -> Self:
        self._environment[failpoints.VARIABLE] = self._point
        self._environment[failpoints.STOP_VARIABLE] = str(self._file)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        del self._environment[failpoints.VARIABLE], self._environment[failpoints.STOP_VARIABLE]
        self._is_over.set()
        self._thread.join()
        assert self.process, "no task got to the point at which it was to stop"

    def _watch(self) -> None:
        while not self._is_over.wait(0.02):
            if self._file.exists() and (text := self._file.read_text()):
                self.process = int(text)
                self._then(self.process)
                return
