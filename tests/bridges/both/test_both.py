"""Both or neither in ordinary use and ordinary failures, in SQLite and Postgres, on both transaction protocols."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from both_scene import Shop

import semel
from semel.bridges.both.both import open_store


def test_orders_and_their_events_are_committed_together(shop: Shop) -> None:
    """G5: a loop as a user writes it; each order is on both sides, in order, and nothing is left over."""
    with shop.producer() as producer, closing(shop.connect()) as connection:
        for number in range(1, 6):
            with semel.both(connection, producer) as t:
                shop.place(connection, t, number)
    shop.check([1, 2, 3, 4, 5])


def test_an_exception_undoes_both(shop: Shop) -> None:
    """Nothing of the block is on either side, and the next block works."""
    with shop.producer() as producer, closing(shop.connect()) as connection:
        with pytest.raises(ZeroDivisionError):
            shop.order(connection, producer, 1, lambda t: 1 / 0)
        shop.order(connection, producer, 2)
    shop.check([2])


def test_a_statement_that_fails_at_the_commit_undoes_both(shop: Shop) -> None:
    """A constraint that is checked at the end: the records are in Kafka then, in a transaction that is aborted."""
    with shop.producer() as producer, closing(shop.connect()) as connection:
        connection.execute("CREATE TABLE items (item INTEGER REFERENCES orders(id) DEFERRABLE INITIALLY DEFERRED)")
        connection.commit()
        if not shop.is_postgres:
            connection.execute("PRAGMA foreign_keys = ON")
        with pytest.raises((sqlite3.IntegrityError, psycopg.IntegrityError)):
            shop.order(connection, producer, 1, lambda t: connection.execute("INSERT INTO items VALUES (99)"))
        shop.order(connection, producer, 2)
    shop.check([2])


def test_a_block_without_records_or_without_statements_works(shop: Shop) -> None:
    """Either side may have nothing to do."""
    with shop.producer() as producer, closing(shop.connect()) as connection:
        with semel.both(connection, producer):
            connection.execute(shop.insert, (1, shop.topic))
        with semel.both(connection, producer) as t:
            t.send(shop.topic, "7", key="all")
    assert (shop.rows(), shop.events(), shop.leftovers()) == ([1], [7], (0, 0))


def test_tables_of_records_many_rows_and_topics_go_in_one_transaction(shop: Shop) -> None:
    """`send` and `send_table` keep their order within a key, beyond the size of one batch."""
    numbers = list(range(1, 20_001))
    table = pa.table({"key": [b"all"] * 10_000, "value": [str(number).encode() for number in numbers[10_000:]]})
    with shop.producer() as producer, closing(shop.connect()) as connection:
        with semel.both(connection, producer) as t:
            connection.execute(shop.insert, (1, shop.topic))
            for number in numbers[:10_000]:
                t.send(shop.topic, str(number), key="all", headers={"n": b"1"})
            t.send_table(shop.topic, table)
        assert shop.events() == numbers
    assert shop.leftovers() == (0, 0)


def test_tables_are_made_on_request_and_else_the_statements_are_told(shop: Shop) -> None:
    """And what the message says works when it is run."""

    def drop(connection: Any) -> None:
        for table in ("semel_both", "semel_both_records"):
            connection.execute(f"DROP TABLE {table}")
        connection.commit()

    with shop.producer() as producer, closing(shop.connect()) as connection:
        drop(connection)
        with pytest.raises(semel.ConfigError, match="CREATE TABLE semel_both") as told:
            shop.order(connection, producer, 1)
        for statement in str(told.value).partition(":\n")[2].split(";\n"):
            connection.execute(statement)
        connection.commit()
        shop.order(connection, producer, 1)
        drop(connection)
    with (
        shop.producer() as producer,
        closing(shop.connect()) as connection,
        semel.both(connection, producer, create_tables=True) as t,
    ):
        shop.place(connection, t, 2)
    shop.check([1, 2])


@pytest.mark.parametrize("how", ["commit", "rollback", "failed"])
def test_a_block_that_ends_its_transaction_itself_is_told(shop: Shop, how: str) -> None:
    """No record is in Kafka then, and the message says what happened to the rows."""
    if how == "failed" and not shop.is_postgres:
        pytest.skip("SQLite undoes only the statement that failed")
    with shop.producer() as producer, closing(shop.connect()) as connection:

        def end(t: Any) -> None:
            if how == "failed":  # and was passed over
                with pytest.raises(psycopg.Error):
                    connection.execute("SELECT nothing")
            else:
                getattr(connection, how)()

        with pytest.raises(semel.InvalidState, match="cannot be committed whole"):
            shop.order(connection, producer, 1, end)
        assert shop.events() == []
        shop.order(connection, producer, 2)
    assert shop.rows() == ([1, 2] if how == "commit" else [2])
    assert sorted(shop.events()) == [2, 2]


def test_a_record_that_is_refused_dooms_the_block(shop: Shop) -> None:
    """Also if the exception is caught: it was meant to be part of it."""

    def pass_over(t: Any) -> None:
        with pytest.raises(semel.ConfigError):
            t.send(shop.topic, 5)

    with shop.producer(default_api_timeout_ms=3_000) as producer, closing(shop.connect()) as connection:
        with pytest.raises(semel.RecordTooLarge):
            shop.order(connection, producer, 1, lambda t: t.send(shop.topic, b"x" * 2_000_000))
        with pytest.raises(semel.InvalidState, match="was refused"):
            shop.order(connection, producer, 1, pass_over)
        with pytest.raises(semel.UnknownTopic):
            shop.order(connection, producer, 1, lambda t: t.send("not-there", b"1"))
        shop.order(connection, producer, 2)
    shop.check([2])


def test_two_programs_with_one_name_the_later_one_wins(shop: Shop) -> None:
    """The earlier one is told so in its next block, and nothing of that is on either side."""
    with shop.producer() as first, closing(shop.connect()) as connection, closing(shop.connect()) as other:
        shop.order(connection, first, 1)
        with shop.producer() as second:
            shop.order(other, second, 2)
            for _ in range(2):
                with pytest.raises(semel.Fenced):
                    shop.order(connection, first, 99)
            shop.order(other, second, 3)
    shop.check([1, 2, 3])


def test_a_claim_that_came_in_the_middle_of_a_block_rolls_it_back(shop: Shop) -> None:
    """Whoever has claimed the name may have read that there is no decision; none may appear after that."""

    def claim(_: Any = None) -> None:
        with closing(shop.connect()) as other:
            assert open_store(other).claim(shop.name, "another") is None

    with shop.producer() as producer, closing(shop.connect()) as connection:
        shop.order(connection, producer, 1)
        if shop.is_postgres:
            with pytest.raises(semel.TransactionAborted, match="has claimed the name"):
                shop.order(connection, producer, 99, claim)
        else:  # SQLite has one writer at a time, so it can only be between two blocks
            claim()
        shop.order(connection, producer, 2)
    shop.check([1, 2])


@pytest.mark.parametrize("mode", [{"autocommit": True}, {"isolation_level": None}], ids=["autocommit", "no isolation"])
def test_a_connection_that_commits_by_itself_has_a_transaction_for_the_block(shop: Shop, mode: dict[str, Any]) -> None:
    """Whatever the connection's own mode is, the block is one transaction."""
    if shop.is_postgres == ("isolation_level" in mode):
        pytest.skip("no such mode")
    with shop.producer() as producer, closing(shop.connect(**mode)) as connection:
        with pytest.raises(ZeroDivisionError):
            shop.order(connection, producer, 1, lambda t: 1 / 0)
        shop.order(connection, producer, 2)
    shop.check([2])
