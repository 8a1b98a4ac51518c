"""Calls of a sink that can only be mistakes in the user's program, refused before anything is written."""

from __future__ import annotations

import logging
from threading import Lock
from typing import Final

from semel.errors import InvalidState
from semel.spark.input_offsets import Input
from semel.spark.progress import log_event

_serving: Final[dict[tuple[object, ...], str]] = {}
"""The pipeline that writes for each run of a query in this process."""
_finished: Final[dict[tuple[object, ...], int]] = {}
"""The last batch that each run of a query has finished in this process. Spark replays a batch only in another run, so a
second call for it in the same run is a second output and not a replay."""


class Calls:
    """The calls of one sink, which serves one query and one thread at a time."""

    def __init__(self, name: str, kind: str, place: object) -> None:
        self._name = name
        self._kind = kind
        self._place = place
        """Tells pipelines of one name in two places apart."""
        self._busy = Lock()
        self._query: str | None = None

    def claim(self) -> None:
        if not self._busy.acquire(blocking=False):
            raise InvalidState(
                f"The sink of pipeline {self._name!r} is writing a batch already: two queries share it, or two "
                "threads in one foreachBatch. Nothing of this call was written. Give each query a sink with its own "
                "name; for several outputs of one batch use `with sink.batch(batch_id) as batch: batch.write(...)`."
            )

    def release(self) -> None:
        self._busy.release()

    def check(self, batch_input: Input, batch_id: int) -> None:
        """Refuse a second query, and a second write of a batch."""
        if self._query not in (None, batch_input.query):
            raise InvalidState(
                f"The sink of pipeline {self._name!r} serves another query already; nothing was written. Give "
                f"each query a {self._kind} with its own name."
            )
        served = _serving.setdefault((self._kind, self._place, batch_input.query, batch_input.run), self._name)
        if served != self._name:
            raise InvalidState(
                f"Pipeline {served!r} writes for this query already, so pipeline {self._name!r} wrote nothing: a "
                "replay could not tell their outputs apart. Use one sink for each query, and for several outputs "
                "`with sink.batch(batch_id) as batch: batch.write(...)`."
            )
        if self.last_of(batch_input) == batch_id:
            raise InvalidState(
                f"Pipeline {self._name!r} has written batch {batch_id} already, so this second write of the "
                "same batch would be lost in a replay; it was not written. Put all outputs of a batch into one "
                "transaction: `with sink.batch(batch_id) as batch: batch.write(...)`."
            )
        if self._query is None and batch_input.is_temporary:
            log_event(
                "the query has no checkpointLocation, so a restart cannot go on where this run stops",
                logging.WARNING,
                pipeline=self._name,
            )
        self._query = batch_input.query

    def last_of(self, batch_input: Input) -> int | None:
        """The last batch that this run of the query has finished."""
        return _finished.get(self._run_of(batch_input))

    def finish(self, batch_input: Input, batch_id: int) -> None:
        _finished[self._run_of(batch_input)] = batch_id

    def _run_of(self, batch_input: Input) -> tuple[object, ...]:
        return self._place, self._name, batch_input.query, batch_input.run
