"""Keeps a user's command running: starts it, lets faults kill and stop its whole process tree, and starts it again.

A command that ends by itself with status 0, such as a batch job, is started again too. One that fails is started again
after a pause that grows, and the failures that no fault explains are counted.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from semel.errors import ConfigError
from semel.processes import spawn
from semel.verify.programs.process_tree import MARK, end_tree, signal_tree

_AGAIN_S: Final = 0.2
_AGAIN_MAX_S: Final = 5.0
_STOP_S: Final = 15.0
_LAST_LINES: Final = 15


@dataclass(frozen=True)
class CommandLine:
    """The user's command. In its words, `{bootstrap}` and the like stand for what a run fills in."""

    words: tuple[str, ...]
    program: str
    """The absolute path of the first word."""

    @classmethod
    def parse(cls, text: str) -> CommandLine:
        """
        >>> CommandLine.parse("sh job.sh --to {output}").filled({"output": "invoices"})[1:]
        ['job.sh', '--to', 'invoices']
        """
        try:
            words = tuple(shlex.split(text))
        except ValueError as error:
            raise ConfigError(f"The command {text!r} cannot be read: {error}.") from error
        if not words:
            raise ConfigError("The command is empty: write --command 'python my_job.py'.")
        # The environment that Semel runs in, not whichever Python comes first on the PATH.
        found = sys.executable if words[0] in ("python", "python3") else shutil.which(words[0])
        if found is None:
            raise ConfigError(f"The command {words[0]!r} was not found: write its full path, or correct PATH.")
        return cls(words, os.path.abspath(found))

    def filled(self, values: Mapping[str, str]) -> list[str]:
        """Only these names in braces are replaced: other braces may be JSON."""
        filled = [self.program]
        for word in self.words[1:]:
            for name, value in values.items():
                word = word.replace(f"{{{name}}}", value)
            filled.append(word)
        return filled


@dataclass(frozen=True)
class Ended:
    """How a life ended that nobody ended."""

    at_ns: int
    status: int
    """As of `subprocess`: below 0 for a signal."""
    is_explained: bool
    """Whether a fault was near, which a program may fail of."""
    last_words: str


@dataclass(eq=False)
class _Instance:
    name: str
    number: int
    process: subprocess.Popen[bytes] | None = None
    count: int = 0
    log_begin: int = 0
    killed: set[int] = field(default_factory=set[int])
    may_start_at: float = 0.0
    failures_in_a_row: int = 0


