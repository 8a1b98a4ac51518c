"""Databases for claims, and effects with short times."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import psycopg

from semel.bridges.effects import Effects
from semel.testing.postgres import Postgres


def new_database(postgres: Postgres) -> str:
    """The URL of a database of the test's own."""
    name = f"effects_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(postgres.uri, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return postgres.uri.replace("/postgres?", f"/{name}?")


def make_effects(to: str | Path, *, takes_key: bool = True, **more: Any) -> Effects:
    options: dict[str, Any] = {"name": "mail", "lease_s": 30.0, "backoff_s": 0.01, "backoff_max_s": 0.02, **more}
    return Effects(to, takes_key=takes_key, **options)
