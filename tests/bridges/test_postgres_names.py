"""Names and connection strings that Postgres reads in its own way: long ones, dollar signs, passwords."""

from __future__ import annotations

import json
from typing import Any

import pytest
from database_scene import Input, broker, make_postgres, server

import semel
from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres

__all__ = ["broker", "server"]


def parse(row: Any) -> dict[str, Any]:
    return json.loads(row.value)


@pytest.mark.parametrize(
    "options",
    [
        {"table": "t" * 50, "mode": "newest", "key": ["id"], "version": "ver", "delete": "gone"},
        {"table": "t" * 64, "create": True},
        {"table": "things", "new_columns": "add"},
        {"table": "made", "create": True},
        {"table": "things", "new_columns": "ignore", "dead_letter": "d" * 64},
        {"table": "things", "statement": "INSERT INTO things (id) SELECT id FROM rows"},
    ],
    ids=lambda options: ", ".join(options),
)
def test_names_that_postgres_would_cut_off_are_refused(
    broker: EmbeddedBroker, server: Postgres, options: dict[str, Any]
) -> None:
    """Deleted versions went into the table itself, and a new column stayed empty, as if the names were equal."""
    place = make_postgres(server)
    for table in ("t" * 50, "things"):
        place.do(f"CREATE TABLE {table} (id int PRIMARY KEY, ver bigint)")
    source = Input(broker.bootstrap, 1)
    source.write([json.dumps({"id": 1, "ver": 1, "gone": False, "c" * 70: "x"}).encode()])
    with pytest.raises(semel.ConfigError, match=r"has \d+ bytes, and Postgres cuts names off after 63"):
        source.run(parse, place.target(**options))
    assert place.ask("SELECT id FROM things") == []


def test_a_long_name_in_a_record_is_ignored_as_any_other(broker: EmbeddedBroker, server: Postgres) -> None:
    """With new_columns="ignore", and a table whose own name has all of the 63 bytes."""
    place, table = make_postgres(server), "t" * 63
    place.do(f"CREATE TABLE {table} (id int)")
    source = Input(broker.bootstrap, 1)
    source.write([json.dumps({"id": 1, "c" * 70: "x"}).encode()])
    source.run(parse, place.target(table=table, new_columns="ignore"))
    assert place.ask(f"SELECT * FROM {table}") == [(1,)]


@pytest.mark.parametrize("mode", ["append", "dedup", "upsert"])
def test_a_dollar_sign_in_names_and_text_is_no_parameter(broker: EmbeddedBroker, server: Postgres, mode: Any) -> None:
    """Of tables, of columns, and in the user's own statement."""
    place = make_postgres(server)
    place.do('CREATE TABLE "t$1" ("id$2" int PRIMARY KEY, "price_$1" numeric)', "CREATE TABLE said (id int, v text)")
    source = Input(broker.bootstrap, 1)
    source.write([b'{"id$2": 1, "price_$1": 5}'])
    source.run(parse, place.target(table="t$1", mode=mode, key=[] if mode == "append" else ["id$2"]))
    assert place.ask('SELECT * FROM "t$1"') == [(1, 5)]
    if mode == "append":
        statement = """INSERT INTO said SELECT "id$2", 'costs $5' FROM rows"""
        source.run(parse, place.target(table="said", statement=statement), name="other")
        assert place.ask("SELECT * FROM said") == [(1, "costs $5")]


@pytest.mark.parametrize(
    "url",
    [
        "host=127.0.0.1 port=1 user=me password='top SECRET' dbname=x",
        "host=127.0.0.1 port=1 user=me password='it\\'s SECRET' dbname=x",
        "host=127.0.0.1 port=1 password = SECRET",
        "host=127.0.0.1 port=1 password=a&SECRET dbname=x",
        "host=127.0.0.1 port=1 password=top SECRET dbname=x",
        "postgresql://me:SECRET@127.0.0.1:1/db",
        "postgresql://me:pa/SECRET@127.0.0.1:1/db",
        "postgresql://me:SECRET/pa@127.0.0.1:1/db",
        "postgresql://me:p@SECRET@127.0.0.1:1/db",
        "postgresql://me:p@SE/CRET@127.0.0.1:1/db",
        "postgresql://me:p:SECRET@127.0.0.1:1/db",
        "postgresql://127.0.0.1:1/db?user=me&password=a@SECRET&connect_timeout=3",
        "postgresql://127.0.0.1:1/db?password=a&SECRET",
    ],
)
def test_a_password_is_shown_nowhere(url: str) -> None:
    """Neither by repr nor by the error of a connection that fails, however it is written."""
    target = semel.Postgres(url, table="t")
    database = target.open()
    with pytest.raises(semel.SemelError) as caught:
        database.execute("SELECT 1")
    for text in (repr(target), repr(database), str(caught.value)):
        assert "SECRET" not in text.replace("SE/CRET", "SECRET"), text
    assert "127.0.0.1" in repr(target)
