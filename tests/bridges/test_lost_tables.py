"""Tables dropped or renamed under a pipeline with create=True, and pipelines renamed over a table: refused."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from database_scene import Input, Place, broker, number, numbers, place, positions, server

import semel
from semel.errors import DatabaseError
from semel.testing.embedded import EmbeddedBroker

__all__ = ["broker", "place", "server"]


def test_a_dropped_table_is_not_made_again_at_a_start(broker: EmbeddedBroker, place: Place) -> None:
    """The position is known, and a new table would lack what is before it. The two ways on are named, and work."""
    source, target = Input(broker.bootstrap), place.target(table="numbers", create=True)
    source.write(range(20))
    source.run(number, target)
    place.do("ALTER TABLE numbers RENAME TO old_numbers")
    source.write(range(20, 24))
    with pytest.raises(semel.ConfigError, match=r"not there any more.*another name=.*resume=\"database\""):
        source.run(number, target)
    assert not place.has("numbers")
    place.do("ALTER TABLE old_numbers RENAME TO numbers")
    source.run(number, target)
    assert numbers(place) == list(range(24))
    place.do("DROP TABLE numbers")
    source.write(range(24, 26))
    source.run(number, target, resume="database")
    assert numbers(place) == [24, 25]
    place.do("DROP TABLE numbers")
    source.run(number, target, name="from the beginning")
    assert len(numbers(place)) == 26


def test_a_table_dropped_during_a_run_ends_it(broker: EmbeddedBroker, place: Place) -> None:
    """One error, and no new table with the later rows alone."""
    source, target = Input(broker.bootstrap), place.target(table="numbers", create=True)
    source.write(range(10))
    errors: list[Exception] = []
    stop = threading.Event()

    def run() -> None:
        try:
            source.run(number, target, idle_ms=None, stop=stop)
        except (semel.ConfigError, DatabaseError) as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        while not (place.has("semel_inbox") and sum(positions(place).values()) == 10):
            assert thread.is_alive()
            threading.Event().wait(0.05)
        place.do("DROP TABLE numbers")
        source.write(range(10, 12))
        thread.join(30)
        assert not thread.is_alive()
    finally:
        stop.set()
        thread.join()
    assert len(errors) == 1
    assert not place.has("numbers")
    assert sum(positions(place).values()) == 10


def test_a_pipeline_that_has_made_no_row_yet_may_still_make_its_table(broker: EmbeddedBroker, place: Place) -> None:
    """The function returned nothing for the first records, so there is a position and never was a table."""
    source, target = Input(broker.bootstrap), place.target(table="numbers", create=True)

    def from_ten(row: Any) -> dict[str, Any] | None:
        return number(row) if int(row.value) >= 10 else None

    source.write(range(10))
    source.run(from_ten, target)
    assert positions(place) != {}
    source.write(range(10, 14))
    source.run(from_ten, target)
    assert numbers(place) == [10, 11, 12, 13]


def test_a_crash_between_the_table_and_its_first_rows_is_gone_on_from(broker: EmbeddedBroker, place: Place) -> None:
    """The table was made and nothing is committed; even if it is dropped then, nothing is missing."""
    source, target = Input(broker.bootstrap), place.target(table="numbers", create=True)
    source.write(range(10))
    place.do("CREATE TABLE numbers (number BIGINT, place BIGINT, at BIGINT)")
    with pytest.raises(semel.RecordFailed):
        source.run(lambda row: {"number": row.missing}, target)
    place.do("DROP TABLE numbers")
    source.run(number, target)
    assert numbers(place) == list(range(10))


def test_a_renamed_pipeline_does_not_append_everything_again(broker: EmbeddedBroker, place: Place) -> None:
    """The position belongs to the name. Other input may go into the same table, and so may a pipeline on purpose."""
    source, target = Input(broker.bootstrap), place.target(table="numbers", create=True)
    source.write(range(6))
    source.run(number, target)
    with pytest.raises(semel.ConfigError, match=f"renamed, write name='{source.name}'"):
        source.run(number, target, name="renamed")
    assert numbers(place) == list(range(6))
    other = Input(broker.bootstrap)
    other.write(range(100, 104))
    other.run(number, target)
    source.run(number, target, name="from the end", start="latest")
    assert numbers(place) == [*range(6), *range(100, 104)]
    for _ in range(2):
        source.run(number, target, name="on purpose", resume="database")
    assert numbers(place) == sorted([*range(6), *range(6), *range(100, 104)])
    source.run(number, target, name="on purpose")
    source.run(number, place.target(table="elsewhere", create=True), name="another table")
