"""The page of `semel broker --ui`: a process beside the broker, so that looking at it takes nothing from its loop."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from semel.broker.listeners import ListenerSettings
from semel.processes import spawn

_STOP_S: Final = 5.0
_ALL_ADDRESSES: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def start_page(listeners: Iterable[ListenerSettings], ports: Sequence[int], page_port: int) -> subprocess.Popen[bytes]:
    """Start the page for the first listener without TLS and login. It says on standard error where it is."""
    bootstrap = next(
        _address(listener.host, port)
        for listener, port in zip(listeners, ports, strict=True)
        if listener.security_protocol == "PLAINTEXT"
    )
    command = ["ui", "--bootstrap", bootstrap, "--port", str(page_port)]
    # What is set there for the commands may be about another cluster.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SEMEL_")}
    return spawn(
        [sys.executable, "-c", "from semel.cli.entry import main; main()", *command],
        folder=Path.cwd(),
        to_stderr=True,
        environment=environment,
    )


def stop_page(page: subprocess.Popen[bytes]) -> None:
    """End it, and wait until it has ended."""
    page.terminate()
    try:
        page.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        page.kill()
        page.wait()


def _address(host: str, port: int) -> str:
    host = _ALL_ADDRESSES.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