class Program:
    """Has the face of `semel.verify.faults.driver.Workers`; the driver's threads call it too."""

    def __init__(
        self,
        line: CommandLine,
        *,
        folder: Path,
        values: Mapping[str, str],
        instances: int,
        is_fault_near: Callable[[], bool],
    ) -> None:
        self._line = line
        self._folder = folder
        self._values = values
        self._is_fault_near = is_fault_near
        self._mark = secrets.token_hex(8)
        self._lock = threading.RLock()
        self._is_stopping = False
        self._instances = {f"command-{n}": _Instance(f"command-{n}", n) for n in range(instances)}
        self.ended: list[Ended] = []
        self.done = 0
        """How often the command ended by itself with status 0."""

    @property
    def names(self) -> list[str]:
        return list(self._instances)

    @property
    def lives(self) -> int:
        return sum(one.count for one in self._instances.values())

    @property
    def is_running(self) -> bool:
        return any(self.process_id(name) is not None for name in self._instances)

    @property
    def failures_in_a_row(self) -> int:
        """That no fault explains, since the command last ran well; of the instance that fails most."""
        return max(one.failures_in_a_row for one in self._instances.values())

    def log_path(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    # What the driver of the faults calls.

    def process_id(self, name: str) -> int | None:
        with self._lock:
            process = self._instances[name].process
            return process.pid if process is not None and process.poll() is None else None

    def send_signal(self, process_id: int, number: signal.Signals) -> None:
        """To the whole tree of a life."""
        if number is signal.SIGKILL:
            with self._lock:
                for one in self._instances.values():
                    if one.process is not None and one.process.pid == process_id:
                        one.killed.add(process_id)
        signal_tree(process_id, self._mark_of(process_id), number)

    def start(self, name: str) -> None:
        """Begin the next life, unless one is running or it is too early after a failure."""
        with self._lock:
            one = self._instances[name]
            if one.process is not None and one.process.poll() is None:
                return
            self._bury(one)
            if not self._is_stopping and time.monotonic() >= one.may_start_at:
                self._begin_life(one)

    # What the run calls.

    def tend(self) -> None:
        """Start what has ended."""
        for name in self._instances:
            self.start(name)

    def works(self) -> None:
        """An output was seen: earlier failures are over."""
        with self._lock:
            for one in self._instances.values():
                one.failures_in_a_row = 0

    def stop(self) -> None:
        """SIGTERM for all, and SIGKILL for those that go on."""
        with self._lock:
            self._is_stopping = True
            processes = [one.process for one in self._instances.values() if one.process is not None]
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.kill_all()

    def kill_all(self) -> None:
        """Leave nobody behind, whatever happened."""
        with self._lock:
            self._is_stopping = True
            for one in self._instances.values():
                if one.process is not None:
                    with suppress(ProcessLookupError):
                        os.killpg(one.process.pid, signal.SIGKILL)
                    end_tree(one.process.pid, self._mark_of(one.process.pid))
                    one.process.wait()
                    one.process = None

    def last_words(self) -> str:
        """The end of the log of the life that failed last, or of the first instance."""
        return self.ended[-1].last_words if self.ended else self._last_words(next(iter(self._instances.values())))

    def _mark_of(self, process_id: int) -> str:
        """Each life has a mark of its own: a kill must not reach the life after it."""
        with self._lock:
            for one in self._instances.values():
                if one.process is not None and one.process.pid == process_id:
                    return f"{self._mark}-{one.number}-{one.count}"
        return f"{self._mark}-none"

    def _begin_life(self, one: _Instance) -> None:
        values = {**self._values, "instance": str(one.number)}
        log = self.log_path(one.name)
        one.count += 1
        with log.open("a") as file:
            file.write(f"--- life {one.count} of {one.name}, {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n")
        one.log_begin = log.stat().st_size
        environment = {f"SEMEL_{name.upper()}": value for name, value in values.items()}
        environment["KAFKA_BOOTSTRAP_SERVERS"] = values["bootstrap"]
        environment[MARK] = f"{self._mark}-{one.number}-{one.count}"
        one.process = spawn(
            self._line.filled(values), folder=Path.cwd(), output=log, environment={**os.environ, **environment}
        )

    def _bury(self, one: _Instance) -> None:
        process, status = one.process, one.process.returncode if one.process is not None else 0
        if process is None:
            return
        end_tree(process.pid, self._mark_of(process.pid))  # children that outlive their parent would be a second life
        one.process = None
        now = time.monotonic()
        if process.pid in one.killed or self._is_stopping:
            one.may_start_at = 0.0
        elif status == 0:
            self.done += 1
            one.failures_in_a_row = 0
            one.may_start_at = now + _AGAIN_S
        else:
            is_explained = self._is_fault_near()
            one.failures_in_a_row += not is_explained
            one.may_start_at = now + min(_AGAIN_MAX_S, _AGAIN_S * 2**one.failures_in_a_row)
            self.ended.append(Ended(time.monotonic_ns(), status, is_explained, self._last_words(one)))

    def _last_words(self, one: _Instance) -> str:
        log = self.log_path(one.name)
        if not log.exists():
            return "it said nothing."
        with log.open("rb") as file:
            file.seek(one.log_begin)
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_LAST_LINES:]) or "it said nothing."


def described(status: int) -> str:
    """
    >>> described(3), described(-9)
    ('exit status 3', 'signal SIGKILL')
    """
    return f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
