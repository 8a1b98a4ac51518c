"""The driver as a process that is started, listened to, killed and started again."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from semel.demo.tables import Tables
from semel.demo.victims import Process, descendants, kill_family, kill_rest
from semel.errors import SemelError
from semel.processes import spawn

_LAST_LINES: Final = 12


class DriverFailed(SemelError):
    """The driver ended although nobody killed it."""


class DriverProcess:
    """One life of the driver. `listen` is called, in a thread, with every event that it tells."""

    def __init__(self, bootstrap: str, tables: Tables, folder: Path, listen: Callable[[dict[str, Any]], None]) -> None:
        told = json.dumps({"bootstrap": bootstrap, "tables": asdict(tables), "folder": str(folder)})
        self._log = folder / "driver.log"
        self._listen = listen
        self._is_killed = False
        self._family: list[Process] = []
        command = [sys.executable, "-P", "-m", "semel.demo.driver", told]
        self._process: subprocess.Popen[bytes] = spawn(command, folder=folder, output=self._log, pipes=True)
        self._reader = threading.Thread(target=self._read, name="demo-driver-events", daemon=True)
        self._reader.start()

    @property
    def process_id(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raise if it has ended by itself."""
        if self._process.poll() is not None and not self._is_killed:
            words = last_words(self._log)
            raise DriverFailed(f"The Spark driver ended with code {self._process.poll()}. Its last words:\n{words}")

    def kill(self) -> int:
        """Kill it and all that it started, as far as they still run; returns how many processes that were."""
        self._is_killed = True
        # The number of a process that has ended may be somebody else's.
        has_ended = self._process.poll() is not None
        count = kill_rest(self._family) if has_ended else kill_family(self._process.pid)
        self._process.wait()
        self._reader.join(5)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        return count

    def ask_to_finish(self) -> None:
        """Let it work off what there is, and end."""
        assert self._process.stdin is not None
        self._family = descendants(self._process.pid)
        self._process.stdin.write(b"finish\n")
        self._process.stdin.flush()

    def has_finished(self) -> bool:
        """Whether it has ended as it was asked to. Raises if it has ended otherwise."""
        if self._process.poll() == 0:
            return True
        self.check()
        return False

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # The JVM shares the pipe and may say something of its own; a kill can cut the last line short.
            if line.startswith(b"{") and line.endswith(b"}\n"):
                self._listen(json.loads(line))


def last_words(log: Path) -> str:
    """The last lines of what a process has said."""
    return "\n".join(log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:])
