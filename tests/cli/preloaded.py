"""Runs `semel` commands as processes of their own that begin where the imports are done, so that each costs little."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

WAIT_S = 120


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended, and what it said."""

    status: int
    stdout: str
    stderr: str


class Preloaded:
    """A process that has loaded all commands, and forks one of them at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        self._pid = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(WAIT_S)

    def start(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        stdout: str | None = None,
        stderr: str | None = None,
    ) -> None:
        """Standard streams are paths: nothing to read, and files, without them. `stdout="closed"` is a pipe without a
        reader."""
        if stdin is None:
            stdin = os.devnull
        request: dict[str, Any] = {
            "arguments": list(arguments),
            "env": dict(env or {}),
            "streams": [stdin, stdout or str(self._folder / "out"), stderr or str(self._folder / "err")],
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        self._pid = int(self._answer(WAIT_S))

    def interrupt(self) -> None:
        os.kill(self._pid, signal.SIGINT)

    def interrupt_until_it_ends(self) -> None:
        """A signal that comes just before a process begins to read does not wake it, as with any program in Python."""
        end = time.monotonic() + WAIT_S
        self.interrupt()
        while not self._has_answered(10) and time.monotonic() < end:
            self.interrupt()

    def wait_a_moment(self) -> None:
        """For what happens without a sign, such as that a handler has run."""
        time.sleep(0.1)

    def said(self) -> str:
        """What it has printed so far, on both streams."""
        return "".join(path.read_text() for name in ("out", "err") if (path := self._folder / name).exists())

    def wait_until_said(self, what: str) -> None:
        end = time.monotonic() + WAIT_S
        while what not in self.said():
            assert time.monotonic() < end, self.said()
            assert not self._has_answered(0.02), self.said()

    def end(self) -> Ended:
        if not self._has_answered(WAIT_S):
            os.kill(self._pid, signal.SIGKILL)
            self._answer(WAIT_S)
            raise AssertionError(f"It did not end: {self.said()}")
        status = os.waitstatus_to_exitcode(int(self._answer(0)))
        out, err = (self._folder / name for name in ("out", "err"))
        ended = Ended(status, *(path.read_text() if path.exists() else "" for path in (out, err)))
        for path in (out, err):
            path.unlink(missing_ok=True)
        return ended

    def _has_answered(self, wait_s: float) -> bool:
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], wait_s)[0])

    def _answer(self, wait_s: float) -> str:
        assert self._has_answered(wait_s), "the process that starts commands does not answer"
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def serve() -> None:
    """Returns in each forked child, which then is the command."""
    import semel.cli.main

    assert semel.cli.main.app
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        if (pid := os.fork()) == 0:
            become(request)
            return
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)
    os._exit(0)


def become(request: Mapping[str, Any]) -> None:
    stdin, stdout, stderr = request["streams"]
    os.dup2(os.open(stdin, os.O_RDONLY), 0)
    if stdout == "closed":
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
    else:
        os.dup2(os.open(stdout, os.O_RDWR | os.O_CREAT, 0o600), 1)
    os.dup2(os.open(stderr, os.O_RDWR | os.O_CREAT, 0o600), 2)
    # What the loop has read ahead is not this command's, and whether a stream can seek is remembered.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.update(request["env"])
    sys.argv = ["semel", *request["arguments"]]


if __name__ == "__main__":
    serve()
    from semel.cli.entry import main

    main()
