"""One transaction of a pipeline as metrics, logs and traces see it, so that the pipelines say each thing once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Final, Self
from weakref import ref

from semel import logs, traces
from semel.errors import CommitUnknown
from semel.metrics.parts import Part

_METRICS: Final = "SEMEL_METRICS"


class Pipeline:
    """A run of a pipeline in this process.

    >>> from semel.metrics.parts import Part
    >>> from semel.metrics.registry import Registry
    >>> pipeline = Pipeline(Part(Registry(), "session", "Records."), "upper")
    >>> with pipeline.begin(transactional_id="upper-1") as work:
    ...     work.committed(records=10)
    """

    def __init__(self, part: Part, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.part = part
        self.name = name
        self.clock = clock
        if os.environ.get(_METRICS):
            from semel.metrics.page import serve_if_asked

            serve_if_asked()
        traces.set_up_if_asked()

    def begin(self, carried: Collection[str] = (), **facts: object) -> Work:
        """A transaction begins. `carried` are contexts from its records' headers, `facts` name it in log and trace."""
        return Work(self, carried, facts)

    def looked(self) -> None:
        """It has asked for work, and perhaps there was none."""
        self.part.looked(self.name)

    def failed(self, error: BaseException) -> None:
        """It ends because of this."""
        if isinstance(error, Exception):
            self.part.failed(self.name, error)


class Work:
    """One transaction. It ends once; what is said after that is left out."""

    def __init__(self, pipeline: Pipeline, carried: Collection[str], facts: dict[str, object]) -> None:
        self._pipeline = pipeline
        self._began_s = pipeline.clock()
        self._is_over = False
        self._facts: dict[str, object] = {"pipeline": pipeline.name, **facts}
        self.span = traces.start_span(
            f"{pipeline.part.name} {pipeline.name}",
            {"messaging.system": "kafka", **self._as_attributes(self._facts)},
            carried,
        )
        self._leave: Callable[[], None] | None = None

    # -- what is current -------------------------------------------------------------------------------------------

    def enter(self) -> Callable[[], None]:
        """Let the log lines and spans of this thread or task belong to it, until what it returns is called."""
        myself, has_left = ref(self), False
        context = traces.make_current(self.span)

        def read_facts() -> dict[str, object] | None:
            work = myself()  # a program may let go of a transaction without ending it
            return None if has_left or work is None else work._facts

        def leave() -> None:
            nonlocal has_left
            has_left = True
            traces.restore(context)

        logs.add_fields(read_facts)
        return leave

    def __enter__(self) -> Self:
        self._leave = self.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Whatever has not ended by now was aborted."""
        try:
            if isinstance(error, CommitUnknown):
                self.unknown(error)
            else:
                self.aborted(error)
        finally:
            if self._leave is not None:
                self._leave()

    def note(self, **facts: object) -> None:
        """What has become known of it, such as the producer's id and epoch."""
        self._facts |= facts
        traces.add_attributes(self.span, self._as_attributes(facts))

    @staticmethod
    def _as_attributes(facts: dict[str, object]) -> dict[str, object]:
        return {f"semel.{name}": value for name, value in facts.items()}

    # -- how it ended ----------------------------------------------------------------------------------------------

    def committed(self, records: int, *, dead_letters: int = 0, seconds: float | None = None) -> None:
        if self._is_over:
            return
        pipeline = self._pipeline
        took_s = pipeline.clock() - self._began_s if seconds is None else seconds
        pipeline.part.committed(pipeline.name, records, took_s, dead_letters)
        traces.add_attributes(
            self.span, {"messaging.batch.message_count": records, "semel.dead_letters": dead_letters or None}
        )
        self._end("committed", None)

    def failed_once(self, error: BaseException) -> None:
        """An attempt was aborted, and the same is written again."""
        self._pipeline.part.ended(self._pipeline.name, "aborted")
        traces.add_event(self.span, "attempt aborted", {"semel.reason": str(error)})

    def aborted(self, reason: BaseException | str | None = None) -> None:
        self._count("aborted", reason)

    def unknown(self, reason: BaseException | str) -> None:
        """A commit was sent and what became of it cannot be found out."""
        self._count("unknown", reason)

    def pending(self, reason: BaseException | str) -> None:
        """It is decided, and somebody must still carry it out."""
        self._count("pending", reason)

    def skipped(self) -> None:
        """It had been committed before."""
        self._count("skipped", None)

    def _count(self, outcome: str, problem: BaseException | str | None) -> None:
        if not self._is_over:
            self._pipeline.part.ended(self._pipeline.name, outcome)
            self._end(outcome, problem)

    def _end(self, outcome: str, problem: BaseException | str | None) -> None:
        self._is_over = True
        traces.end_span(self.span, outcome, problem)
