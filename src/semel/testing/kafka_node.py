"""One node of an Apache Kafka under test: a folder, a Java process in it, and the ways to end and revive it.

A release that has no KRaft yet also needs a ZooKeeper, which is such a process too.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from semel.errors import BrokerUnreachable, ConfigError, ConnectionLost, InvalidState, RequestTimedOut, SemelError
from semel.processes import spawn
from semel.testing.exchange import live_brokers
from semel.testing.maven import java_command
from semel.testing.security import Protocol

HOST = "127.0.0.1"
FORMAT_TIMEOUT_S = 120.0
POLL_S = 0.05
LOG_TAIL_LINES = 25

# The first-stage compiler alone and the simplest collector save about a second of start-up on a busy machine.
QUICK_START = ("-Xms256m", "-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
# What a benchmark wants instead: the compiler and collector of a real deployment.
FULL_SPEED = ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20")


class PortTaken(SemelError):
    """Another process took a port between its choice and the broker's use of it."""


class StillRegistered(SemelError):
    """ZooKeeper has not noticed yet that the broker's last process is gone, and refuses the new one."""


class JavaProcess:
    """A program of Apache Kafka's jars, in a folder of its own."""

    def __init__(self, name: str, *, folder: Path, jars: Path, jvm: Sequence[str], log_level: str) -> None:
        self.name = name
        self.folder = folder
        self.log_path = folder / "kafka.log"
        self._jars = jars
        self._jvm = jvm
        self._log_level = log_level
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        folder.mkdir(parents=True)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The id of the Java process, for signals of your own such as SIGSTOP."""
        if self._process is None or not self.running:
            raise InvalidState(f"{self.name} is not running: call start() first.")
        return self._process.pid

    def kill(self) -> None:
        """End the process at once with SIGKILL, as a crash would."""
        self._end(signal.SIGKILL, 30.0)

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of the log."""
        if not self.log_path.exists():
            return "(no log)"
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def _end(self, by: signal.Signals, timeout_s: float) -> None:
        if self._process is None:
            return
        self._process.send_signal(by)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _ended_early(self) -> SemelError:
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            this_run = log.read()
        if b"BindException" in this_run or b"Address already in use" in this_run:
            return PortTaken(f"A port of {self.name} is taken by another process.")
        if b"KeeperException$NodeExistsException" in this_run:
            return StillRegistered(f"ZooKeeper still knows {self.name} by its last process.")
        code = self._process.returncode if self._process else None
        return BrokerUnreachable(
            f"{self.name} of Apache Kafka ended with code {code} before it was ready. "
            f"The end of its log:\n{self.log_tail()}"
        )

    def _java(self, *arguments: str) -> subprocess.Popen[bytes]:
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        command = [
            java_command(),
            *self._jvm,
            "-XX:-UsePerfData",
            "-XX:+ExitOnOutOfMemoryError",
            "-Djava.net.preferIPv4Stack=true",
            f"-Dorg.slf4j.simpleLogger.defaultLogLevel={self._log_level}",
            "-Dorg.slf4j.simpleLogger.showDateTime=true",
            "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd HH:mm:ss.SSS",
            "-cp",
            f"{self._jars}{os.sep}*",
            *arguments,
        ]
        return spawn(command, folder=self.folder, output=self.log_path)


