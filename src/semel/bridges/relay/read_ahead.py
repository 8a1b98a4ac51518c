"""The next rows are read while the last ones are written: the database and Kafka both take their time."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from semel.bridges.relay.row_source import Portion, Position, RowSource


class ReadAhead:
    """Reads one portion in advance, in a thread of its own. Nobody else uses the source until `next` or `forget`."""

    def __init__(self, source: RowSource) -> None:
        self._source = source
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="semel-relay-read")
        self._begun: tuple[Position, Future[Portion]] | None = None

    def begin(self, position: Position, rows_max: int) -> None:
        """Start to read what comes after `position`."""
        self._begun = position, self._thread.submit(self._source.next, position, rows_max)

    def next(self, position: Position | None, rows_max: int) -> Portion:
        """What comes after `position`: what was read in advance, if it was that and there was anything."""
        begun, self._begun = self._begun, None
        if begun is not None:
            portion = begun[1].result()
            if begun[0] == position and portion.rows.num_rows:
                return portion
        return self._source.next(position, rows_max)

    def forget(self) -> None:
        """Wait until the source is free; whatever was read, or went wrong, no longer matters."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun[1].exception()

    def close(self) -> None:
        self.forget()
        self._thread.shutdown()
