"""The database of the demo: a Postgres server that can be killed and started again, or else SQLite files."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from semel.demo.pipeline_names import PLAIN, SEMEL
from semel.demo.tables import Kind, Tables, table_of
from semel.demo.victims import kill_family
from semel.errors import SemelError
from semel.testing.postgres import Postgres

TITLES: Final[dict[Kind, str]] = {"postgres": "Postgres", "sqlite": "SQLite"}


class DemoDatabase:
    """A context manager. Where Postgres is asked for and does not start, it is SQLite, and `refusal` says why."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self._asked_for = kind
        self._folder = folder
        self._server: Postgres | None = None
        self.tables = Tables("sqlite", str(folder))
        self.refusal: str | None = None

    @property
    def title(self) -> str:
        return TITLES[self.tables.kind]

    @property
    def can_be_killed(self) -> bool:
        """SQLite has no process: it dies with the driver and the workers that use it."""
        return self._server is not None

    def __enter__(self) -> Self:
        try:
            if self._asked_for == "postgres":
                self._try_server()
            self.tables.create()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _try_server(self) -> None:
        try:
            # Postgres' own settings: every commit is synced to disk.
            server = Postgres(has_defaults=True)
            self._server = server.__enter__()
        except (SemelError, OSError) as error:
            self.refusal = str(error).strip().splitlines()[-1]
        else:
            self.tables = Tables("postgres", server.uri)

    def kill(self) -> int:
        """`kill -9` for the server and all of its processes; returns how many there were."""
        assert self._server is not None
        count = kill_family(self._server.process_id)
        self._server.wait_ended()
        return count

    def start(self) -> None:
        """Start it again on the data it has."""
        assert self._server is not None
        self._server.start()

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            if server.is_running:
                kill_family(server.process_id)
            server.close()


class RowMoments:
    """Knows when rows are being written, from what Postgres itself tells. Of one moment that is waited for."""

    def __init__(self, tables: Tables) -> None:
        self._connection: Any = tables.connect(PLAIN)
        self._connection.autocommit = True
        self._plain_rows = self._count()

    def close(self) -> None:
        self._connection.close()

    def has_plain_grown(self) -> bool:
        """Whether the plain sink has committed rows since this was made."""
        return self._count() > self._plain_rows

    def is_semel_writing(self) -> bool:
        """Whether there is a transaction that has written into Semel's table."""
        locks = "SELECT count(*) FROM pg_locks WHERE relation = %s::regclass AND mode = 'RowExclusiveLock'"
        return self._connection.execute(locks, (table_of(SEMEL),)).fetchone()[0] > 0

    def _count(self) -> int:
        return self._connection.execute(f"SELECT count(*) FROM {table_of(PLAIN)}").fetchone()[0]
