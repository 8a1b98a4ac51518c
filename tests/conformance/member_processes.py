"""Members of a consumer group as processes of their own: how each client's program is run, told and listened to.

`copiers/member.py` has what is said over the pipes.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from targets import Target

from semel.processes import spawn
from semel.testing.apache_kafka import LATEST, kafka_jars
from semel.testing.maven import java_command

HERE = Path(__file__).parent
BUILD_TIMEOUT_S = 600
LEAVE_TIMEOUT_S = 60.0

Command = Callable[[], list[str]]
"""The program and its first arguments; built at the first call."""


@dataclass(frozen=True, slots=True)
class Client:
    """A client library with one of the protocols of groups: `eager`, `cooperative` (classic), `consumer` (KIP-848)."""

    name: str
    protocol: str
    command: Command = field(repr=False)
    needs: str | None = None
    """A program that must be on the PATH."""

    def __str__(self) -> str:
        return f"{self.name}-{self.protocol}"

    def left_out_on(self, target: Target | None) -> str | None:
        """Why this client cannot be tried on the target, or anywhere, if so."""
        if self.needs and shutil.which(self.needs) is None:
            return f"{self.name}: `{self.needs}` is not on the PATH"
        if self.protocol == "consumer" and target is not None and not target.has_consumer_groups:
            return f"{self}: {target.name} has no consumer groups of KIP-848"
        return None


def python_program(file: str) -> Command:
    return lambda: [sys.executable, str(HERE / file)]


def java_program(name: str) -> Command:
    @functools.cache
    def build() -> list[str]:
        folder, jars = _build_folder() / name, ":".join(map(str, kafka_jars(LATEST).glob("*.jar")))
        compiler = [java_command(), "-m", "jdk.compiler/com.sun.tools.javac.Main"]
        _run([*compiler, "-cp", jars, "-d", str(folder), str(HERE / "java" / f"{name}.java")])
        quick = ["-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData"]
        quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"
        return [java_command(), *quick, quiet, "-cp", f"{folder}:{jars}", name]

    return build


def go_program(name: str) -> Command:
    @functools.cache
    def build() -> list[str]:
        go = shutil.which("go")
        assert go is not None  # left out at collection otherwise
        program = str(_build_folder() / name)
        _run([go, "build", "-o", program, f"./{name}"])
        return [program]

    return build


@functools.cache
def _build_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="semel-members-")
    atexit.register(shutil.rmtree, folder)
    return Path(folder)


def _run(command: list[str]) -> None:
    built = subprocess.run(
        command, cwd=HERE / "go", capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr


class Member:
    """One running program; a context manager that kills it at the end if it has not left by then."""

    def __init__(self, name: str, client: Client, folder: Path, settings: Mapping[str, object]) -> None:
        self.name = name
        arguments = [f"{key}={value}" for key, value in settings.items()]
        self._log = folder / f"{name}.log"
        self._process = spawn([*client.command(), *arguments], folder=folder, output=self._log, pipes=True)
        self._events: list[tuple[str, list[str]]] = []
        self._changed = threading.Condition()
        self._listener = threading.Thread(target=self._listen, name=f"events of {name}", daemon=True)
        self._listener.start()

    def __enter__(self) -> Member:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()

    # What it is told.

    def join(self) -> None:
        """Let it begin, once it is loaded."""
        self.wait_until(lambda: bool(self.events("ready")), "ready")
        self.tell("join")

    def tell(self, *words: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)).encode() + b"\n")
        self._process.stdin.flush()

    def leave(self) -> None:
        """Ask it to leave the group in order, and check that it did."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(LEAVE_TIMEOUT_S) == 0, self.last_words()

    def kill(self) -> None:
        """SIGKILL: it has no chance to leave the group or to end its transaction."""
        self._process.kill()
        self._process.wait()
        self._listener.join()

    # What it has reported.

    def events(self, kind: str) -> list[list[str]]:
        with self._changed:
            return [details for event, details in self._events if event == kind]

    def count(self, kind: str) -> int:
        """The sum over reports such as `committed 750`."""
        return sum(int(details[0]) for details in self.events(kind))

    def assignment(self) -> set[int]:
        """The partitions it has, by its reports; an eager member tells of all, a cooperative one of what is added."""
        owned: set[int] = set()
        with self._changed:
            for event, details in self._events:
                if event == "assigned":
                    owned |= set(map(int, details))
                elif event == "revoked":
                    owned -= set(map(int, details))
        return owned

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
        assert self.holds_within(timeout_s, condition), f"not {what} within {timeout_s} s: {self.last_words()}"

    def holds_within(self, timeout_s: float, condition: Callable[[], bool]) -> bool:
        """Wait for reports until the condition holds; False when it did not in time."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.assert_running()
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            with self._changed:
                self._changed.wait(min(left, 0.1))
        return True

    def assert_running(self) -> None:
        assert self._process.poll() is None, f"ended by itself: {self.last_words()}"

    def last_words(self) -> str:
        with self._changed:
            events = [" ".join([event, *details]) for event, details in self._events[-20:]]
        errors = self._log.read_text(errors="replace")[-4000:] if self._log.exists() else ""
        return f"{self.name}, last events {events}, on standard error:\n{errors}"

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event, *details = line.decode(errors="replace").split()
            with self._changed:
                self._events.append((event, details))
                self._changed.notify_all()
