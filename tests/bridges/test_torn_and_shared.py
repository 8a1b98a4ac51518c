"""What would tear results from their position: attached files in WAL mode, and one name for two readers."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from database_scene import Input, Place, broker, number, numbers, place, server

import semel
from semel.bridges.sqlite import SqlitePositions, check_atomic
from semel.testing.embedded import EmbeddedBroker

__all__ = ["broker", "place", "server"]


@pytest.mark.parametrize(
    ("main", "other", "is_refused"), [("wal", "wal", True), ("wal", "delete", True), ("delete", "delete", False)]
)
def test_an_attached_file_that_wal_mode_commits_by_itself_is_refused(
    tmp_path: Path, main: str, other: str, is_refused: bool
) -> None:
    """Before the transaction, and at its end if the block attached it. One that can only be read does no harm."""
    path = tmp_path / "orders.db"
    with closing(sqlite3.connect(path)) as made:
        made.execute(f"PRAGMA journal_mode={other}")
        made.execute("CREATE TABLE orders (id TEXT)")
    with closing(sqlite3.connect(tmp_path / "main.db", uri=True)) as connection:
        connection.execute(f"PRAGMA journal_mode={main}")
        positions = SqlitePositions(connection)
        connection.execute(f"ATTACH 'file:{path}?mode=ro' AS o")
        check_atomic(connection)
        connection.execute("DETACH o")
        connection.execute(f"ATTACH '{path}' AS o")
        if not is_refused:
            check_atomic(connection)
            return
        with pytest.raises(semel.ConfigError, match="one after the other"), positions.transaction():
            pytest.fail("the transaction began")
        connection.execute("DETACH o")

        def attach_inside() -> None:
            with positions.transaction() as inside:
                inside.execute(f"ATTACH '{path}' AS o")
                inside.execute("INSERT INTO o.orders VALUES ('1')")

        with pytest.raises(semel.ConfigError, match="one after the other"):
            attach_inside()
        assert connection.execute("SELECT * FROM o.orders").fetchall() == []


def test_a_journal_that_a_crash_does_not_survive_is_refused(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "main.db")) as connection:
        connection.execute("PRAGMA journal_mode=MEMORY")
        with pytest.raises(semel.ConfigError, match="leaves half of it"):
            check_atomic(connection)


def test_an_inbox_and_a_run_do_not_share_a_name(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """Whichever comes second is refused; resume= lets a run take over."""
    place, source = Place("sqlite", str(tmp_path / "app.db")), Input(broker.bootstrap)
    target = place.target(table="numbers", create=True)
    source.write(range(10))
    with closing(sqlite3.connect(place.address)) as connection:

        def read_all(name: str) -> int:
            with semel.Inbox(connection, bootstrap=broker.bootstrap, topics=[source.topic], name=name) as inbox:
                count = 0
                while not inbox.is_at_end():
                    if (delivery := inbox.next(200)) is not None:
                        with delivery:
                            count += delivery.count
                return count

        assert read_all(source.name) == 10
        with pytest.raises(semel.ConfigError, match="is used by an Inbox"):
            source.run(number, target)
        source.name += "-2"
        assert source.run(number, target).records == 10
        with pytest.raises(semel.ConfigError, match=r"is used by semel.run"):
            read_all(source.name)
    assert numbers(place) == list(range(10))
