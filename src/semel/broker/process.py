"""A broker as a process of its own, started and ended from Python."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

from semel.errors import BrokerUnreachable, ConfigError, InvalidState, SemelError
from semel.processes import spawn

_READY: Final = b"semel broker ready on "
_LAST_LINES: Final = 15
_READ_BYTES: Final = 4096


class Broker:
    """A Kafka broker for tests and for work on one machine, in its own process; any Kafka client can use it.

    >>> import semel
    >>> with semel.Broker(config={"num.partitions": 3}) as broker:
    ...     with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
    ...         admin.create_topics("orders")
    ...         broker.kill()      # as kill -9 does
    ...         broker.restart()   # at the same address, with the same data
    ...         print("orders" in admin.list_topics())
    True

    It listens on the loopback interface only unless `host` says otherwise, on a free port unless `port` does. Its data
    is in a temporary folder that is removed at the end, or in `data`, which stays. `config` has Kafka's names of
    settings. `fsync` says what survives a power cut: "commit" (transactions that were committed), "always" or "never".
    `arguments` are more of what `semel broker` takes, such as `["--listener", "SSL://127.0.0.1:0", ...]`.

    The process ends with this one, whatever ends it, and the temporary folder goes with it. Nothing runs before `with`
    or `start()`.
    """

    def __init__(
        self,
        data: str | os.PathLike[str] | None = None,
        port: int = 0,
        fsync: Literal["always", "commit", "never"] = "commit",
        config: Mapping[str, object] | None = None,
        *,
        host: str = "127.0.0.1",
        metrics_port: int | None = None,
        log_level: Literal["debug", "info", "warning", "error"] = "info",
        arguments: Sequence[str] = (),
        start_timeout_s: float = 30.0,
    ) -> None:
        self._data = None if data is None else Path(data).absolute()
        self._host = host
        self._port = port
        self._start_timeout_s = start_timeout_s
        self._arguments = ["--fsync", fsync, "--log-level", log_level]
        for name, value in (config or {}).items():
            self._arguments += ["--config", f"{name}={_text(value)}"]
        if metrics_port is not None:
            self._arguments += ["--metrics-port", str(metrics_port)]
        self._arguments += arguments
        self._has_listeners = any(argument.startswith("--listener") for argument in arguments)
        if self._has_listeners and (port or host != "127.0.0.1"):
            raise ConfigError("The arguments name listeners, and so do host and port: use one or the other.")
        self._bootstrap: str | None = None
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._clean_up: weakref.finalize[..., Broker] | None = None

    def __repr__(self) -> str:
        return f"Broker({self._bootstrap}, {f'process {self.process_id}' if self.is_running else 'not running'})"

    # What there is.

    @property
    def bootstrap(self) -> str:
        """`host:port`, for a client's `bootstrap.servers`. Stays the same when the broker is restarted."""
        if self._bootstrap is None:
            raise InvalidState("The broker has not been started: use `with Broker() as broker`, or call start().")
        return self._bootstrap

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def process_id(self) -> int:
        """For signals of your own."""
        return self._running().pid

    @property
    def data(self) -> Path:
        """The data directory."""
        return self._data or self._own_folder() / "data"

    @property
    def log_path(self) -> Path:
        """What the broker has said on standard error, over all of its starts."""
        return self._own_folder() / "broker.log"

    # Starting and ending.

    def __enter__(self) -> Broker:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start it and return when clients can connect; at its old port if it had one."""
        if self.is_running:
            raise InvalidState(f"The broker is already running as process {self.process_id}.")
        folder = self._own_folder()
        log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        where = [] if self._has_listeners else ["--host", self._host, "--port", str(self._port)]
        # -P: a file of the user's called like a module of the standard library, in whichever folder, is not for us.
        command = [sys.executable, "-P", "-m", "semel.broker", "--data", str(self.data), *where, *self._arguments]
        process = self._process = spawn(command, folder=folder, output=self.log_path, pipes=True)
        if self._watcher is None:
            self._watcher = _watch_folder(folder)
        self._clean_up = weakref.finalize(self, _end, process, folder, self._watcher)
        try:
            self._bootstrap = _wait_ready(process, self._start_timeout_s)
        except BaseException as failure:
            self._signal_and_wait(signal.SIGKILL, 30.0)
            if not isinstance(failure, _NotReady):
                raise
            raise _did_not_start(str(failure), self.log_path, log_start) from None
        self._port = self._port or int(self._bootstrap.rpartition(":")[2])

    def stop(self, timeout_s: float = 30.0) -> None:
        """End it cleanly (SIGTERM) and wait. Its data stays, for `restart`."""
        if self.is_running:
            self._signal_and_wait(signal.SIGTERM, timeout_s)

    def kill(self) -> None:
        """End it at once (SIGKILL), as a crash would. Its data stays, for `restart`."""
        if self.is_running:
            self._signal_and_wait(signal.SIGKILL, 30.0)

    def restart(self) -> None:
        """Start it again on the same port and data; if it still runs, it is stopped cleanly before."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Let it stand still (SIGSTOP): connections stay open and nothing is answered."""
        self._running().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after `pause`."""
        self._running().send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Stop it and remove the temporary folder, with the data in it unless `data` was given."""
        self.stop()
        if self._clean_up is not None:
            self._clean_up()
        self._folder = self._watcher = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            raise InvalidState("The broker is not running: call start() or restart() first.")
        return self._process

    def _own_folder(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="semel-broker-"))
        return self._folder

    def _signal_and_wait(self, number: signal.Signals, timeout_s: float) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)  # one that is paused would never see a SIGTERM
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _close_pipes(process)


