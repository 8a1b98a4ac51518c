"""Child processes that end with this one, even when it is killed with SIGKILL and can clean up nothing itself.

On Linux the kernel does it: the child asks for SIGKILL when its parent dies (PR_SET_PDEATHSIG) and then becomes the
program. Elsewhere there is no such request, and only an orderly exit of the parent ends the children.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from semel.private_files import open_private

_Start = Callable[[], subprocess.Popen[bytes]]
_Call = tuple[_Start, Future[subprocess.Popen[bytes]]]

# Runs in the child before the program, in place of a `preexec_fn`, which may deadlock in a process that has threads.
# A parent that died before the request was made will never trigger it, hence the look at the parent's id afterwards.
_BECOME = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    pr_set_pdeathsig = 1
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(pr_set_pdeathsig, ctypes.c_ulong(signal.SIGKILL)) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent process ended first")
os.execv(sys.argv[2], sys.argv[2:])
"""


def spawn(
    command: Sequence[str],
    *,
    folder: Path,
    output: Path | None = None,
    to_stderr: bool = False,
    pipes: bool = False,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command` (an absolute program and its arguments) in `folder`; it cannot outlive this process.

    `output` is a file that standard output and error are appended to; with `to_stderr` they go to this process's
    standard error. With `pipes`, standard input and output are
    pipes instead and only standard error goes to `output`. Without `environment` it has this process's.
    """
    opener = None if to_stderr else open_private
    launch = [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), *command]

    def start() -> subprocess.Popen[bytes]:
        with open(2 if to_stderr else output or os.devnull, "ab", opener=opener, closefd=not to_stderr) as sink:
            return subprocess.Popen(
                launch,
                cwd=folder,
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else sink,
                stderr=sink,
                env=environment,
                start_new_session=True,  # Ctrl-C in a terminal is for the tests, which then close the child in order
            )

    return _Spawner.of_this_process().call(start)


class _Spawner:
    """The thread that starts every child.

    "Parent" means the parent *thread* to PR_SET_PDEATHSIG: a child started by a short-lived thread would be killed when
    that thread ends. This one lives as long as the process.
    """

    _current: _Spawner | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self.process_id = os.getpid()
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="semel-spawner", daemon=True).start()

    @classmethod
    def of_this_process(cls) -> _Spawner:
        with cls._lock:
            if cls._current is None or cls._current.process_id != os.getpid():  # threads do not survive a fork
                cls._current = cls()
            return cls._current

    def call(self, start: _Start) -> subprocess.Popen[bytes]:
        future: Future[subprocess.Popen[bytes]] = Future()
        self._calls.put((start, future))
        return future.result()

    def _run(self) -> None:
        while True:
            start, future = self._calls.get()
            try:
                future.set_result(start())
            except OSError as error:
                future.set_exception(error)
