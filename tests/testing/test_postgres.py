"""The Postgres of tests: it answers, listens on no port, and does not outlive whoever started it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from process_state import is_gone, wait_until

from semel.testing.postgres import Postgres

_KEEPER = """
import time
from semel.testing.postgres import Postgres
with Postgres() as postgres:
    print(postgres.folder, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("version", [16, 18])
def test_it_answers_and_listens_on_its_socket_alone(version: int) -> None:
    """A database to use, no port for others, and no folder left behind."""
    with Postgres(version) as postgres, psycopg.connect(postgres.uri) as connection:
        assert connection.info.server_version // 10_000 == version
        assert connection.execute("SHOW listen_addresses").fetchone() == ("",)
    assert not postgres.folder.exists()


def test_it_dies_with_the_process_that_started_it() -> None:
    """Also when that one is killed, and can clean up nothing."""
    keeper = subprocess.Popen([sys.executable, "-c", _KEEPER], stdout=subprocess.PIPE, text=True)
    assert keeper.stdout is not None
    with keeper.stdout as output:
        folder = Path(output.readline().strip())
    server = int((folder / "data" / "postmaster.pid").read_text().splitlines()[0])
    assert not is_gone(server)
    keeper.send_signal(signal.SIGKILL)
    keeper.wait()
    wait_until(lambda: is_gone(server))
    shutil.rmtree(folder)


@pytest.mark.parametrize("version", [16, 18])
def test_it_can_be_stopped_at_once_and_started_on_the_same_data(version: int) -> None:
    """What was committed is there after an immediate shutdown, and logins by port need the password."""
    with Postgres(version, has_defaults=True, password="secret") as postgres:
        with psycopg.connect(postgres.tcp_uri) as connection:
            connection.execute("CREATE TABLE kept (n integer)")
            connection.execute("INSERT INTO kept VALUES (1)")
            connection.commit()
            assert connection.execute("SHOW fsync").fetchone() == ("on",)
            postgres.stop_at_once()
            with pytest.raises(psycopg.OperationalError):
                connection.execute("SELECT 1")
        postgres.start()
        with psycopg.connect(postgres.uri) as connection:
            assert connection.execute("SELECT n FROM kept").fetchall() == [(1,)]
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(postgres.tcp_uri.replace("secret", "wrong"))
