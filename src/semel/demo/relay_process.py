"""`semel relay` as a process that brings the shop's orders to Kafka, and is killed and started again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from semel.demo.driver_process import last_words
from semel.demo.shop import SHOP
from semel.demo.tables import Tables
from semel.errors import SemelError
from semel.processes import spawn

_ROWS_MAX: Final = 500
"""Readers see the end of a transaction in one partition before the other. So few orders cover less of the shop's clock
than the pipeline's windows wait for."""
_PATIENCE_S: Final = 240


class RelayEnded(SemelError):
    """The relay ended although nobody killed it."""


class RelayProcess:
    """One life of the relay, with the options that a user would give it."""

    def __init__(self, bootstrap: str, tables: Tables, folder: Path) -> None:
        self._log = folder / "relay.log"
        program = [sys.executable, "-P", "-c", "from semel.cli.entry import main; main()", "relay"]
        options = ["--name", SHOP, "--bootstrap", bootstrap]
        options += ["--transaction-rows-max", str(_ROWS_MAX), "--retry-s", str(_PATIENCE_S)]
        # The URL may hold a password, which other users could see among the arguments.
        environment = {**os.environ, "SEMEL_DATABASE": tables.address(SHOP)}
        self._process: subprocess.Popen[bytes] = spawn(
            [*program, *options], folder=folder, output=self._log, environment=environment
        )

    def check(self) -> None:
        """Raise if it has ended by itself."""
        if self._process.poll() is not None:
            raise RelayEnded(
                f"The relay ended with code {self._process.poll()}. Its last words:\n{last_words(self._log)}"
            )

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
