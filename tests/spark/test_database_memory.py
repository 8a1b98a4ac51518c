"""Memory does not grow with the rows of a batch: they stream through tasks and driver into the database."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from semel.testing.postgres import Postgres

pytestmark = pytest.mark.large

FEW, MANY = 100_000, int(os.environ.get("SEMEL_DATABASE_ROWS", "5000000"))
SLACK_MB = 60
"""What Python, Arrow and the C library keep more or less of, from run to run."""


def figures(place: str, table: str, rows: int) -> dict[str, int]:
    driver = Path(__file__).parent / "database_memory_driver.py"
    path = os.pathsep.join([str(driver.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, str(driver), json.dumps({"place": place, "table": table, "rows": rows})],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{table}: {found}")
    assert found["rows"] == rows
    return found


@pytest.mark.parametrize("kind", ["Postgres", "SQLite"])
def test_memory_of_driver_and_tasks_is_flat(tmp_path: Path, kind: str) -> None:
    """F1: fifty times the rows in one batch take the same memory."""
    with Postgres() as server:
        place = server.uri if kind == "Postgres" else str(tmp_path / "out.db")
        few, many = figures(place, "few", FEW), figures(place, "many", MANY)
    assert many["driver"] <= few["driver"] + SLACK_MB
    assert many["worker"] <= few["worker"] + SLACK_MB