class _NotReady(Exception):
    """It has ended, or said nothing in time."""


def _wait_ready(process: subprocess.Popen[bytes], timeout_s: float) -> str:
    """The address in the line that the broker prints when clients can connect."""
    assert process.stdout is not None
    output, said = process.stdout.fileno(), b""
    deadline = time.monotonic() + timeout_s
    while b"\n" not in said:
        readable, _, _ = select.select([output], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            raise _NotReady(f"was not ready within {timeout_s:g} s")
        piece = os.read(output, _READ_BYTES)
        if not piece:
            raise _NotReady(f"ended with code {process.wait()} before it was ready")
        said += piece
    line = said.partition(b"\n")[0]
    if not line.startswith(_READY):
        raise _NotReady(f"said {line.decode(errors='replace')!r} instead of that it is ready")
    return line.removeprefix(_READY).decode()


def _did_not_start(what: str, log_path: Path, log_start: int) -> SemelError:
    with log_path.open("rb") as log:
        log.seek(log_start)
        words = log.read().decode(errors="replace").strip()
    last = "\n".join(words.splitlines()[-_LAST_LINES:])
    return BrokerUnreachable(f"The broker {what}. {'Its last words:' if last else 'It said nothing.'}\n{last}".strip())


_REMOVE_AFTER_EOF: Final = """
read -r nothing
for try in 1 2 3 4 5 6 7 8 9 10; do
    rm -rf -- "$1" && exit
    sleep 0.2
done
"""


def _watch_folder(folder: Path) -> subprocess.Popen[bytes]:
    """Remove the folder when this process is gone, even by SIGKILL, which also ends the broker before it could do so.

    A shell waits for the end of a pipe of which only this process has the other end. It is in its own session, so that
    a signal to this process's group does not end it first.
    """
    return subprocess.Popen(
        ["/bin/sh", "-c", _REMOVE_AFTER_EOF, "semel-broker-folder", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes], folder: Path, watcher: subprocess.Popen[bytes]) -> None:
    """What is left to do when nobody has the object any more, or the interpreter ends."""
    for child in (process, watcher):
        if child.poll() is None:
            child.kill()
            child.wait()
        _close_pipes(child)
    shutil.rmtree(folder, ignore_errors=True)


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