class Node(JavaProcess):
    """A broker, with KRaft also a controller, in one process. Made by `ApacheKafka`, which owns its folder."""

    def __init__(
        self,
        node_id: int,
        *,
        folder: Path,
        jars: Path,
        ports: Mapping[Protocol, int],
        properties: Mapping[str, str],
        jvm: Sequence[str],
        log_level: str,
        ready_timeout_s: float,
    ) -> None:
        super().__init__(f"Node {node_id}", folder=folder, jars=jars, jvm=jvm, log_level=log_level)
        self.node_id = node_id
        self.ports = ports
        self._ready_timeout_s = ready_timeout_s
        self._properties_path = folder / "server.properties"
        self._properties_path.write_text(write_properties(properties))

    def __repr__(self) -> str:
        return f"Node({self.node_id}, {self.address}, {f'pid={self.pid}' if self.running else 'not running'})"

    @property
    def address(self) -> str:
        """`host:port` of the plaintext listener."""
        return f"{HOST}:{self.ports['PLAINTEXT']}"

    def begin_format(self, arguments: Sequence[str]) -> None:
        """Start to write the node's empty storage; `finish_format` waits for it."""
        self._process = self._java("kafka.tools.StorageTool", "format", f"--config={self._properties_path}", *arguments)

    def finish_format(self) -> None:
        if self._process is None:
            raise InvalidState(f"The storage of node {self.node_id} is not being formatted.")
        try:
            code = self._process.wait(FORMAT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise BrokerUnreachable(f"Node {self.node_id} was not formatted in {FORMAT_TIMEOUT_S} s.") from None
        if code != 0:
            raise ConfigError(f"The storage of node {self.node_id} could not be formatted.\n{self.log_tail()}")

    def launch(self) -> None:
        """Start the process without waiting for it."""
        if self.running:
            raise InvalidState(f"Node {self.node_id} is already running as process {self.pid}.")
        self._process = self._java("kafka.Kafka", str(self._properties_path))

    def start(self) -> None:
        """Start again on the same data and ports, and return when the node takes requests."""
        deadline = time.monotonic() + self._ready_timeout_s
        while True:
            self.launch()
            try:
                return self.wait_ready({self.node_id}, deadline)
            except (PortTaken, StillRegistered):
                # Its old port may be in use for a moment, by a client's outgoing connection for example, and its old
                # registration is in ZooKeeper until that session expires.
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)

    def wait_ready(self, brokers: set[int], deadline: float) -> None:
        """Return when this node answers and knows `brokers` as registered and unfenced."""
        while True:
            if not self.running:
                raise self._ended_early()
            seen = self._brokers_seen()
            if brokers <= seen:
                return
            if time.monotonic() > deadline:
                raise BrokerUnreachable(
                    f"Node {self.node_id} of Apache Kafka was not ready in time: it sees the brokers {sorted(seen)} "
                    f"of {sorted(brokers)}. The end of its log:\n{self.log_tail()}"
                )
            time.sleep(POLL_S)

    def stop(self, timeout_s: float = 30.0) -> None:
        """End the process in order (SIGTERM: leaders move away, files are closed), or kill it after `timeout_s`."""
        self._end(signal.SIGTERM, timeout_s)

    def _brokers_seen(self) -> set[int]:
        try:
            return live_brokers((HOST, self.ports["PLAINTEXT"]))
        except (BrokerUnreachable, ConnectionLost, RequestTimedOut):
            return set()


class ZooKeeper(JavaProcess):
    """A ZooKeeper of one process, from the jars that old releases of Kafka bring along."""

    def __init__(self, *, folder: Path, port: int, jars: Path, jvm: Sequence[str], log_level: str) -> None:
        super().__init__("The ZooKeeper", folder=folder, jars=jars, jvm=jvm, log_level=log_level)
        self.port = port

    def start(self, deadline: float) -> None:
        """Start it and return when it answers."""
        settings = {
            "dataDir": str(self.folder / "data"),
            "clientPortAddress": HOST,
            "clientPort": str(self.port),
            "tickTime": "500",  # a session may be as short as two ticks
            "maxClientCnxns": "0",  # no limit
            "admin.enableServer": "false",  # it would need a web server, which Kafka leaves out
        }
        path = self.folder / "zookeeper.properties"
        path.write_text(write_properties(settings))
        self._process = self._java("org.apache.zookeeper.server.ZooKeeperServerMain", str(path))
        while not self._answers():
            if not self.running:
                raise self._ended_early()
            if time.monotonic() > deadline:
                raise BrokerUnreachable(f"ZooKeeper was not ready in time. The end of its log:\n{self.log_tail()}")
            time.sleep(POLL_S)

    def _answers(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), timeout=5.0) as connection:
                connection.sendall(b"srvr")
                return connection.recv(64).startswith(b"Zookeeper version")
        except OSError:
            return False


def write_properties(settings: Mapping[str, str]) -> str:
    r"""The text of a Java properties file.

    >>> write_properties({"listener.name.a": "first\nsecond"})
    'listener.name.a=first\\nsecond\n'
    """
    escapes = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"})
    lines = (f"{key}={value.translate(escapes)}\n" for key, value in settings.items())
    text = "".join(lines)
    return "".join(char if ord(char) < 128 else _unicode_escape(char) for char in text)


def _unicode_escape(char: str) -> str:
    units = char.encode("utf-16-be")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
