"""How databases are addressed: mistakes in a URL or a path, found before any connection. Messages show no password."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from semel.errors import ConfigError

_SCHEMES: Final = ("postgresql://", "postgres://")
_FORM: Final = "postgresql://user:password@host/database"
_URL: Final = re.compile(r"(jdbc:)?([a-z][a-z0-9]+)(\+\w+)?:(?=[/@\w])", re.IGNORECASE)


def is_postgres_url(address: object) -> bool:
    return isinstance(address, str) and address.startswith(_SCHEMES)


def is_postgres_address(address: object) -> bool:
    """A URL, or the keywords that Postgres' own clients take. Anything else with text in it is a file."""
    return isinstance(address, str) and (is_postgres_url(address) or "://" in address or " dbname=" in f" {address}")


def check_postgres_url(address: object) -> None:
    """Raise unless it is a URL that Postgres' own clients take, or their keywords (`host=db dbname=shop`).

    >>> check_postgres_url("postgresql+psycopg://me@db/shop")
    Traceback (most recent call last):
    semel.errors.ConfigError: A URL with "+psycopg" is SQLAlchemy's: write postgresql://user:password@host/database.
    """
    if is_postgres_url(address):
        return
    if not isinstance(address, str):
        raise ConfigError(f"A {type(address).__qualname__} is no address of a database: write {_FORM!r}.")
    url = _URL.match(address)
    if url is None:
        if "=" not in address:
            raise ConfigError(f"This is no address of a Postgres database: write {_FORM}.")
        return
    raise ConfigError(_advice(url))


def check_sqlite_path(address: str | Path) -> None:
    """Raise if it is a URL rather than the path of a file.

    >>> check_sqlite_path("sqlite:///shop.db")
    Traceback (most recent call last):
    semel.errors.ConfigError: SQLite takes the path of a file and no URL: write "shop.db".
    """
    text = str(address)
    url = _URL.match(text)
    if is_postgres_url(address):
        raise ConfigError("This is the URL of a Postgres database, and no SQLite file: use semel.Postgres(url, ...).")
    if url is None or len(url.group(2)) == 1 or not isinstance(address, str):
        return
    if url.group(2).lower() in ("sqlite", "file"):
        slashes = "///" if url.group(2).lower() == "sqlite" else "//"
        path = text[url.end() :].removeprefix(slashes).partition("?")[0]
        raise ConfigError(f'SQLite takes the path of a file and no URL: write "{path}".')
    raise ConfigError(_advice(url))


def _advice(url: re.Match[str]) -> str:
    jdbc, scheme, driver = url.groups()
    if scheme.lower() in ("sqlite", "file"):
        return 'This is the address of a SQLite file: use semel.SQLite("shop.db", ...).'
    if scheme.lower() not in ("postgresql", "postgres"):
        return f"{scheme}: is no database that Semel writes to. For Postgres write {_FORM}."
    if jdbc:
        return f'A URL with "jdbc:" is for Java: write {_FORM}.'
    if driver:
        return f'A URL with "{driver}" is SQLAlchemy\'s: write {_FORM}.'
    return f"This is no address of a Postgres database: write {_FORM}."
