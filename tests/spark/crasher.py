"""Lets the sink's half of a driver die at a named step, without the JVM that it belongs to."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from semel.spark import failpoints, once, sink
from semel.spark.owner import PipelineOwner

IN_TASKS = ("before_produce", "after_produce")


class Crash(Exception):
    """The driver is dead."""


class Crasher:
    """Lets the sink die at one step, once."""

    def __init__(self, patch: pytest.MonkeyPatch, environment: dict[str, str], *, do_tasks_write: bool = False) -> None:
        self._environment = environment
        self._abort: Callable[[PipelineOwner], None] = PipelineOwner.abort
        self._point: str | None = None
        self._in_tasks = IN_TASKS if do_tasks_write else ()
        self._is_dead = False
        for module in (failpoints, once, sink):
            patch.setattr(module, "reach", self._reach)
        patch.setattr(PipelineOwner, "abort", self._abort_unless_dead())
        patch.setenv(failpoints.VARIABLE, "watched")

    def arm(self, point: str | None) -> None:
        self._point, self._is_dead = point, False
        self._environment.pop(failpoints.VARIABLE, None)
        if point in self._in_tasks:
            self._environment[failpoints.VARIABLE] = f"{point}:2"  # kills the task's own process

    def _reach(self, point: str, pipeline: str) -> None:
        if point == self._point:
            self._is_dead = True
            raise Crash(point)

    def _abort_unless_dead(self) -> Callable[[PipelineOwner], None]:
        def abort(owner: PipelineOwner) -> None:
            if self._is_dead or (self._point in self._in_tasks and owner.is_open):
                raise Crash(self._point)
            self._abort(owner)

        return abort
