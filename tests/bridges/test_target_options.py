"""Mistakes in `semel.Postgres(...)`, `semel.SQLite(...)` and the calls that take them: refused before a connection."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import semel
from semel.bridges.portions import Function
from semel.bridges.row_columns import RowColumns
from semel.bridges.targets import DatabaseTarget
from semel.errors import ConfigError

FORM = "postgresql://user:password@host/database"


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("postgresql+psycopg://me:secret@db/shop", FORM),
        ("jdbc:postgresql://db/shop?password=secret", FORM),
        ("mysql://me:secret@db/shop", FORM),
        ("sqlite:///shop.db", "semel.SQLite"),
        ("shop.db", FORM),
        (5432, FORM),
    ],
)
def test_an_address_that_postgres_does_not_take_is_refused_at_once(url: Any, advice: str) -> None:
    """With the right form, and without the password."""
    with pytest.raises(ConfigError) as refused:
        semel.Postgres(url, table="orders")
    assert advice in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["postgresql:///shop", "postgres://db/shop", "host=db dbname=shop", FORM])
def test_addresses_that_postgres_takes_are_not_refused(url: str) -> None:
    """URLs, and the keywords of libpq."""
    assert semel.Postgres(url, table="orders").place == url


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("sqlite:///shop.db", 'write "shop.db"'),
        ("sqlite:////data/shop.db", 'write "/data/shop.db"'),
        ("file:shop.db?mode=rw", 'write "shop.db"'),
        ("postgresql://me:secret@db/shop", "semel.Postgres"),
        ("postgresql+psycopg://me:secret@db/shop", FORM),
    ],
)
@pytest.mark.parametrize("use", ["target", "effects"])
def test_a_url_is_no_path_of_a_sqlite_file(path: str, advice: str, use: str) -> None:
    """Also where claims of side effects are kept, which takes the URL of a Postgres database as well."""
    if use == "effects":
        if path.startswith("postgresql://"):
            return
        with pytest.raises(ConfigError) as refused:
            semel.Effects(path, name="mails", takes_key=True)
    else:
        with pytest.raises(ConfigError) as refused:
            semel.SQLite(path, table="orders")
    assert advice in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"tabel": "orders"}, "did you mean table=?"),
        ({"table": "orders", "schema": "sales"}, 'table="sales.orders"'),
        ({"table": "orders", "if_exists": "append"}, "it has table=, mode="),
        ({}, "needs the table"),
    ],
)
def test_options_that_a_target_does_not_have_are_answered_with_the_right_ones(
    options: dict[str, Any], advice: str
) -> None:
    """A misspelt one, and the schema that other libraries ask for."""
    for make in (lambda: semel.Postgres(FORM, **options), lambda: semel.SQLite("shop.db", **options)):
        with pytest.raises(ConfigError) as refused:
            make()
        assert advice in str(refused.value)


@pytest.mark.parametrize("target", [semel.Postgres, semel.SQLite])
def test_the_docstring_names_every_option(target: type[DatabaseTarget]) -> None:
    """It is what help() shows."""
    from inspect import signature

    for name in signature(DatabaseTarget.__init__).parameters:
        assert name == "self" or name in (target.__doc__ or "")


def test_an_option_of_the_target_on_the_call_is_answered_with_its_place() -> None:
    """For each call, rather than as a setting of Kafka's that looks similar."""
    target = semel.SQLite("shop.db", table="orders")
    calls = [
        lambda: semel.run(len, to=target, bootstrap="127.0.0.1:1", topics=["t"], name="n", retry_s=5),
        lambda: target.write_stream(None, name="n", checkpoint="c", mode="upsert"),  # pyright: ignore
        lambda: target.write_batch(None, name="n", job_id="1", create=True),  # pyright: ignore
    ]
    for call, option in zip(calls, ("retry_s", "mode", "create"), strict=True):
        with pytest.raises(ConfigError, match=rf"semel\.SQLite\(\.\.\., {option}=\.\.\.\)"):
            call()
    with pytest.raises(ConfigError, match="needs topics= and name="):
        semel.run(len, to=target, bootstrap="127.0.0.1:1")


def test_an_address_as_to_is_answered_with_a_target() -> None:
    """A URL is easily passed where the target belongs."""
    with pytest.raises(ConfigError, match=r"to=semel\.Postgres\(url") as refused:
        semel.run(len, to="postgresql://me:secret@db/shop", bootstrap="127.0.0.1:1", topics=["t"], name="n")
    assert "secret" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"to=semel\.Postgres\(url"):
        semel.write_stream(None, name="n", checkpoint="c", to="postgresql://db/shop")  # pyright: ignore
    with pytest.raises(ConfigError, match=r"to=semel\.Postgres\(url"):
        semel.write_batch(None, name="n", job_id="1", to="postgresql://db/shop")  # pyright: ignore


@pytest.mark.parametrize("option", ["idle_ms", "stop", "retry_s", "group"])
def test_an_option_of_run_on_an_inbox_is_answered_with_what_it_has(option: str) -> None:
    """Rather than with a setting of Kafka's that looks similar."""
    with (
        closing(sqlite3.connect(":memory:")) as connection,
        pytest.raises(ConfigError, match=f"{option}= is no option"),
    ):
        semel.Inbox(connection, bootstrap="127.0.0.1:1", topics=["t"], name="n", **{option: 5})  # pyright: ignore


def test_effects_refuse_what_is_no_key_and_no_class_of_exceptions(tmp_path: Path) -> None:
    """Before the first call; a single class of exceptions will do."""
    made = semel.Effects(tmp_path / "app.db", name="mails", takes_key=True, retry_on=OSError)
    with pytest.raises(ConfigError, match=r"4711 cannot be an idempotency key.*str"):
        made.call(4711, lambda key: None)  # pyright: ignore
    for wrong in ("OSError", (OSError, 5), KeyboardInterrupt):
        with pytest.raises(ConfigError, match="is no class of exceptions"):
            semel.Effects(tmp_path / "app.db", name="mails", takes_key=True, retry_on=wrong)  # pyright: ignore


def test_a_server_that_was_never_reached_is_not_said_to_have_rolled_back() -> None:
    """There was no transaction yet."""
    database = semel.Postgres("postgresql://127.0.0.1:1/shop", table="orders").open()
    with pytest.raises(semel.DatabaseUnreachable, match="cannot be reached") as refused:
        database.ensure_tables()
    assert "rolled back" not in str(refused.value)


@pytest.mark.parametrize("keeps_failed", [True, False])
def test_a_function_of_rows_without_by_row_is_answered_with_it(keeps_failed: bool) -> None:
    """No record is at fault, so none is put aside."""
    records = pa.table({"value": [b"1", b"2"]})
    with pytest.raises(ConfigError, match='write by="row"'):
        Function(lambda row: {"id": row.value}, "table", keeps_failed=keeps_failed).run(records, [])


def test_a_whole_number_beyond_64_bits_is_answered_with_what_to_return() -> None:
    """An unsigned 64-bit id, for a column of numeric(20): as a Decimal it fits."""
    columns = RowColumns()
    [fault] = columns.find_misfits([{"id": 2**63}]).values()
    assert "return decimal.Decimal(value)" in str(fault)
    assert columns.table([{"id": Decimal(2**63)}])["id"].to_pylist() == [Decimal(2**63)]
